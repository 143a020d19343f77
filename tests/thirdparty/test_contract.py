"""Whatever a plugin does wrong: a run that did not name it goes on, one that did is told who, which
hook, and why.

Everything here is in this process: a declaration module is a file, and its entry point is made up.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from odd_plugins import PLAIN, Write

from ds_core.errors import PluginError
from ds_core.plugins import Plugins
from ds_core.plugins.discovery import BACKENDS, HOOKS, SECTIONS, PluginState, offers
from ds_core.plugins.registry import PluginSettings
from ds_core.setup.compose import compose

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
    "ds_checkpoint_storages": "'m:a'",
    "ds_planners": "'m:a'",
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
    "ds_checkpoint_storages",
    "ds_planners",
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
    assert re.search(
        rf"plugin '{found.module}' \(loaded by plugins\.load, .*{hook}.*{said}", text
    ), text


def test_every_hook_says_what_it_may_return() -> None:
    """The check of each hook agrees with its annotation: None alone, None among others, mapping,
    iterable, class.
    """
    from ds_core.plugins.checks import nothing

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
