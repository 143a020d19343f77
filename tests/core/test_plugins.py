"""Discovery, the three failure tiers, conflicts, settings."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from ds_core.config import Section, build_config
from ds_core.engine import Sequential
from ds_core.entries import OptimizerEntry
from ds_core.errors import PluginError, Problem
from ds_core.plugins import Plugins, discovery
from ds_core.plugins.discovery import BACKENDS, SECTIONS, Found, PluginState
from ds_core.plugins.registry import PluginSettings
from ds_core.setup.optim import choose

ONE = Problem("a", "one")
TWO = Problem("a", "two")


@pytest.fixture
def module(monkeypatch):
    """Make a declaration module out of functions."""

    def make(name, **members):
        made = types.ModuleType(name)
        for key, value in members.items():
            setattr(made, key, value)
        monkeypatch.setitem(sys.modules, name, made)
        return name

    return make


def section(name, module, dist="ds-x", version="1.0"):
    return Found(name, SECTIONS, module, dist, version)


def backend(name, module, dist="ds-y", version="2.0"):
    return Found(name, BACKENDS, module, dist, version)


def test_installed_plugins_are_discovered_by_name_only():
    discovery.reset_discovery()
    found = discovery.discover()
    assert list(found) == sorted(found)


def test_nothing_is_imported_until_the_config_names_it():
    plugins = Plugins(found=[section("zeta", "no_such_module_zeta")])
    assert plugins.load_sections(["other"]) == {}
    with pytest.raises(
        PluginError,
        match=r"'zeta' \(ds-x 1.0, module no_such_module_zeta\) failed to import: ModuleNotFound",
    ):
        plugins.load_sections(["zeta"])


def test_a_broken_backend_is_quarantined(module):
    good = module("good_backend", ds_optimizers=lambda: {"Nice": OptimizerEntry("torch.optim:SGD")})
    plugins = Plugins(found=[backend("bad", "no_such_module_bad"), backend("good", good)])
    assert "nice" in plugins.named("ds_optimizers", "optimizer")
    states = {r.found.name: (r.state, r.why) for r in plugins.reports()}
    assert states["bad"][0] is PluginState.QUARANTINED
    assert "no_such_module_bad" in states["bad"][1]
    assert states["good"][0] is PluginState.LOADED


def test_hooks_are_called_in_name_order(module):
    seen = []
    names = ["b", "a", "c"]
    found = [
        section(n, module(f"order_{n}", ds_mesh_axes=lambda n=n: seen.append(n) or ()))
        for n in names
    ]
    plugins = Plugins(found=found)
    plugins.load_sections(names)
    plugins.ask("ds_mesh_axes", config=None)
    assert seen == ["a", "b", "c"]


def test_an_unknown_hook_names_the_nearest(module):
    name = module("typo_plugin", ds_mesh_axis=lambda config: [])
    with pytest.raises(
        PluginError, match="unknown hook 'ds_mesh_axis'; did you mean 'ds_mesh_axes'"
    ):
        Plugins(found=[section("typo", name)]).load_sections(["typo"])


def test_a_wrong_signature_is_an_error_at_load(module):
    name = module("wrong_args", ds_mesh_axes=lambda configuration: [])
    plugins = Plugins(found=[section("wrong", name)])
    with pytest.raises(PluginError, match="configuration"):
        plugins.load_sections(["wrong"])
    assert plugins.ask("ds_mesh_axes", config=None) == []


def test_two_owners_of_a_section_are_named_and_prefer_chooses(module):
    one = module("owner_one", ds_check=lambda: [ONE])
    two = module("owner_two", ds_check=lambda: [TWO])
    found = [section("same", one, "ds-one"), section("same", two, "ds-two")]
    with pytest.raises(PluginError, match=r"ds-one 1.0 and ds-two 1.0.*prefer"):
        Plugins(found=found).load_sections(["same"])
    plugins = Plugins(PluginSettings(prefer={"same": "ds-two"}), found)
    plugins.load_sections(["same"])
    assert [a.value for a in plugins.ask("ds_check", config=None)] == [(TWO,)]


def test_two_distributions_that_claim_a_section_with_one_module_are_named(module):
    same = module("shared_module", ds_config=lambda: Section)
    found = [section("same", same, "ds-one"), section("same", same, "ds-two")]
    with pytest.raises(PluginError, match=r"ds-one 1.0 and ds-two 1.0.*prefer"):
        Plugins(found=found).load_sections(["same"])
    assert (
        Plugins(PluginSettings(prefer={"same": "ds-two"}), found).section("same").dist == "ds-two"
    )


def test_an_optimizer_that_is_none_names_plugin_and_name(module):
    maker = module("made_none", make=lambda groups: None)
    offers = module(
        "offers_none", ds_optimizers=lambda: {"BrkNone": OptimizerEntry(f"{maker}:make")}
    )
    plugins = Plugins(found=[backend("brk", offers, "dist-brk")])
    read = build_config({"train_batch_size": 1, "optimizer": {"type": "BrkNone"}}, {})
    chosen, _ = choose("optimizer", read, plugins)
    with pytest.raises(
        PluginError,
        match=r"plugin 'brk' \(dist-brk 2.0.*made_none:make of optimizer.type 'BrkNone'",
    ):
        chosen.build([])


def test_two_offers_of_one_optimizer_are_named_and_prefer_chooses(module):
    one = module("opt_one", ds_optimizers=lambda: {"Zap": OptimizerEntry("one:Zap")})
    two = module("opt_two", ds_optimizers=lambda: {"zap": OptimizerEntry("two:Zap")})
    found = [backend("one", one, "ds-one"), backend("two", two, "ds-two")]
    with pytest.raises(PluginError, match="'zap' is offered by ds-one 2.0 and ds-two 2.0"):
        Plugins(found=found).named("ds_optimizers", "optimizer")["zap"]
    # who uses no such name is not troubled
    assert "sgd" in Plugins(found=found).named("ds_optimizers", "optimizer")
    chosen = Plugins(PluginSettings(prefer={"optimizer/Zap": "ds-two"}), found).named(
        "ds_optimizers", "optimizer"
    )
    assert chosen["zap"].value.load == "two:Zap"


def test_what_is_loaded_by_hand_wins_over_what_is_installed(module):
    one = module("opt_installed", ds_optimizers=lambda: {"Zap": OptimizerEntry("one:Zap")})
    two = module("opt_by_hand", ds_optimizers=lambda: {"zap": OptimizerEntry("two:Zap")})
    found = [backend("one", one, "ds-one")]
    offers = Plugins(PluginSettings(load=[two]), found).named("ds_optimizers", "optimizer")
    assert offers["zap"].value.load == "two:Zap"


def test_a_plugin_may_replace_a_name_of_the_core(module):
    name = module("opt_adam", ds_optimizers=lambda: {"Adam": OptimizerEntry("mine:Adam")})
    offers = Plugins(found=[backend("mine", name)]).named("ds_optimizers", "optimizer")
    assert offers["adam"].value.load == "mine:Adam"
    assert offers["sgd"].value.load == "torch.optim:SGD"


def test_two_drivers_are_an_error_naming_both(module):
    one = module("drive_one", ds_runner=lambda ctx: Sequential())
    two = module("drive_two", ds_runner=lambda ctx: Sequential())
    plugins = Plugins(found=[section("a", one, "ds-one"), section("b", two, "ds-two")])
    plugins.load_sections(["a", "b"])
    with pytest.raises(
        PluginError, match=r"ds_runner is answered by 'a' \(ds-one .* and 'b' \(ds-two"
    ):
        plugins.driver("ds_runner", ctx=None)


def test_require_disable_load_and_autoload(module, monkeypatch):
    with pytest.raises(PluginError, match="'no-such-dist>=1'.*|no-such-dist is not installed"):
        Plugins(PluginSettings(require=["no-such-dist>=1"]), [])
    with pytest.raises(PluginError, match=r"pluggy>=99"):
        Plugins(PluginSettings(require=["pluggy>=99"]), [])
    with pytest.raises(PluginError, match="not a requirement"):
        Plugins(PluginSettings(require=["=="]), [])
    Plugins(PluginSettings(require=["pluggy>=1"]), [])

    name = module("free_module", ds_config=lambda: Section)
    by_dist = Plugins(PluginSettings(disable=["ds-x"]), [section("free", name)])
    assert by_dist.load_sections(["free"]) == {}
    assert by_dist.disabled() == {"free": "plugins.disable names it"}

    loaded = Plugins(PluginSettings(load=[f"mine={name}"]), [])
    assert loaded.section("mine").module == name
    assert loaded.ask_one("ds_config", loaded.section("mine")) is Section

    monkeypatch.setenv("DS_PLUGINS_DISABLE_AUTOLOAD", "1")
    off = Plugins()
    assert off.sections() == []
    assert all(
        r.state is PluginState.DISABLED
        for r in off.reports()
        if r.found.module != "ds_core.setup.builtin"
    )


def test_a_failing_observer_is_switched_off_after_one_warning(module, caplog):
    calls = []

    def ds_step_end(step):
        calls.append(step)
        raise OSError("no space left")

    plugins = Plugins(found=[section("noisy", module("noisy_mod", ds_step_end=ds_step_end))])
    plugins.load_sections(["noisy"])
    (observer,) = plugins.observers("ds_step_end")
    for step in range(3):
        observer({"ctx": None, "step": step, "metrics": {}})
    assert calls == [0]
    assert [r.message for r in caplog.records].count(caplog.records[0].message) == 1
    assert "no space left" in caplog.text
    report = next(r for r in plugins.reports() if r.found.name == "noisy")
    assert report.state is PluginState.SWITCHED_OFF


def test_an_error_on_the_data_path_is_fatal_and_names_the_plugin(module):
    def ds_mesh_axes(config):
        raise ZeroDivisionError("oops")

    plugins = Plugins(found=[section("math", module("math_mod", ds_mesh_axes=ds_mesh_axes))])
    plugins.load_sections(["math"])
    with pytest.raises(
        PluginError, match=r"'math' \(ds-x 1.0.*ds_mesh_axes: ZeroDivisionError: oops"
    ):
        plugins.ask("ds_mesh_axes", config=None)


def test_wrappers_are_refused(module):
    from ds_core.plugins.hookspecs import hookimpl

    @hookimpl(wrapper=True)
    def ds_check(config):
        yield

    with pytest.raises(PluginError, match="is a wrapper"):
        Plugins(found=[section("w", module("wrap_mod", ds_check=ds_check))]).load_sections(["w"])


def test_one_module_in_both_groups_is_registered_once(module):
    name = module("both_groups", ds_check=lambda: [ONE])
    plugins = Plugins(found=[section("s", name), backend("b", name)])
    plugins.load_sections(["s"])
    plugins.probe_all()
    assert len(plugins.ask("ds_check", config=None)) == 1


SEVERAL = """
from ds_core.config import Section, option


class One(Section):
    size: int = option(1, "A size.")


class Two(Section):
    name: str = option("x", "A name.")


def ds_config(): return {"one": One, "two": Two}
def ds_step_end(ctx): pass
"""


def test_one_module_owns_several_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "owns_several.py").write_text(SEVERAL)
    rows = [
        Found(name, SECTIONS, "owns_several", "several", "1.0") for name in ("one", "two", "three")
    ]
    plugins = Plugins(found=rows)
    models = plugins.models(["one", "two"])
    assert {name: model.__name__ for name, (model, _) in models.items()} == {
        "one": "One",
        "two": "Two",
    }
    # asked once, whichever sections the config names
    assert len(plugins.implementing("ds_step_end")) == 1
    with pytest.raises(
        PluginError, match="claims section 'three' but has no ds_config hook to describe it"
    ):
        plugins.models(["three"])


def test_two_distributions_that_claim_a_section_are_both_named_also_with_one_module() -> None:
    found = [
        Found("two", SECTIONS, "two_claims", dist, "1.0") for dist in ("dist-one", "dist-other")
    ]
    with pytest.raises(
        PluginError, match=r"section 'two' is offered by dist-one 1.0 and dist-other 1.0"
    ):
        Plugins(found=found).section("two")
    chosen = Plugins(PluginSettings(prefer={"two": "dist-other"}), found=found).section("two")
    assert chosen is not None and chosen.dist == "dist-other"
