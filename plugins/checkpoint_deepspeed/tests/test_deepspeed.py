"""Moving over from DeepSpeed in mid-training: checkpoints that it wrote are imported, and its
losses go on.

The files below ``deepspeed/`` are DeepSpeed 0.19.8's own (see generate.py there); a slow test makes
fresh ones.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import types
import venv
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from ds_checkpoint.folder import files
from ds_checkpoint.offline import get_fp32_state_dict_from_zero_checkpoint, open_saved
from ds_checkpoint_deepspeed import export_deepspeed, export_universal, import_checkpoint
from ds_command_kit.app import make_app
from ds_testing import run_ranks
from torch import nn
from typer.testing import CliRunner

from ds_core.errors import CheckpointError

HERE = Path(__file__).parent / "deepspeed"
SAVED = sorted(path.name for path in HERE.iterdir() if path.is_dir() and "-" in path.name)


def recipe() -> Any:
    """generate.py, without needing DeepSpeed to be installed."""
    text = (HERE / "generate.py").read_text().replace("import deepspeed\n", "")
    module = types.ModuleType("recipe")
    exec(compile(text, "generate.py", "exec"), module.__dict__)  # noqa: S102
    return module


def go_on(folder: str, stage: int, mode: str) -> tuple[list[float], dict[str, Any]]:
    """The mean losses of steps 3 and 4, and the client state."""
    import ds_core
    from ds_core import comm

    made = recipe()
    torch.manual_seed(1)
    net = made.Net()
    config = made.config(stage, mode)
    config["train_micro_batch_size_per_gpu"] = 4 // comm.world_size()
    config["steps_per_print"] = None
    engine, *_ = ds_core.initialize(model=net, model_parameters=made.groups(net), config=config)
    _, client = engine.load_checkpoint(folder)
    assert engine.global_steps == 3
    losses = []
    for step in (3, 4):
        rows = torch.cat([made.batch(step, rank) for rank in (0, 1)])
        loss = engine(rows.chunk(comm.world_size())[comm.rank()])
        total = loss.detach().double() / comm.world_size()
        engine.backward(loss)
        engine.step()
        comm.all_reduce(total)
        losses.append(total.item())
    engine.destroy()
    return losses, client


def mode_of(name: str) -> str:
    return name.partition("-")[0]


@pytest.mark.fast_cases("bf16-0-0-1", "fp32-1-0-1", "fp32-2-2-2", "fp32-3-0-1")
@pytest.mark.parametrize(
    ("stage", "world"), [(0, 1), (2, 2), pytest.param(3, 4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", [name for name in SAVED if name != "fp32-0"])
def test_its_losses_go_on(name: str, stage: int, world: int, tmp_path: Path) -> None:
    path, missing = import_checkpoint(HERE / name, tmp_path)
    assert (path, missing) == (tmp_path / "three", [])
    truth = json.loads((HERE / name / "losses.json").read_text())[3:]
    for losses, client in run_ranks(world, go_on, str(tmp_path), stage, mode_of(name)):
        assert losses == pytest.approx(truth, rel=2e-2 if mode_of(name) == "bf16" else 2e-6)
        assert client == {"note": "hello", "n": 3}


@pytest.mark.parametrize("name", SAVED)
def test_weights_are_the_same_at_every_stage(name: str, tmp_path: Path) -> None:
    import_checkpoint(HERE / name, tmp_path)
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    made = recipe().Net()
    assert state.keys() == made.state_dict().keys()
    assert all(state[n].shape == t.shape for n, t in made.state_dict().items())
    other = tmp_path / "other"
    import_checkpoint(HERE / f"{mode_of(name)}-1" / "three", other, "again")
    for key, value in get_fp32_state_dict_from_zero_checkpoint(other).items():
        torch.testing.assert_close(
            state[key], value, rtol=0, atol=1e-2 if mode_of(name) == "bf16" else 1e-7
        )


def test_stage_0_without_names_says_what_it_leaves_out(tmp_path: Path) -> None:
    done = CliRunner().invoke(make_app(), ["import", str(HERE / "fp32-0"), str(tmp_path)])
    assert done.exit_code == 0
    assert "parameter number 1, of shape (6, 6)" in done.output
    assert "save with stage 1" in done.output
    with open_saved(tmp_path) as saved:
        assert not [n for n in saved.source.names() if n.startswith("optimizer/")]
        assert saved.manifest.step == 3


def test_stage_0_of_one_group_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "from"
    shutil.copytree(HERE / "fp32-0", folder)
    [path] = (folder / "three").glob("*.pt")
    saved = torch.load(path, weights_only=True)
    del saved["module"]["frozen.weight"]
    torch.save(saved, path)
    _, missing = import_checkpoint(folder, tmp_path / "to")
    assert missing == []
    with open_saved(tmp_path / "to") as found:
        for index, name in enumerate(("emb.weight", "mid.weight", "mid.bias")):
            want = saved["optimizer"]["state"][index]["exp_avg"]
            assert torch.equal(found.source.whole(f"optimizer/exp_avg/{name}"), want)


class Planted:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "from"
    shutil.copytree(HERE / "fp32-2", folder)
    path = folder / "three" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": Planted(tmp_path / "planted")}, path)
    with pytest.raises(
        CheckpointError, match=r"zero_pp_rank_1.*cannot be read without running code"
    ):
        import_checkpoint(folder, tmp_path / "to")
    torch.save(Planted(tmp_path / "planted"), tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"weights\.pt cannot be read without running code"):
        import_checkpoint(tmp_path / "weights.pt", tmp_path / "to")
    assert not (tmp_path / "planted").exists()
    assert not files.existing_tags(tmp_path / "to")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda d: (d / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink(),
            "lacks the file of rank 0",
        ),
        (lambda d: [p.unlink() for p in d.glob("*optim_states.pt")], "has no .*_optim_states"),
        (lambda d: (d / "mp_rank_01_model_states.pt").touch(), "files of different ranks"),
        (
            lambda d: (d / "mp_rank_02_model_states.pt").touch(),
            r"lacks the file of rank 0 \(mp_rank 1\)",
        ),
        (lambda d: (d / "offloaded_tensors").mkdir(), "NVMe"),
    ],
)
def test_what_is_not_whole_or_not_served(tmp_path: Path, change: Any, words: str) -> None:
    shutil.copytree(HERE / "fp32-2", tmp_path / "from")
    change(tmp_path / "from" / "three")
    with pytest.raises(CheckpointError, match=words):
        import_checkpoint(tmp_path / "from", tmp_path / "to")
    assert not (tmp_path / "to").exists()


# -- weights alone ---------------------------------------------------------------------------------


def load_weights(folder: str) -> tuple[int, list[float]]:
    import ds_core

    torch.manual_seed(9)
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
    engine, *_ = ds_core.initialize(model=nn.Linear(5, 3), config=config)
    engine.load_checkpoint(folder)
    return engine.global_steps, [p.double().sum().item() for p in engine.module.parameters()]


@pytest.mark.parametrize("kind", ["file", "folder", "sharded", "torch"])
def test_weights_of_other_programs(kind: str, tmp_path: Path) -> None:
    net = nn.Linear(5, 3)
    state = {name: tensor.detach() for name, tensor in net.state_dict().items()}
    source = tmp_path / "from"
    source.mkdir()
    if kind == "torch":
        torch.save(state, source / "weights.pt")
        source /= "weights.pt"
    elif kind == "sharded":
        for name, tensor in state.items():
            safetensors.torch.save_file({name: tensor}, source / f"{name}.safetensors")
        index = {"weight_map": {name: f"{name}.safetensors" for name in state}}
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        safetensors.torch.save_file(state, source / "model.safetensors")
        source = source if kind == "folder" else source / "model.safetensors"
    path, _ = import_checkpoint(source, tmp_path / "to")
    assert path.name == "imported"
    [(steps, sums)] = run_ranks(1, load_weights, str(tmp_path / "to"))
    assert steps == 0
    assert sums == [t.double().sum().item() for t in net.parameters()]


def test_a_source_that_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        import_checkpoint(tmp_path / "x", tmp_path / "to")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        import_checkpoint(tmp_path / "empty", tmp_path / "to")
    (tmp_path / "empty" / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "../../etc/passwd"}}'
    )
    with pytest.raises(CheckpointError, match="not a safetensors file next to it"):
        import_checkpoint(tmp_path / "empty", tmp_path / "to")


# -- DeepSpeed itself ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fresh_checkpoints_of_the_installed_deepspeed(tmp_path: Path) -> None:
    """In an environment of its own, DeepSpeed trains and saves; its losses go on here."""
    python = tmp_path / "venv" / "bin" / "python"
    venv.create(tmp_path / "venv", with_pip=True)
    site = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"],
        text=True,
        capture_output=True,
        check=True,
    ).stdout.strip()
    (Path(site) / "shared.pth").write_text(next(p for p in sys.path if p.endswith("site-packages")))
    pip = [python, "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "wheel", "setuptools"], check=True)
    wanted = ["deepspeed", "einops", "msgpack", "psutil", "py-cpuinfo", "tqdm"]
    environment = os.environ | {
        "DS_BUILD_OPS": "0",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    environment["TORCH_EXTENSIONS_DIR"] = str(tmp_path / "extensions")
    subprocess.run(
        [*pip, "--no-build-isolation", "--no-deps", *wanted], check=True, env=environment
    )
    for name in SAVED:
        mode, _, stage = name.partition("-")
        (tmp_path / name).mkdir()
        on_two_ranks([python, HERE / "generate.py", tmp_path / name, stage, mode], environment)
        _, missing = import_checkpoint(tmp_path / name, tmp_path / "to" / name)
        if missing:
            assert name == "fp32-0"
            continue
        truth = json.loads((tmp_path / name / "losses.json").read_text())[3:]
        for losses, _ in run_ranks(2, go_on, str(tmp_path / "to" / name), 2, mode):
            assert losses == pytest.approx(truth, rel=2e-2 if mode == "bf16" else 2e-6)
    it_loads_what_we_export(python, environment, tmp_path)


def on_two_ranks(command: list[Any], environment: dict[str, str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = environment | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [subprocess.Popen(command, env=shared | {"RANK": r, "LOCAL_RANK": r}) for r in "01"]
    try:
        assert [p.wait(200) for p in ranks] == [0, 0]
    finally:
        for left in Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"):
            left.unlink()  # it never removes them itself


def it_loads_what_we_export(python: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """Its engine goes on at every stage; its zero_to_fp32 finds our weights. See load.py."""
    root = tmp_path / "exported"
    for mode in ("fp32", "bf16"):
        source = tmp_path / "to" / f"{mode}-2"
        for stage in range(mode == "bf16", 4):
            export_deepspeed(source, root / f"{mode}-{stage}", stage=stage, world_size=2)
        export_universal(source, root / f"{mode}-universal" / "three")
        weights = get_fp32_state_dict_from_zero_checkpoint(source)
        torch.save(weights["frozen.weight"], root / f"{mode}-universal" / "frozen.pt")
    import_checkpoint(HERE / "parallel" / "moe-0", tmp_path / "to" / "moe")
    for stage in range(3):
        export_deepspeed(tmp_path / "to" / "moe", root / f"moe-{stage}", stage=stage, world_size=2)
    on_two_ranks([python, HERE / "load.py", root], environment)
    for name, found in json.loads((root / "loaded.json").read_text()).items():
        mode = name.partition("-")[0]
        if name.endswith("fp32"):
            weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "to" / f"{mode}-2")
            assert found == pytest.approx({n: t.double().sum().item() for n, t in weights.items()})
            continue
        folder = HERE / "parallel" / "moe-0" if mode == "moe" else tmp_path / f"{mode}-2"
        # Of a universal checkpoint at stage 3 it gives the first group's weight decay to all
        # groups.
        rel = 2e-2 if mode == "bf16" else 5e-4 if name == "fp32-universal/3" else 2e-6
        assert found == pytest.approx(
            json.loads((folder / "losses.json").read_text())[3:], rel=rel
        ), name


def test_a_state_dict_of_an_old_torch(tmp_path: Path) -> None:
    weights = nn.Linear(3, 2).state_dict()
    torch.save(weights, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    import_checkpoint(tmp_path / "old.pt", tmp_path / "to")
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "to")
    assert set(found) == set(weights) and all(torch.equal(found[n], w) for n, w in weights.items())
