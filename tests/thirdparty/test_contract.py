"""Whatever a plugin does wrong: a run that did not name it goes on, one that did is told who, which
hook, and why.

Everything here is in this process: a declaration module is a file, and its entry point is made up.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from building import write_metadata
from torch import nn

import ds_core
from ds_core.compose import compose
from ds_core.discovery import HOOKS, offers
from ds_core.errors import ConfigError, PluginError
from ds_core.plugins import BACKENDS, SECTIONS, Found, Plugins, PluginSettings, PluginState

PLAIN = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
HEAD = "import functools, sys\nfrom ds_core.entries import *\nfrom ds_core.errors import *\n"
HEAD += "from ds_command_kit.run_options import RunOption\n"
_number = itertools.count()

Write = Callable[..., Found]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a declaration module; its entry point is installed for `Plugins()` and everything that
    uses one.
    """
    installed: list[Found] = []
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("ds_core.plugins.discover", lambda: tuple(sorted(installed)))
    before = set(sys.modules)

    def make(body: str, name: str = "odd", group: str = BACKENDS, dist: str = "ds-odd") -> Found:
        module = f"odd_plugin_{next(_number)}"
        (tmp_path / f"{module}.py").write_text(HEAD + body)
        installed.append(Found(name, group, module, dist, "1.0"))
        return installed[-1]

    yield make
    for name in set(sys.modules) - before:
        if name.startswith("odd_plugin_"):
            del sys.modules[name]


# What cannot even be loaded, and what is said of it.
UNLOADABLE = {
    "exit": ("sys.exit(3)", "SystemExit: 3"),
    "base": ("class Mine(BaseException): pass\nraise Mine('deep')", "Mine: deep"),
    "generator exit": ("raise GeneratorExit('gone')", "GeneratorExit: gone"),
    "runtime": ("raise RuntimeError('no luck')", "RuntimeError: no luck"),
    "syntax": ("def f(:", "SyntaxError"),
    "missing": ("import nobody_has_this", "nobody_has_this"),
    "async": ("async def ds_optimizers(): return {}", "ds_optimizers with async def"),
    "async generator": ("async def ds_kernels(): yield 1", "ds_kernels with async def"),
    "number": ("ds_optimizers = {}", "ds_optimizers as a dict"),
    "class": ("class ds_monitors: pass", "ds_monitors as a type"),
    "partial": ("ds_check = functools.partial(print)", "ds_check as a partial"),
    "cached": ("@functools.cache\ndef ds_kernels(): return []", "must be a plain function"),
    "observer with yield": ("def ds_step_end(ctx):\n    yield", "ds_step_end with yield"),
    "stars": ("def ds_check(*config): return []", r"takes: config, plugins"),
    "keywords": ("def ds_check(**config): return []", r"takes: config, plugins"),
    "keyword only": ("def ds_check(*, config): return []", r"takes: config, plugins"),
    "argument": ("def ds_step_end(ctx, colour): pass", "colour"),
    "unknown": ("def ds_step_ends(ctx): pass", "did you mean 'ds_step_end'"),
    "empty": ("x = 1", "defines no hook"),
}


@pytest.mark.parametrize("group", [BACKENDS, SECTIONS])
@pytest.mark.parametrize("case", UNLOADABLE)
def test_what_cannot_be_loaded(case: str, group: str, write: Write) -> None:
    body, cause = UNLOADABLE[case]
    found = write(body, group=group)
    compose(PLAIN)  # nobody named it
    (report,) = [r for r in Plugins().examine() if r.found == found]
    assert report.state is PluginState.QUARANTINED
    named = {"plugins": {"load": [found.module]}} if group == BACKENDS else {"odd": {}}
    with pytest.raises(PluginError) as caught:
        compose(PLAIN | named)
    for text in (report.why, str(caught.value)):
        assert [w for w in ("plugin ", found.module, cause) if w not in text] == [], text
    assert "'odd' (ds-odd 1.0" in report.why


# A wrong answer to each hook: what it returns, and what is said of it.
NONE = ("return None", "must return .*not None")
ENTRY = {
    "ds_accelerators": "AcceleratorEntry('a', 'cpu', 'm:a')",
    "ds_kernels": "KernelEntry('o', 'p', 'm:a', 0)",
    "ds_optimizers": "OptimizerEntry('m:a')",
    "ds_schedulers": "SchedulerEntry('m:a')",
    "ds_state_stores": "StateStoreEntry('m:a')",
    "ds_launchers": "LauncherEntry('m:a')",
    "ds_commands": "CommandEntry('m:a')",
    "ds_check": "Problem('a', 'b')",
    "ds_mesh_axes": "Axis('x', 1)",
    "ds_transforms": "Transform(Phase.SHARD, print)",
    "ds_config_formats": "'m:a'",
    "ds_compile_passes": "'m:a'",
    "ds_pipeline_schedules": "'m:a'",
    "ds_charts": "Chart('n', 't', 'x')",
    "ds_run_options": "RunOption('m:a', 'help')",
}
LISTS = (
    "ds_accelerators",
    "ds_kernels",
    "ds_check",
    "ds_monitors",
    "ds_mesh_axes",
    "ds_transforms",
    "ds_charts",
)
MAPPINGS = (
    *(
        "ds_optimizers",
        "ds_schedulers",
        "ds_state_stores",
        "ds_launchers",
        "ds_commands",
        "ds_config_formats",
    ),
    "ds_compile_passes",
    "ds_pipeline_schedules",
    "ds_run_options",
    "ds_checkpointables",
)
WRONG: list[tuple[str, str, str]] = [
    ("ds_config", "return dict", "must return a pydantic model class.*not the class dict"),
    ("ds_config", "yield 1", "must return a pydantic model class.*not a generator"),
    ("ds_config", *NONE),
    ("ds_param_axes", "return 'ep'", "must return an iterable of str, not a str"),
    ("ds_param_axes", "return [1]", "element 0 is an int"),
    ("ds_partitioner", "return 7", "must return a Partitioner or None, not an int"),
    ("ds_mesh", "return 7", "must return a Mesh or None, not an int"),
    ("ds_batch", "return (8, 2, 1)", "must return a Batch or None, not a tuple"),
    (
        "ds_memory",
        "return 7",
        "must return a mapping of names to objects with __float__, not an int",
    ),
    ("ds_runner", "return 'fast'", "must return a Runner or None, not a str"),
    ("ds_rendezvous", "return {}", "must return a RendezvousEntry or None, not a dict"),
    (
        "ds_rendezvous",
        "return RendezvousEntry('m:a', variables='RANK')",
        "variables is 'RANK'; .*a tuple of strings",
    ),
    *((hook, "return 7", "must return an iterable of .*, not an int") for hook in LISTS),
    *((hook, "return {'a': 1}", "must return an iterable of .*, not a dict") for hook in LISTS),
    *((hook, *NONE) for hook in LISTS),
    *((hook, "return [7]", "element 0 is an int") for hook in LISTS),
    *((hook, "yield from ()\n    sys.exit('now')", "SystemExit: now") for hook in LISTS),
    *(
        (hook, "return ['a']", "must return a mapping of names to .*, not a list")
        for hook in MAPPINGS
    ),
    *((hook, "return {'a': 7}", "'a' is an int") for hook in MAPPINGS),
    *((hook, "return {3: 7}", "one name is 3") for hook in MAPPINGS),
    *((hook, *NONE) for hook in MAPPINGS),
    *(
        (h, f"return {{'A': {ENTRY[h]}, 'a': {ENTRY[h]}}}", "offers 'A' and 'a'")
        for h in MAPPINGS[:-1]
    ),
    *((hook, "raise ValueError('hm')", "ValueError: hm") for hook in HOOKS),
    *((hook, "sys.exit()", "SystemExit") for hook in HOOKS),
    # Entries check themselves.
    (
        "ds_optimizers",
        "return {'a': OptimizerEntry('no_colon')}",
        "OptimizerEntry.load is 'no_colon'.*package.module:a",
    ),
    (
        "ds_optimizers",
        "return {'a': OptimizerEntry(dict)}",
        "OptimizerEntry.load is <class 'dict'>",
    ),
    (
        "ds_optimizers",
        "return {'a': OptimizerEntry('m:a', grain='row')}",
        "grain is 'row'; it must be 'element', 'ten",
    ),
    (
        "ds_optimizers",
        "return {'a': OptimizerEntry('m:a', partitioner='no')}",
        "partitioner is 'no'; .*a reference",
    ),
    (
        "ds_kernels",
        "return [KernelEntry('o', 'p', 'm:a', 'high')]",
        "priority is 'high'; it must be an integer",
    ),
    (
        "ds_kernels",
        "return [KernelEntry('o', 'p', 'm:a', 0, devices='cpu')]",
        "devices is 'cpu'; .*a tuple of strings",
    ),
    ("ds_kernels", "return [KernelEntry('', 'p', 'm:a', 0)]", "op is empty"),
    ("ds_accelerators", "return [AcceleratorEntry('a', 'cpu', 'm:a', probe=3)]", "probe is 3"),
    ("ds_transforms", "return [Transform(20, print)]", "phase is 20"),
    ("ds_transforms", "return [Transform(Phase.SHARD, None)]", "apply is None"),
    ("ds_mesh_axes", "return [Axis('x', 2.0)]", "size is 2.0"),
    ("ds_schedulers", "return {'a': SchedulerEntry()}", "TypeError.*load"),
]


def ask(plugins: Plugins, hook: str) -> Any:
    arguments = dict.fromkeys(inspect.signature(HOOKS[hook]).parameters)
    return plugins.ask(hook, **arguments) if arguments else plugins.offers(hook)


@pytest.mark.parametrize(
    ("hook", "body", "said"), WRONG, ids=[f"{h}: {b}"[:70] for h, b, _ in WRONG]
)
def test_every_wrong_answer_is_attributed(
    hook: str, body: str, said: str, write: Write, caplog: Any
) -> None:
    found = write(f"def {hook}():\n    {body}\n")
    if hook in offers():
        plugins = Plugins()
        assert all(a.plugin != found for a in ask(plugins, hook))
        (report,) = [r for r in plugins.reports() if r.found == found]
        assert report.state is PluginState.QUARANTINED
        assert plugins.quarantined() == f"; quarantined: {report.why}"
    elif hook not in ("ds_step_begin", "ds_step_end", "ds_close"):
        assert all(a.plugin != found for a in ask(Plugins(), hook))  # not called at all
    named = Plugins(PluginSettings(load=[found.module]))
    if HOOKS[hook].__name__ in ("ds_step_begin", "ds_step_end", "ds_close"):
        (observer,) = named.observers(hook)
        observer(dict.fromkeys(inspect.signature(HOOKS[hook]).parameters))
        text = caplog.records[-1].getMessage()
    else:
        with pytest.raises(PluginError) as caught:
            ask(named, hook)
        text = str(caught.value)
    assert re.search(rf"plugin '{found.module}' \(plugins\.load 0.*{hook}.*{said}", text), text


def test_every_hook_says_what_it_may_return() -> None:
    """The check of each hook agrees with its annotation: None alone, None among others, mapping,
    iterable, class.
    """
    from ds_core.entries import nothing

    for name, hook in HOOKS.items():
        returns = str(hook.__annotations__["return"])
        check = hook.ds_answer
        accepts_none = True
        try:
            check(None)
        except TypeError:
            accepts_none = False
        assert accepts_none == (returns == "None" or returns.endswith("| None")), name
        assert (check is nothing) == (returns == "None"), name
        if returns.startswith("Mapping"):
            assert check({}) == {}
        elif returns.startswith(("Iterable", "Collection")):
            assert check([]) == ()


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


def train(config: dict[str, Any], folder: Path) -> None:
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
    checkpoints = Found("checkpoint", BACKENDS, "ds_checkpoint.plugin", "ds-checkpoint", "0")
    monkeypatch.setattr("ds_core.plugins.discover", lambda: (checkpoints, found))
    monkeypatch.setattr("ds_core.plugins.check_required", lambda names: ["ds-odd"] if names else [])
    if "ODD_DEVICE" in change:
        monkeypatch.setenv("ODD_DEVICE", change.pop("ODD_DEVICE"))
    train(PLAIN | change, tmp_path / "saved")
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
    monkeypatch.setattr("ds_core.plugins.check_required", lambda names: ["ds-odd"])
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
    monkeypatch.setattr("ds_core.plugins.check_required", lambda names: ["ds-odd"])
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
    assert owner.dist == "plugins.load" and plugins.sections() == ["sect", "unused"]
    again = Plugins(PluginSettings(load=[f"sect={installed.module}"])).load_sections(["sect"])
    assert again["sect"].module == installed.module
    with pytest.raises(PluginError, match="names two modules for section 'sect'"):
        Plugins(PluginSettings(load=[f"sect={mine.module}", f"sect={installed.module}"]))


def test_requirements_of_a_distribution_are_checked(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ds_core.plugins import reset_discovery

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

    from ds_command_kit.app import make_app
    from typer.testing import CliRunner

    found = write(
        "import os\nprint('hi there')\nos.write(1, b'from below')\ndef ds_optimizers(): return {}\n"
    )
    done = CliRunner().invoke(make_app(), ["plugins", "--json"], prog_name="dscore")
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
        "is served by ds-zero, which is not installed" in texts["plan"]
        and "./plugins/zero" in texts["plan"]
    )
    assert "quarantined: plugin 'odd' (ds-odd 1.0" in texts["mine"]
