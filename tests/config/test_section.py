"""What `Section` accepts, moves, refuses and shows."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field, SecretStr, ValidationError, field_validator

from ds_core.config import Section, build_config, option
from ds_core.config.translate import translate_errors
from ds_core.errors import ConfigError
from ds_core.setup.compose import compose


class Colour(Enum):
    RED = "red"


class Inner(Section):
    size: int | None = option(None, "Size.")


class Thing(Section):
    whole: int = option(1, "Whole.")
    number: float = option(1.0, "Number.")
    flag: bool = option(False, "Flag.")
    text: str = option("", "Text.")
    maybe: int | None = option(None, "Maybe.")
    either: int | float = option(1, "Either.")
    pair: tuple[int, float] = option((1, 1.0), "Pair.")
    many: tuple[int, ...] = option((), "Many.")
    names: set[str] = option(set(), "Names.")
    counts: dict[str, int] = option({}, "Counts.")
    colour: Colour = option(Colour.RED, "Colour.")
    folder: Path = option(Path(), "Folder.")
    stage: Literal[0, 1, 2] = option(0, "Stage.")
    on: Literal[True] = option(True, "On.")
    inners: list[Inner] = option([], "Inners.")
    new: int = option(0, "New.", old=("older", "oldest"))
    aliased: int = option(0, "Aliased.", alias="stage3_aliased")
    wings: bool = option(False, "Wings.", not_offered="legs are faster")
    marked: int = option(1, "Marked.", old=("noted",), json_schema_extra={"x-acme": [1, 2]})
    plain_field: int = Field(3, gt=2, description="An ordinary pydantic field.")


def parse(**values: Any) -> Thing:
    return Thing.model_validate(values)


@pytest.mark.parametrize(
    ("key", "value", "result"),
    [
        ("whole", 5e8, 500_000_000),
        ("maybe", 2.0, 2),
        ("number", 3, 3.0),
        ("either", 2.0, 2.0),
        ("pair", [1.0, 2], (1, 2.0)),
        ("many", [1, 2.0], (1, 2)),
        ("names", ["a", "b"], {"a", "b"}),
        ("counts", {"a": 1e3}, {"a": 1000}),
        ("colour", "red", Colour.RED),
        ("folder", "x/y", Path("x/y")),
        ("stage", 2.0, 2),
        ("inners", [{"size": 1.0}], [Inner(size=1)]),
        ("stage3_aliased", 4.0, 4),
        ("wings", False, False),
        ("marked", 2.0, 2),
        ("plain_field", 4.0, 4),
    ],
)
def test_accepted(key: str, value: Any, result: Any) -> None:
    got = getattr(parse(**{key: value}), key.removeprefix("stage3_"))
    assert got == result
    assert type(got) is type(result)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("whole", True),
        ("whole", "1"),
        ("whole", 1.5),
        ("whole", float("inf")),
        ("number", True),
        ("number", "1"),
        ("number", float("nan")),
        ("flag", 1),
        ("flag", "true"),
        ("text", 1),
        ("pair", [1]),
        ("many", [True]),
        ("names", [1]),
        ("names", [[]]),
        ("counts", {"a": True}),
        ("colour", "blue"),
        ("stage", True),
        ("stage", 3),
        ("on", 1),
        ("wings", True),
        ("plain_field", 2),
        ("unknown", 1),
    ],
)
def test_refused(key: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        parse(**{key: value})
    (problem,) = {
        p.path.partition("[")[0].partition(".a")[0]
        for p in translate_errors(caught.value, Thing, "thing")
    }
    assert problem == f"thing.{key}"


def test_a_section_is_frozen() -> None:
    with pytest.raises(ValidationError):
        parse().whole = 2


def noted(given: dict[str, Any], models: dict[str, Any] | None = None) -> list[str]:
    """The notes on a config; nothing else warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [str(note) for note in build_config(given, models or {}).notes]


def test_an_old_name_is_moved_with_a_note() -> None:
    given = {"older": 7}
    assert Thing.model_validate(given).new == 7
    assert given == {"older": 7}
    models = {"thing": (Thing, "ds-thing 1")}
    assert noted({"thing": given}, models) == [
        "thing.older: is deprecated and was read as 'new'; rename it"
    ]


def test_new_names_are_not_noted() -> None:
    assert (
        noted({"bf16": {"enabled": True}, "gradient_clipping": 2, "disable_allgather": False}) == []
    )


def test_deprecated_core_keys_are_moved() -> None:
    given = {"bfloat16": {"enabled": True}, "fp16": {"clip": 0.5}}
    core = build_config(given, {}).core
    assert core.bf16.enabled
    assert core.gradient_clipping == 0.5
    assert noted(given) == [
        "bfloat16: is deprecated and was read as 'bf16'; rename it",
        "fp16.clip: is deprecated and was read as 'gradient_clipping'; rename it",
    ]


class Unseen(Section):
    shown: int = option(0, "Shown.", without_effect="nobody looks", alias="long_shown")


class Outer(Section):
    inner: Unseen = option(Unseen(), "One.")
    listed: list[Unseen] = option([], "Many.")
    by_name: dict[str, Unseen] = option({}, "Named.")
    on: bool = option(False, "Switch.")

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        if "on" in given:
            yield "on", f"was given as {given['on']}"


def test_what_has_no_effect_is_noted_where_it_was_written() -> None:
    given = {
        "inner": {"long_shown": 1},
        "listed": [{}, {"shown": 2}],
        "by_name": {"a.b": {"shown": 0}},
        "on": True,
    }
    why = "has no effect: nobody looks"
    assert noted({"outer": given}, {"outer": (Outer, "ds-outer 1")}) == [
        f"outer.inner.long_shown: {why}",
        f"outer.listed[1].shown: {why}",
        "outer.on: was given as True",
    ]


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"disable_allgather": True}, "disable_allgather"),
        ({"optimizer": {"type": "Lamb", "legacy_fusion": True}}, "optimizer.legacy_fusion"),
        (
            {
                "fp16": {
                    "enabled": True,
                    "loss_scale": 128,
                    "hysteresis": 3,
                    "loss_scale_window": 1000,
                }
            },
            "fp16.hysteresis",
        ),
    ],
)
def test_keys_of_the_core_without_effect(given: dict[str, Any], key: str) -> None:
    (note,) = noted(given)
    assert note.startswith(f"{key}: has no effect: ")


@pytest.mark.parametrize("both", [{"older": 1, "new": 1}, {"oldest": 1, "older": 1}])
def test_both_spellings_are_refused(both: dict[str, int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigError, match="both are set"):
            build_config({"thing": both}, {"thing": (Thing, "ds-thing 1")})


def test_a_key_and_its_alias_are_refused() -> None:
    class Named(Section):
        size: int = option(1, "How large.", alias="stage3_size")

    assert (
        build_config({"thing": {"stage3_size": 2}}, {"thing": (Named, "ds-thing 1")})
        .section("thing")
        .size
        == 2
    )
    said = (
        r"thing.stage3_size: is another spelling of thing.size, and both are set; keep "
        r"thing.size "
        r"only"
    )
    with pytest.raises(ConfigError, match=said):
        build_config({"thing": {"size": 2, "stage3_size": 2}}, {"thing": (Named, "ds-thing 1")})


class Vault(Section):
    login: str | None = option(None, "A log-in.", secret=True)
    typed: SecretStr | None = option(None, "Typed.")
    params: dict[str, Any] = option({}, "Anything.")


def test_repr_hides_secrets() -> None:
    vault = Vault.model_validate(
        {"login": "hunter2", "typed": "hunter3", "params": {"api_key": "hunter4", "x": 1}}
    )
    for text in (repr(vault), str(vault)):
        assert "hunter" not in text
        assert "'x': 1" in text
    assert vault.login == "hunter2"


class Angry(BaseModel):
    """A third party's model whose validators quote what they were given."""

    password: str = ""
    level: int = 0

    @field_validator("password")
    @classmethod
    def _quote(cls, value: str) -> str:
        if len(value) < 10:
            raise ValueError(f"the password {value} is too short")
        return value

    @field_validator("level")
    @classmethod
    def _crash(cls, value: int) -> int:
        if value == 13:
            raise KeyError("thirteen")
        assert value != 14, "fourteen is odd"
        return value


def test_foreign_validators_are_translated() -> None:
    models: dict[str, tuple[type[BaseModel], str]] = {"angry": (Angry, "ds-angry 1.0")}
    with pytest.raises(ConfigError) as caught:
        build_config({"angry": {"password": "hunter2"}}, models)
    assert (
        str(caught.value)
        == "config dict: angry.password: the password *** is too short (the value is ***)"
    )
    with pytest.raises(
        ConfigError, match=r"angry: ds-angry 1.0 failed to check this section: KeyError: 'thirteen'"
    ):
        build_config({"angry": {"level": 13}}, models)
    with pytest.raises(ConfigError, match=r"angry.level: .*fourteen is odd"):
        build_config({"angry": {"level": 14}}, models)
    # A chained error would show the value through pydantic's own message.
    assert caught.value.__cause__ is None and caught.value.__context__ is None


def test_plugins_that_are_named_and_not_there_are_noted() -> None:
    asked = {
        "disable": ["tensorbord", "csv_monitor", "dscore-zero"],
        "prefer": {"my_section": "my-plugin"},
    }
    disabled, preferred = (str(note) for note in compose({"plugins": asked}).notes)
    assert disabled.startswith(
        "plugins.disable[0]: has no effect: nothing installed is called 'tensorbord'"
    )
    assert disabled.endswith("did you mean 'tensorboard'?")
    assert preferred.startswith("plugins.prefer.my_section: has no effect: ")


def test_marks_of_others_stay_with_the_field() -> None:
    from ds_core.config.section import marks, old_names

    field = Thing.model_fields["marked"]
    assert marks(field)["x-acme"] == [1, 2]
    assert old_names(field) == ("noted",)
    assert parse(noted=3).marked == 3
