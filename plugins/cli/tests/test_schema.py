"""The JSON Schema and the explanations cover every key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
from ds_cli.config.explanation import explain
from ds_cli.config.schema import json_schema
from pydantic import BaseModel, ConfigDict, RootModel

from ds_core.config import CORE_KEYS, CoreConfig, Section, option
from ds_core.config.keys import iter_keys
from ds_core.errors import ConfigError


class Rule(Section):
    dim: int = option(0, "Dimension to split.", ge=0)


class Fake(Section):
    """A section of a plugin."""

    bucket_size: int = option(
        500, "Elements per bucket.", gt=0, alias="stage3_bucket_size", old=("bucket",)
    )
    mode: Literal["a", "b"] | None = option(None, "Mode.")
    rules: list[Rule] = option([], "Rules.")
    groups: dict[str, Rule] = option({}, "Rules by name.")
    code: str | None = option("x", "Code.", secret=True)
    needed: int = option(..., "Needed.")
    wings: bool = option(False, "Wings.", not_offered="legs are faster")


class Level(RootModel[int]):
    """One number."""


class Unsayable(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    call: Callable[[], None] | None = None


class Itself(Section):
    """A section that holds itself."""

    inner: Itself | None = option(None, "The same again.")


MODELS: dict[str, tuple[type[BaseModel], str]] = {
    "fake": (Fake, "ds-fake 1.0"),
    "level": (Level, "ds-level 1.0"),
    "unsayable": (Unsayable, "ds-odd 1.0"),
    "itself": (Itself, "ds-itself 1.0"),
}


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from ([node["$ref"]] if "$ref" in node else [])
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_the_schema_is_whole() -> None:
    schema = json_schema(MODELS)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert set(schema["properties"]) == CORE_KEYS | set(MODELS)
    assert schema["additionalProperties"] is False
    for ref in references(schema):
        assert ref.removeprefix("#/$defs/") in schema["$defs"]


def test_what_an_editor_needs_is_there() -> None:
    schema = json_schema(MODELS)
    size = schema["properties"]["train_batch_size"]
    assert "Samples per optimizer update" in size["description"]
    assert {"type": "integer", "exclusiveMinimum": 0} in size["anyOf"]
    assert schema["properties"]["gradient_clipping"]["default"] == 1.0
    assert schema["properties"]["bfloat16"]["deprecated"] is True
    assert (
        schema["properties"]["fake"]["description"] == "A section of a plugin. Owner: ds-fake 1.0."
    )
    fake = schema["$defs"]["Fake"]
    assert fake["additionalProperties"] is False
    assert {"bucket_size", "stage3_bucket_size", "bucket"} <= set(fake["properties"])
    assert fake["properties"]["bucket"]["deprecated"] is True
    assert fake["properties"]["code"]["writeOnly"] is True
    assert fake["required"] == ["needed"]
    assert fake["properties"]["wings"]["x-ds-not-offered"] == "legs are faster"
    assert "$ref" not in schema["properties"]["unsayable"]


def test_every_core_key_is_described() -> None:
    for key in iter_keys(CoreConfig):
        assert key.field.description, key.path
        found = explain(key.path, {})
        assert found.owner == "dscore-train"
        assert found.type and found.default and found.description


@pytest.mark.parametrize(
    ("key", "owner", "kind", "default", "words"),
    [
        ("fp16.loss_scale", "dscore-train", "a number >= 0", "0.0", "0 means dynamic"),
        ("bfloat16.enabled", "dscore-train", "true or false", "false", "bfloat16"),
        ("bfloat16", "dscore-train", "an object {...}", None, "Deprecated spelling"),
        ("optimizer.params.lr", "dscore-train", "an object {...}", "{}", "Keyword arguments"),
        (
            "amp.enabled",
            "no package",
            "any value",
            "absent",
            "documented but not offered: Apex AMP is legacy",
        ),
        ("fake", "ds-fake 1.0", "an object {...}", "absent", "A section of a plugin."),
        (
            "fake.stage3_bucket_size",
            "ds-fake 1.0",
            "a whole number > 0",
            "500",
            "Other spellings: bucket_size.",
        ),
        ("fake.mode", "ds-fake 1.0", 'one of "a", "b" or null', "null", "Mode."),
        ("fake.rules[3].dim", "ds-fake 1.0", "a whole number >= 0", "0", "Dimension to split."),
        ("fake.groups.mine.dim", "ds-fake 1.0", "a whole number >= 0", "0", "Dimension to split."),
        ("fake.code", "ds-fake 1.0", "text or null", "***", "Code."),
        ("fake.needed", "ds-fake 1.0", "a whole number", "required", "Needed."),
        (
            "itself.inner.inner",
            "ds-itself 1.0",
            "an object {...} or null",
            "null",
            "The same again.",
        ),
        (
            "tensor_parallel.autotp_size",
            "dscore-tensor-parallel",
            "any value",
            "absent",
            "pip install -c dist/constraints.txt dscore-tensor-parallel`",
        ),
        (
            "csv_monitor",
            "dscore-monitor-csv",
            None,
            "absent",
            "pip install -c dist/constraints.txt dscore-monitor-csv`",
        ),
    ],
)
def test_explanations(
    key: str, owner: str, kind: str | None, default: str | None, words: str
) -> None:
    found = explain(key, MODELS)
    assert (found.path, found.owner) == (key, owner)
    assert kind in (None, found.type)
    assert default in (None, found.default)
    assert words in found.description


class Slow(Section):
    learning_rate: float = option(0.1, "Learning rate.", ge=0)


class Fast(Section):
    learning_rate: float = option(0.5, "Learning rate.", ge=0)
    boost: int = option(2, "Boost.")


NAMED = {
    "optimizer": {
        "slow": (Slow, "ds-slow 1"),
        "slower": (Slow, "ds-slow 1"),
        "fast": (Fast, "ds-fast 2"),
    }
}


def test_a_section_lists_its_keys_and_the_end_of_a_path_is_enough() -> None:
    assert ("auto_cast", "Cast floating-point inputs of the model to float16.") in explain(
        "fp16", {}
    ).keys
    assert [k for k, _ in explain("fake", MODELS).keys][:2] == list(MODELS["fake"][0].model_fields)[
        :2
    ]
    assert "dim" in dict(explain("fake.rules", MODELS).keys)
    assert "profile_step" in dict(explain("flops_profiler", {}).keys)
    assert explain("loss_scale", MODELS).path == "fp16.loss_scale"
    assert explain("grad_accum_dtype", {}).path == "data_types.grad_accum_dtype"


def test_a_parameter_is_explained_for_every_name_that_takes_it() -> None:
    found = explain("optimizer.params.learning_rate", MODELS, NAMED)
    assert found.owner == "ds-slow 1, ds-fast 2"
    assert found.keys == (
        ("slow, slower", "a number >= 0, default 0.1"),
        ("fast", "a number >= 0, default 0.5"),
    )
    assert explain("optimizer.params.boost", MODELS, NAMED).default == "2"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("fp16.loss_scal", "fp16.loss_scale"),
        ("enabled", "fp16.enabled"),
        ("tensor_parallel.autotp_sizes", "tensor_parallel.autotp_size"),
        ("optimizer.params.learning_rat", "optimizer.params.learning_rate"),
        ("fake.mod", "fake.mode"),
        ("zero_optimisation", "zero_optimization"),
        ("fake.rules[0].dimm", "fake.rules[].dim"),
    ],
)
def test_a_miss_names_the_nearest(key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        explain(key, MODELS, NAMED)
    (problem,) = caught.value.problems
    assert problem.path == key
    assert repr(meant) in problem.fix
