"""Sections with one of everything, and configs that are refused, for the tests of the config."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, RootModel

from ds_core.config import Section, build_config, option
from ds_core.errors import ConfigError


class Rule(Section):
    """Part of a section."""

    patterns: list[str] = option([], "Names of parameters.")
    dim: int | None = option(None, "Dimension.", ge=0)
    mode: Literal["auto"] | float = option(1.0, "Mode.")


class Fake(Section):
    """A plugin's section with one of everything."""

    enabled: bool = option(False, "On.")
    bucket_size: int = option(
        500, "Elements per bucket.", ge=0, alias="stage3_bucket_size", old=("bucket",)
    )
    ratio: float = option(1.0, "Share.", ge=0, le=1)
    strategy: Literal["auto", "step", "epoch"] = option("auto", "When.")
    rules: list[Rule] = option([], "Rules.")
    groups: dict[str, Rule] = option({}, "Rules by name.")
    betas: tuple[float, float] = option((0.9, 0.999), "Decay.")
    sub: Rule | bool = option(False, "A rule, or false.")
    api_key: str | None = option(None, "Key of the service.", secret=True)
    output_path: str = option("", "Folder.", min_length=0)


class Plain(BaseModel):
    """A third party's own pydantic model."""

    model_config = ConfigDict(extra="forbid")
    size: int = 1
    name: str = ""


class Level(RootModel[int]):
    """A section that is one number."""


MODELS: dict[str, tuple[type[BaseModel], str]] = {
    "fake": (Fake, "ds-fake 1.2.0"),
    "plain": (Plain, "ds-plain 0.1.0"),
    "level": (Level, "ds-level 0.1.0"),
}


def nest(path: str, value: Any) -> dict[str, Any]:
    """`value` under a dotted key."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


def refused(config: Any) -> ConfigError:
    """The error that a config gives."""
    with pytest.raises(ConfigError) as caught:
        build_config(config, MODELS, list(MODELS))
    return caught.value
