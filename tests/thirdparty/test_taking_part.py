"""Who takes part in a run, and whose fault it is when names, references and settings fail."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from building import write_metadata
from odd_plugins import PLAIN, Write
from torch import nn

import ds_core
from ds_core.errors import ConfigError, PluginError
from ds_core.plugins import Plugins
from ds_core.plugins.discovery import BACKENDS, SECTIONS, Found, PluginState
from ds_core.plugins.registry import PluginSettings
from ds_core.setup.compose import compose

# -- who takes part --------------------------------------------------------------------------------

MEDDLER = """
SEEN = []
def ds_check(config): SEEN.append("check"); return []
def ds_mesh_axes(config): SEEN.append("axes"); return []
def ds_transforms(ctx): SEEN.append("transforms"); return []
def ds_monitors(ctx): SEEN.append("monitors"); return []
def ds_param_axes(name): SEEN.append("param axes")
def ds_partitioner(ctx): SEEN.append("partitioner")
def ds_runner(ctx): SEEN.append("runner")
def ds_step_begin(ctx): SEEN.append("begin")
def ds_step_end(ctx): SEEN.append("end")
def ds_checkpointables(ctx): SEEN.append("checkpointables"); return {}
def ds_close(ctx): SEEN.append("close")
def ds_optimizers(): return {"Mine": OptimizerEntry("torch.optim:SGD")}
def ds_schedulers(): return {"Slow": SchedulerEntry("torch.optim.lr_scheduler:ConstantLR")}
def ds_kernels(): return [KernelEntry("adam", "mine", "ds_kernel_kit.references:adam", 99)]
def ds_accelerators():
    import os
    why = lambda: None if os.environ.get("ODD_DEVICE") else "not there"
    return [AcceleratorEntry("odd", "cpu", "ds_core.accelerator.cpu:CpuAccelerator", why)]
"""
ALL = {
    *(
        "check",
        "axes",
        "transforms",
        "monitors",
        "param axes",
        "partitioner",
        "runner",
        "begin",
        "end",
        "close",
    ),
    "checkpointables",
}


def step_and_save(config: dict[str, Any], folder: Path) -> None:
    engine, *_ = ds_core.initialize(model=nn.Linear(2, 2), config=config)
    engine.backward(engine(torch.ones(2, 2)).sum())
    engine.step()
    engine.save_checkpoint(str(folder))
    engine.destroy()


@pytest.mark.usefixtures("clean_ds")
@pytest.mark.parametrize(
    ("change", "called"),
    [
        ({}, set()),
        ({"optimizer": {"type": "mine", "params": {"lr": 0.1}}}, ALL),
        ({"scheduler": {"type": "Slow"}}, ALL),
        ({"kernels": {"adam": "mine"}}, ALL),
        ({"plugins": {"require": ["ds-odd"]}}, ALL),
        ({"ODD_DEVICE": "1"}, ALL),
    ],
    ids=["unnamed", "optimizer", "scheduler", "kernel", "require", "accelerator"],
)
def test_hooks_of_a_run_are_called_only_of_who_takes_part(
    change: dict[str, Any],
    called: set[str],
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = write(MEDDLER)
    checkpoints = Found("checkpoint", BACKENDS, "ds_checkpoint.plugin", "dscore-checkpoint", "0")
    monkeypatch.setattr("ds_core.plugins.registry.discover", lambda: (checkpoints, found))
    monkeypatch.setattr("ds_core.plugins.registry.unmet_entries", lambda names: [])
    if "ODD_DEVICE" in change:
        monkeypatch.setenv("ODD_DEVICE", change.pop("ODD_DEVICE"))
    step_and_save(PLAIN | change, tmp_path / "saved")
    assert set(sys.modules[found.module].SEEN) == called


@pytest.mark.usefixtures("clean_ds")
def test_a_state_store_that_a_rule_chooses_brings_in_its_plugin(write: Write) -> None:
    write(
        "def ds_check(config, plugins):\n"
        "    from ds_state_stores import check_store\n"
        "    return filter(None, [check_store(plugins, 'attic', 'a.device')])\n",
        "chooser",
        SECTIONS,
    )
    write(
        "def ds_state_stores(): return {'attic': StateStoreEntry('ds_state_stores:HostStore')}\n"
        "def ds_check(config): return [Problem('a.path', 'attic needs one')]\n",
        "attic",
    )
    plugins = Plugins()
    plugins.load_sections(["chooser"])
    from ds_core.config import check_rules

    with pytest.raises(ConfigError, match=r"a\.path: attic needs one"):
        check_rules(compose(PLAIN).config, plugins)


# -- names, references, transforms -----------------------------------------------------------------


def test_two_offers_of_a_name_that_nobody_uses_stop_nothing(write: Write) -> None:
    for dist in ("ds-one", "ds-two"):
        write(
            "def ds_optimizers(): return {'Zap': OptimizerEntry('torch.optim:SGD')}\n"
            "def ds_kernels(): return [KernelEntry('zapping', 'fast', 'math:sin', 10)]\n",
            dist[3:],
            dist=dist,
        )
    compose(PLAIN)
    with pytest.raises(PluginError, match=r"'zap' is offered by ds-one 1\.0 and ds-two 1\.0"):
        compose(PLAIN | {"optimizer": {"type": "Zap", "params": {"lr": 0.1}}})


@pytest.mark.usefixtures("clean_ds")
def test_kernels_that_cannot_be_served_stop_only_who_uses_them(
    write: Write, tmp_path: Path
) -> None:
    write(
        "def ds_kernels():\n"
        "    yield KernelEntry('far', 'gpu', 'math:sin', 10, devices=('cuda',))\n"
        "    yield KernelEntry('adam', 'lost', 'no_such_module_at_all:adam', 99)\n"
        "    yield KernelEntry('sgd', 'number', 'math:pi', 99)\n"
    )
    engine, *_ = ds_core.initialize(model=nn.Linear(2, 2), config=PLAIN)
    assert engine.ctx.kernels.resolved()["far/cpu/float32"] == "nobody"
    assert "lost" not in engine.ctx.kernels.resolved()["adam/cpu/float32"]
    (row,) = [
        c
        for c in engine.ctx.kernels.candidates("adam", "cpu", "float32")
        if c.entry.provider == "lost"
    ]
    assert "'odd' (ds-odd 1.0" in str(row.reason) and "no_such_module_at_all" in str(row.reason)
    engine.destroy()
    with pytest.raises(
        ds_core.errors.KernelError,
        match=r"forces 'lost', but plugin 'odd' \(ds-odd.*no_such_module_at",
    ):
        ds_core.initialize(model=nn.Linear(2, 2), config=PLAIN | {"kernels": {"adam": "lost"}})


@pytest.mark.usefixtures("clean_ds")
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ZeroDivisionError('oops')", "phase SHARD .ds_transforms.: ZeroDivisionError: oops"),
        ("sys.exit(2)", "phase SHARD .ds_transforms.: SystemExit: 2"),
        ("return None", "must return the model, a torch.nn.Module, not None"),
    ],
)
def test_a_transform_that_fails_names_its_plugin(body: str, said: str, write: Write) -> None:
    found = write(
        f"def apply(model):\n    {body}\ndef ds_transforms(ctx): return [Transform(Phase.SHARD, "
        "apply)]\n"
    )
    with pytest.raises(PluginError, match=rf"plugin '{found.module}' .*{said}"):
        ds_core.initialize(
            model=nn.Linear(2, 2), config=PLAIN | {"plugins": {"load": [found.module]}}
        )


@pytest.mark.usefixtures("clean_ds")
def test_a_transform_may_tell_the_user_what_is_wrong(write: Write) -> None:
    found = write(
        "def apply(model):\n    raise UsageError('give a bigger model')\n"
        "def ds_transforms(ctx): return [Transform(Phase.SHARD, apply)]\n"
    )
    with pytest.raises(ds_core.errors.UsageError, match="^give a bigger model"):
        ds_core.initialize(
            model=nn.Linear(2, 2), config=PLAIN | {"plugins": {"load": [found.module]}}
        )


@pytest.mark.usefixtures("clean_ds")
@pytest.mark.parametrize(
    ("load", "said"),
    [
        (
            "no_such_module_at_all:Opt",
            "cannot serve optimizer 'Mine', which it offers by ds_optimizers: .*no_such_mod",
        ),
        (
            "math:no_such_name",
            "cannot serve optimizer 'Mine', which it offers by ds_optimizers: .*no_such_name",
        ),
        (
            "math:pi",
            "cannot serve optimizer 'Mine', which it offers by ds_optimizers: .*not a callable",
        ),
        ("{m}:explode", r"failed to make the optimizer \(.*:explode\): SystemExit: boom"),
    ],
)
def test_a_bad_reference_of_what_was_chosen_names_its_plugin(
    load: str, said: str, write: Write
) -> None:
    body = (
        "def explode(groups): sys.exit('boom')\ndef ds_optimizers(): return {'Mine': "
        "OptimizerEntry(LOAD)}\n"
    )
    found = write(f"LOAD = {load!r}.replace('{{m}}', __name__)\n{body}")
    with pytest.raises(
        PluginError, match=rf"plugin 'odd' \(ds-odd 1\.0, module {found.module}\) {said}"
    ):
        ds_core.initialize(model=nn.Linear(2, 2), config=PLAIN | {"optimizer": {"type": "Mine"}})


def test_an_unknown_name_is_answered_with_who_could_not_be_asked(write: Write) -> None:
    write("def ds_optimizers(): return ['Mine']\n")
    with pytest.raises(
        ConfigError, match=r"no optimizer is called 'Mine'.*quarantined: plugin 'odd' \(ds-odd 1\.0"
    ):
        compose(PLAIN | {"optimizer": {"type": "Mine"}})


# -- settings --------------------------------------------------------------------------------------


def test_what_is_required_must_be_sound(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_core.plugins.registry.unmet_entries", lambda names: [])
    write("sys.exit(1)")
    with pytest.raises(PluginError, match=r"'odd' \(ds-odd 1\.0.*SystemExit: 1"):
        Plugins(PluginSettings(require=["DS_Odd"]))
    with pytest.raises(
        PluginError,
        match=r"requires? .*|plugins\.require names ds-odd, but plugins\.disable names it",
    ):
        Plugins(PluginSettings(require=["ds-odd"], disable=["ds-odd"]))


def test_a_required_section_takes_part_only_when_it_is_named(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds_core.plugins.registry.unmet_entries", lambda names: [])
    write("def ds_mesh_axes(config): raise ZeroDivisionError\n", group=SECTIONS)
    plugins = Plugins(PluginSettings(require=["ds-odd"]))
    assert plugins.ask("ds_mesh_axes", config=None) == []


def test_what_is_loaded_by_hand_owns_its_section(write: Write) -> None:
    model = (
        "def ds_config():\n    from ds_core.config import Section\n    return type('Made', "
        "(Section,), {})\n"
    )
    installed = write(model, "sect", SECTIONS)
    mine = write(model, "unused", SECTIONS, "ds-mine")
    plugins = Plugins(PluginSettings(load=[f"sect={mine.module}"]))
    owner = plugins.section("sect")
    assert owner is not None and owner.module == mine.module
    assert owner.dist == "loaded by plugins.load" and plugins.sections() == ["sect", "unused"]
    again = Plugins(PluginSettings(load=[f"sect={installed.module}"])).load_sections(["sect"])
    assert again["sect"].module == installed.module
    with pytest.raises(
        PluginError, match=r"section 'sect' is offered by 'sect' \(loaded by plugins.load"
    ):
        Plugins(PluginSettings(load=[f"sect={mine.module}", f"sect={installed.module}"]))


def test_requirements_of_a_distribution_are_checked(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ds_core.plugins.discovery import reset_discovery

    lines = {
        "ds-old": 'Requires-Dist: torch>=999\nRequires-Dist: nobody; extra == "all"\n',
        "ds-lone": "Requires-Dist: nobody-has-this>=1\n",
        "ds-fine": 'Requires-Dist: torch\nRequires-Dist: nobody; python_version < "3"\n',
    }
    for dist, text in lines.items():
        write_metadata(tmp_path, dist, *text.splitlines())
    reset_discovery()
    found = {dist: write("def ds_optimizers(): return {}\n", dist, dist=dist) for dist in lines}
    why = {r.found.dist: (r.state, r.why) for r in Plugins().examine()}
    assert why["ds-fine"] == (PluginState.LOADED, "")
    assert why["ds-old"][0] is why["ds-lone"][0] is PluginState.QUARANTINED
    assert "ds-old needs torch>=999, but torch " in why["ds-old"][1]
    assert "ds-lone needs nobody-has-this>=1, which is not installed" in why["ds-lone"][1]
    with pytest.raises(PluginError, match="ds-old needs torch>=999"):
        Plugins(PluginSettings(require=["ds-old"]))
    assert found


def test_an_entry_point_must_name_a_module(write: Write) -> None:
    found = write("def ds_optimizers(): return {}\n")
    plugins = Plugins(
        found=[Found("odd", BACKENDS, f"{found.module}:ds_optimizers", "ds-odd", "1.0")]
    )
    (report,) = [r for r in plugins.examine() if r.found.dist == "ds-odd"]
    assert "must be a module alone" in report.why


def test_output_at_import_does_not_stand_in_json(write: Write, capfd: Any) -> None:
    import json

    from ds_cli.plugin import ds_commands
    from ds_command_kit.app import make_app
    from typer.testing import CliRunner

    found = write(
        "import os\nprint('hi there')\nos.write(1, b'from below')\ndef ds_optimizers(): return {}\n"
    )
    done = CliRunner().invoke(make_app(ds_commands()), ["plugins", "--json"], prog_name="dscore")
    (row,) = [r for r in json.loads(done.stdout) if r["module"] == found.module]
    assert row["state"] == "loaded"
    assert "hi there" in done.stderr and "hi there" not in done.stdout
    out, err = capfd.readouterr()
    assert "from below" in err and "from below" not in out


def test_a_command_that_is_not_there_is_answered_with_why(write: Write) -> None:
    from ds_command_kit.app import make_app
    from typer.testing import CliRunner

    write("def ds_commands(): return ['mine']\n")
    said = {
        word: CliRunner().invoke(make_app(), [word], prog_name="dscore")
        for word in ("plan", "mine")
    }
    texts = {
        word: " ".join(done.stderr.replace("\u2502", " ").split()) for word, done in said.items()
    }
    assert {done.exit_code for done in said.values()} == {2}
    assert (
        "is served by dscore-plan, which is not installed" in texts["plan"]
        and "dist/constraints.txt dscore-plan`" in texts["plan"]
    )
    assert "quarantined: plugin 'odd' (ds-odd 1.0" in texts["mine"]
