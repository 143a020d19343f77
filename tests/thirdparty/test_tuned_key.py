"""A plugin of somebody else's says which of its keys are worth a trial, and dscore-autotuning tries
them.
"""

from __future__ import annotations

import json
from typing import Any

from ds_autotuning.search.space import installed_models, key_of, marked, merged, space_of
from pydantic import BaseModel

from ds_core.config import Section, option

BASE = {"train_micro_batch_size_per_gpu": 4}


class Deeper(Section):
    """A section in the section."""

    early: bool = option(
        False,
        "Send early.",
        json_schema_extra={"x-ds-tune": {"values": [True], "stages": [1, 2], "needs": "pipeline"}},
    )


class Pipes(Section):
    """The section ``acme_pipes``."""

    lanes: int = option(
        1, "Messages under way at a time.", json_schema_extra={"x-ds-tune": [1, 2, 4]}
    )
    ranks: int = option(
        1, "Ranks that share a lane.", json_schema_extra={"x-ds-tune": "divides_world"}
    )
    other: int = option(3, "Not worth a trial.")
    deeper: Deeper = option(Deeper(), "More.")


MODELS: dict[str, tuple[type[BaseModel], str]] = {"acme_pipes": (Pipes, "acme 1.0")}


def values(world: int, **facts: Any) -> dict[str, tuple[Any, ...]]:
    space = space_of(marked(MODELS), BASE, world=world, facts=facts, fast=False, own={})
    return {d.key: d.values for d in space.dimensions}


def test_the_marks_are_its_dimensions() -> None:
    assert values(6) == {"acme_pipes.lanes": (1, 2, 4), "acme_pipes.ranks": (1, 2, 3, 6)}
    assert values(1) == {"acme_pipes.lanes": (1, 2, 4)}  # nothing to divide
    assert values(2, pipeline=True)["acme_pipes.deeper.early"] == (False, True)


def test_a_setting_reaches_the_config() -> None:
    space = space_of(marked(MODELS), BASE, world=2, facts={"pipeline": True}, fast=False, own={})
    setting = {**space.base(), "acme_pipes.lanes": 4, "acme_pipes.deeper.early": True}
    config = merged(BASE, setting, space)
    assert key_of(config) == key_of({**BASE, "acme_pipes": {"lanes": 4, "deeper": {"early": True}}})
    Pipes.model_validate(config["acme_pipes"])


def test_marks_of_installed_plugins_are_found_and_are_documented_values() -> None:
    found = {mark.names[0]: mark.values for mark in marked(installed_models())}
    assert found["zero_optimization.stage"] == (0, 1, 2, 3)
    json.dumps(list(found.values()))  # they can stand in a config
