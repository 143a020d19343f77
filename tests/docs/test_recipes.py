"""Every recipe in the documents is a plugin that can be installed and passes the kit it names.

The files are taken from the pages. The fast test lays them out as pip would, the slow one builds and installs wheels;
one pytest process then runs the kits of all of them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from building import build_wheels, pip, write_metadata
from ds_testing.processes import clean_environment, run

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "plugins.md", ROOT / "docs" / "architecture.md", ROOT / "README.md")
HEAD = re.compile(r"# (?P<file>[\w/]+\.py)(?:\s+group: (?P<group>[\w.]+)(?:\s+section: (?P<section>\w+))?)?$")

KITS = """
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import ds_core
from ds_testing import (
    RendezvousConformance,
    AcceleratorConformance, CheckpointerConformance, CollectivesConformance,
    ConfigFormatConformance, GradientsConformance, InterceptorConformance, KernelConformance,
    LauncherConformance, ObserverConformance,
    LoaderConformance, MonitorConformance, OptimizerConformance, PluginConformance, PrecisionConformance,
    RunnerConformance, SchedulerConformance, StateStoreConformance, TransformConformance, run_ranks,
)

class TestEarlyStop(PluginConformance):
    entry_point, section, good_config, bad_configs = "early_stop", "early_stop", {"loss": 0.5}, [{}, {"loss": "low"}]

class TestHello(PluginConformance):
    entry_point, section, good_config, bad_configs = "ds_hello.plugin", "hello", {"every": 3}, [{"every": 0}]

class TestMyBatch(PluginConformance):
    entry_point = "my_batch.plugin"

class TestMyBatchRendezvous(RendezvousConformance):
    plugin = "my_batch.plugin"

    def environment(self, rank, size):
        return {"BATCH_RANK": str(rank), "BATCH_SIZE": str(size), "BATCH_SLOT": "0", "BATCH_HOST": "localhost"}

class TestMyIni(PluginConformance):
    entry_point = "my_ini.plugin"

class TestMyIniFormat(ConfigFormatConformance):
    plugin = "my_ini.plugin"
    samples = {".ini": ("a = 1\\n[fp16]\\nenabled = true", {"a": 1, "fp16": {"enabled": True}})}
    broken = {".ini": "a = {"}
    repeated = {".ini": "a = 1\\na = 2"}

class TestMyOptim(PluginConformance):
    entry_point = "my_optim.plugin"

class TestMySign(OptimizerConformance):
    plugin, params = "my_optim.plugin", {"MySign": {"lr": 0.01}}

class TestMyHalving(SchedulerConformance):
    plugin, params = "my_optim.plugin", {"MyHalving": {"every": 3}}

class TestMyLines(PluginConformance):
    entry_point, section, good_config, bad_configs = "my_lines.plugin", "my_lines", {"file": "x"}, [{}, {"file": 3}]

class TestLineMonitor(MonitorConformance):
    def make_monitor(self, tmp_path):
        from my_lines.monitor import LineMonitor
        return LineMonitor(tmp_path / "lines")

    def read_events(self, tmp_path):
        file = tmp_path / "lines"
        return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []

class TestMySlow(PluginConformance):
    entry_point, section, good_config, bad_configs = "my_slow.plugin", "my_slow", {}, [{"seconds": 0}]

class TestSlowLog(InterceptorConformance):
    config = {"my_slow": {"seconds": 1e-9}}

class TestMyClamp(GradientsConformance):
    config = {"my_clamp": {"limit": 0.01}}

class TestMyClampPlugin(PluginConformance):
    entry_point, section = "my_clamp.plugin", "my_clamp"
    good_config, bad_configs = {"limit": 0.5}, [{}, {"limit": 0}]

class TestMyDeadline(ObserverConformance):
    config = {"my_deadline": {"seconds": 3600}}

class TestMyDeadlineIsOver(ObserverConformance):
    config, stops_at = {"my_deadline": {"seconds": 1e-9}}, 1

class TestMyDeadlinePlugin(PluginConformance):
    entry_point, section = "my_deadline.plugin", "my_deadline"
    good_config, bad_configs = {"seconds": 1}, [{}, {"seconds": 0}]

class TestMyWeights(ObserverConformance):
    config, metrics = {"my_weights": {}}, ("Train/Samples/largest_weight",)

class TestMyWeightsPlugin(PluginConformance):
    entry_point, section = "my_weights.plugin", "my_weights"
    good_config, bad_configs = {"every": 10}, [{"every": 0}]

class TestMyMethod(PluginConformance):
    entry_point, section, good_config = "my_method.plugin", "my_method", {}

class TestMyDevice(PluginConformance):
    entry_point = "my_device.plugin"

class TestMyAccelerator(AcceleratorConformance):
    resets_peak = False

    def accelerator_factory(self):
        from my_device.device import MyAccelerator
        return MyAccelerator()

class TestMyTowers(PluginConformance):
    entry_point, section, good_config, bad_configs = "my_towers.plugin", "my_towers", {"size": 2}, [{"size": 0}]

class TestMyUnits(PluginConformance):
    entry_point = "my_units.plugin"

class TestMyPlain(PluginConformance):
    entry_point, section, good_config = "my_plain.plugin", "plain", {}

class TestMyDcp(PluginConformance):
    entry_point, section, good_config = "my_dcp.plugin", "my_dcp", {}

class TestDcpCheckpointer(CheckpointerConformance):
    config, worlds = {"my_dcp": {}}, (1,)

class TestMyAttic(PluginConformance):
    entry_point = "my_attic.plugin"

class TestAttic(StateStoreConformance):
    def make_store(self, ctx, tmp_path):
        from my_attic.store import Attic
        return Attic(ctx, {})

class TestMyReplay(PluginConformance):
    entry_point, section, good_config = "my_replay.plugin", "my_replay", {"modules": ["0"]}
    bad_configs = [{"modules": 3}]

class TestReplay(TransformConformance):
    plugin, config = "my_replay.plugin", {"my_replay": {"modules": ["0", "2"]}}

class TestMyRunner(PluginConformance):
    entry_point, section, good_config = "my_runner.plugin", "my_runner", {}

class TestPulledFirst(RunnerConformance):
    config = {"my_runner": {}}

class TestMyLengths(PluginConformance):
    entry_point, section, good_config = "my_lengths.plugin", "my_lengths", {}

class TestByLength(LoaderConformance):
    config, drops = {"my_lengths": {}}, True

    def make_dataset(self):
        return [str(i) * (i % 7 + 1) for i in range(50)]

    def samples_of(self, batch):
        return list(batch)

class TestMyInt8(PluginConformance):
    entry_point, section, good_config, bad_configs = "my_int8.plugin", "my_int8", {"bits": 4}, [{"bits": 1}]

class TestFewBits(PrecisionConformance):
    config, tolerance, gas = {"my_int8": {}}, 0.02, (2,)

class TestMyNorm(PluginConformance):
    entry_point = "my_norm.plugin"

class TestMyNormKernel(KernelConformance):
    plugin = "my_norm.plugin"

class TestMyOrdered(PluginConformance):
    entry_point = "my_ordered.plugin"

class TestMyOrderedSums(CollectivesConformance):
    provider, polls, ranks, thresholds = "my_ordered.sums:OrderedSums", False, (2,), (65536,)

class TestMyLaunch(PluginConformance):
    entry_point = "my_launch.plugin"

class TestSimple(LauncherConformance):
    load = "my_launch.simple:start"

class TestMyGreeting(PluginConformance):
    entry_point = "my_greeting.plugin"

def _train(extra, steps=3):
    torch.manual_seed(0)
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "MySign", "params": {"lr": 0.01}}, **extra}
    engine, optimizer, _, schedule = ds_core.initialize(model=torch.nn.Linear(3, 1), config=config)
    losses = []
    for _ in range(steps):
        loss = engine(torch.ones(4, 3)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    served, held = engine.ctx.kernels.resolved(), {p.name: p.held for p in engine.ctx.params.values()}
    name = (type(optimizer).__name__, type(engine.partitioner).__name__, type(engine.runner).__name__)
    lr = optimizer.param_groups[0]["lr"]
    weight = engine.module.weight.detach().clone()
    assert "my_method" not in extra or engine.count_parameters() == 4
    engine.destroy()
    return losses, weight, name, lr, served, held

def test_what_is_installed_serves_when_it_is_named(tmp_path, caplog, capsys):
    caplog.set_level("INFO")
    plain = _train({})
    assert plain[0][-1] < plain[0][0] and plain[2] == ("MySign", "Replicated", "Sequential")
    everything = _train({
        "scheduler": {"type": "MyHalving", "params": {"every": 2}}, "kernels": {"squared_norm": "mine"},
        "my_lines": {"file": str(tmp_path / "lines")}, "hello": {"every": 1}, "early_stop": {"loss": 1e9},
        "plain": {}, "my_runner": {}, "my_method": {}, "my_towers": {"size": 1}, "steps_per_print": 1,
    })
    assert everything[2] == ("MySign", "PlainPartitioner", "PulledFirst")
    assert everything[3] == 0.005 and everything[4]["squared_norm/cpu/float32"] == "mine (my-norm)"
    assert "hello from step" in capsys.readouterr().out and "reached a loss of" in caplog.text
    assert (tmp_path / "lines").read_text().count("\\n") > 3

def _towers(own):
    unit = SimpleNamespace(ranks_per_tower=2) if own else None
    torch.manual_seed(ds_core.comm.rank())
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tower, self.shared = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        def forward(self, x):
            return self.shared(self.tower(x))
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    towers = {} if unit else {"my_towers": {"size": 2}}
    engine, *_ = ds_core.initialize(model=Model(), config={**config, **towers}, mpu=unit)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    found = [engine.module.tower.weight.sum().item(), engine.module.shared.weight.sum().item()]
    engine.destroy()
    return found

def test_towers_differ_and_the_rest_is_shared():
    for own in (False, True):
        (tower, shared), (other, same) = run_ranks(2, _towers, own)
        assert tower != other and shared == same

def test_the_store_keeps_values_and_gives_memory_back():
    from ds_core.plugins import Plugins
    from ds_state_stores import is_evicted, open_store
    ctx = SimpleNamespace(plugins=Plugins(), accelerator=None)
    store = open_store(ctx, "attic", {})
    tensor = store.copy_in(torch.arange(6.0))
    first, middle = tensor[:2], tensor[2:4]
    store.evict([tensor])
    assert is_evicted(tensor) and store.read(middle).tolist() == [2, 3]
    store.write(first, torch.tensor([8.0, 9.0]))
    store.fetch([tensor])
    store.wait([tensor])
    assert tensor.tolist() == [8, 9, 2, 3, 4, 5]
    store.discard([tensor])
    assert not store.kept

def test_the_device_is_found_by_its_probe():
    code = "import ds_core; print(ds_core.get_accelerator().name)"
    said = [subprocess.run([sys.executable, "-c", code], env={**os.environ, **extra}, capture_output=True, text=True)
            for extra in ({}, {"MY_DEVICE": "1"})]
    assert said[0].stdout.strip() != "mine" and said[1].stdout.strip() == "mine", said

def test_the_launcher_and_the_command(tmp_path):
    (tmp_path / "script.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    run = [sys.executable, "-m", "ds_cli"]
    done = subprocess.run([*run, "run", "--launcher", "simple", str(tmp_path / "script.py"), "7"])
    assert done.returncode == 7
    done = subprocess.run([*run, "greet", "--name", "you"], capture_output=True, text=True)
    assert done.stdout == "hello you\\n", done
"""


def recipes() -> dict[str, dict[str, str]]:
    """Distribution -> its files by path, and under "pyproject.toml" its entry point."""
    found: dict[str, dict[str, str]] = {}
    for page in PAGES:
        for code in re.findall(r"```python\n(# .*?)```", page.read_text(), flags=re.DOTALL):
            head = HEAD.match(code.partition("\n")[0])
            if head is None:
                continue
            file = head["file"]
            package = file.partition("/")[0].removesuffix(".py")
            files = found.setdefault(package.replace("_", "-"), {})
            files[file] = code
            if head["group"]:
                name, module = head["section"] or package, file.removesuffix(".py").replace("/", ".")
                files["entry point"] = f"{head['group']} {name} {module}"
    found["my-plain"]["my_plain/plain_partitioner.py"] = (
        ROOT / "examples/partitioner/plain_partitioner.py"
    ).read_text()
    found["my-dcp"]["my_dcp/dcp_checkpointer.py"] = (ROOT / "tests/thirdparty/dcp/dcp_checkpointer.py").read_text()
    return found


RECIPES = recipes()
KINDS = (
    *("early-stop", "ds-hello", "my-optim", "my-lines", "my-device", "my-towers", "my-plain", "my-attic", "my-runner"),
    *(
        "my-lengths",
        "my-int8",
        "my-norm",
        "my-ordered",
        "my-launch",
        "my-greeting",
        "my-ini",
        "my-batch",
        "my-slow",
        "my-replay",
        "my-units",
    ),
    *("my-clamp", "my-deadline", "my-weights", "my-method", "my-dcp"),
)


def test_every_recipe_is_found_and_is_whole() -> None:
    assert sorted(RECIPES) == sorted(KINDS)
    for dist, files in RECIPES.items():
        assert "entry point" in files, dist
        for file, code in files.items():
            for module in re.findall(r"(my_\w+\.\w+):", code):
                assert f"{module.replace('.', '/')}.py" in files, f"{dist}: {file} names {module}"


def lay_out(dist: str, folder: Path) -> None:
    """The files of a recipe below `folder`."""
    for file, code in RECIPES[dist].items():
        if file != "entry point":
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(code)
            if "/" in file:
                (folder / file).with_name("__init__.py").touch()


@pytest.fixture(scope="module")
def as_installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All recipes in one folder, with the metadata that pip would write."""
    site = tmp_path_factory.mktemp("recipes")
    for dist, files in RECIPES.items():
        lay_out(dist, site)
        group, name, module = files["entry point"].split()
        write_metadata(site, dist, "Requires-Dist: ds-core", entry_points={group: {name: module}})
    return site


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All recipes, built as wheels and installed."""
    place = tmp_path_factory.mktemp("built")
    for dist, files in RECIPES.items():
        lay_out(dist, place / dist)
        group, name, module = files["entry point"].split()
        tops = sorted({f.partition("/")[0] for f in files if f != "entry point"})
        (place / dist / "pyproject.toml").write_text(
            f'[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n[project]\nname = "{dist}"\n'
            f'version = "0.1"\ndependencies = ["ds-core"]\n[project.entry-points."{group}"]\n{name} = "{module}"\n'
            f"[tool.hatch.build.targets.wheel]\nonly-include = {tops}\n"
        )
    wheels = build_wheels([place / dist for dist in RECIPES], place / "wheels")
    pip("install", "--no-deps", "--no-compile", "-q", "--target", str(place / "site"), *map(str, wheels))
    return place / "site"


def run_kits(site: Path, folder: Path) -> None:
    """The kits, in one process that finds what is in `site`."""
    (folder / "test_kits.py").write_text(KITS)
    env = clean_environment(PYTHONPATH=str(site))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "test_kits.py"]
    run(command, cwd=folder, env=env, timeout=300)


def test_recipes_pass_their_kits(as_installed: Path, tmp_path: Path) -> None:
    run_kits(as_installed, tmp_path)


@pytest.mark.slow
def test_recipes_are_built_installed_and_pass_their_kits(installed: Path, tmp_path: Path) -> None:
    run_kits(installed, tmp_path)
