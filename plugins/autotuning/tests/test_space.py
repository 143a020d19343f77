"""Dimensions: from marks on config models and from the user; settings put into a config."""

from __future__ import annotations

from typing import Any

import pytest
from ds_autotuning.search.space import (
    MICRO,
    STAGE,
    Dimension,
    Space,
    changes,
    installed_models,
    marked,
    merged,
    space_of,
)

from ds_core.config import Section, option
from ds_core.errors import ConfigError


class Inner(Section):
    level: int = option(
        1, "How much.", json_schema_extra={"x-ds-tune": [1, 2]}, alias="inner_level"
    )


class Outer(Section):
    mode: str = option(
        "slow", "How.", json_schema_extra={"x-ds-tune": ["slow", "fast"]}, old=("way",)
    )
    size: int = option(
        0,
        "Ranks.",
        json_schema_extra={"x-ds-tune": {"values": "divides_world", "needs": "experts"}},
    )
    late: bool = option(
        False, "When.", json_schema_extra={"x-ds-tune": {"values": [True], "stages": [3]}}
    )
    inner: Inner = option(Inner(), "More.")
    plain: int = option(1, "Not tuned.")


MODELS: dict[str, Any] = {"outer": (Outer, "acme 1.0")}


def space(base: dict[str, Any] | None = None, **options: Any) -> Space:
    given: dict[str, Any] = {"world": 4, "facts": {}, "fast": False, "own": {}, **options}
    return space_of(marked(MODELS), base or {}, **given)


def values(found: Space) -> dict[str, tuple[Any, ...]]:
    return {d.key: d.values for d in found.dimensions}


def test_marked_fields_are_dimensions_and_the_configs_own_value_comes_first() -> None:
    assert values(space()) == {
        "outer.mode": ("slow", "fast"),
        "outer.late": (False, True),
        "outer.inner.level": (1, 2),
    }
    given = space({"outer": {"way": "fast", "inner": {"inner_level": 3}}})
    assert values(given)["outer.mode"] == ("fast", "slow")
    assert values(given)["outer.inner.level"] == (3, 1, 2)


def test_what_the_profile_does_not_have_is_not_offered() -> None:
    assert "outer.size" not in values(space())
    assert values(space(facts={"experts": 8}))["outer.size"] == (0, 2, 4)
    assert values(space({"outer": {"size": 2}}, facts={"experts": 8}))["outer.size"] == (2, 1, 4)


@pytest.mark.parametrize(
    ("needs", "options", "there"),
    [
        ("mapped", {}, False),
        ("mapped", {"mapped": ["one.key"]}, True),
        ("given", {}, False),
        ("given", {"base": {"one": {}}}, True),
        (["pipeline", "mapped"], {"mapped": ["one.key"]}, False),
        (["pipeline", "mapped"], {"mapped": ["one.key"], "facts": {"pipeline": True}}, True),
    ],
)
def test_needs(needs: Any, options: dict[str, Any], there: bool) -> None:
    class One(Section):
        key: int = option(
            0, "A key.", json_schema_extra={"x-ds-tune": {"values": [0, 1], "needs": needs}}
        )

    given: dict[str, Any] = {"world": 2, "facts": {}, "fast": False, "own": {}, **options}
    base = given.pop("base", {})
    assert (
        space_of(marked({"one": (One, "acme")}), base, **given).dimension("one.key") is not None
    ) == there


def test_the_users_dimensions_replace_add_and_remove() -> None:
    found = values(
        space(
            own={
                "outer.mode": ["fast"],
                "outer.inner.level": [],
                "optimizer.params.foreach": [True, None],
            }
        )
    )
    assert found == {
        "outer.late": (False, True),
        "outer.mode": ("fast",),
        "optimizer.params.foreach": (True, None),
    }


@pytest.mark.parametrize("mark", [7, "all", {"values": [1], "need": "x"}, {"needs": "experts"}])
def test_a_mark_that_is_none_names_the_key(mark: Any) -> None:
    class Wrong(Section):
        key: int = option(0, "A key.", json_schema_extra={"x-ds-tune": mark})

    with pytest.raises(ConfigError, match=r"wrong\.key.*acme 2.*x-ds-tune"):
        marked({"wrong": (Wrong, "acme 2")})


def test_fast_is_stage_and_micro_batch_alone() -> None:
    found = space_of(marked(installed_models()), {}, world=2, facts={}, fast=True, own={})
    assert values(found) == {STAGE: (0, 1, 2, 3)}


def test_every_mark_of_the_installed_plugins_holds_for_its_field() -> None:
    """A value that its own section refuses could never be tried."""
    models = installed_models()
    found = {m.names[0]: m for m in marked(models)}
    for key, mark in found.items():
        section, *path = key.split(".")
        for value in mark.values if not isinstance(mark.values, str) else (1, 2):
            raw: Any = value
            for part in reversed(path):
                raw = {part: raw}
            if key == "tensor_parallel.autotp_size":
                continue  # any number, but a size of 1 says that it has no effect
            models[section][0].model_validate(raw)
    wanted = "offload_optimizer offload_param overlap_comm reduce_bucket_size stage"
    assert {f"zero_optimization.{name}" for name in wanted.split()} < set(found)
    assert {"pipeline.schedule", "pipeline.stages", "activation_checkpointing.modules"} < set(found)
    assert {
        "tensor_parallel.autotp_size",
        "sequence_parallel.size",
        "expert_parallel.autoep_size",
    } < set(found)


def test_settings_come_in_the_order_of_how_much_they_change() -> None:
    found = Space((Dimension(("a",), (0, 1)), Dimension(("b",), (0, 1, 2))))
    assert [(s["a"], s["b"]) for s in found.settings()] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (0, 2),
        (1, 1),
        (1, 2),
    ]
    assert len(found) == 6


def test_a_value_without_effect_in_a_stage_makes_no_other_setting() -> None:
    found = Space((Dimension((STAGE,), (0, 3)), Dimension(("late",), (False, True), stages=(3,))))
    assert found.meaning({STAGE: 0, "late": True}) == {STAGE: 0, "late": False}
    assert found.meaning({STAGE: 3, "late": True}) == {STAGE: 3, "late": True}


def test_a_setting_in_a_config_uses_the_spelling_that_stands_there_and_adds_nothing_needless() -> (
    None
):
    found = space({"outer": {"way": "fast", "plain": 2}})
    base = {"outer": {"way": "fast", "plain": 2}}
    config = merged(base, {**found.base(), "outer.mode": "slow", MICRO: 4}, found)
    assert config == {"outer": {"way": "slow", "plain": 2}, MICRO: 4}
    assert base == {"outer": {"way": "fast", "plain": 2}}
    assert changes(base, config) == config
    assert changes(base, {**base, MICRO: 4}) == {MICRO: 4}


def test_a_key_through_something_that_is_no_section_is_an_error() -> None:
    with pytest.raises(ConfigError, match="optimizer: is 3"):
        merged({"optimizer": 3}, {"optimizer.params": 1}, Space(()))
