"""The JSON Schema of a whole config file: the core's keys and every installed section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.json_schema import models_json_schema

from ds_core.config.core import CoreConfig
from ds_core.config.section import names_of, old_names

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(models: Mapping[str, tuple[type[BaseModel], str]]) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a config with these sections; editors complete and check files
    with it.

    A section whose model cannot be said in JSON Schema accepts anything there (it is still checked
    at start).
    """
    sayable = {name: model for name, (model, _) in models.items() if _sayable(model)}
    wanted: list[type[BaseModel]] = [CoreConfig, *dict.fromkeys(sayable.values())]
    refs, whole = models_json_schema(
        [(m, "validation") for m in wanted], ref_template="#/$defs/{model}", by_alias=False
    )
    definitions: dict[str, Any] = whole.get("$defs", {})
    core = definitions.pop(refs[(CoreConfig, "validation")]["$ref"].rpartition("/")[2])
    properties = dict(core["properties"])
    for name, (model, owner) in models.items():
        said: dict[str, Any] = dict(refs[(model, "validation")]) if name in sayable else {}
        properties[name] = {**said, "description": f"{_about(model)} Owner: {owner}.".strip()}
    _add_spellings(CoreConfig, properties)
    for model in wanted[1:]:
        key = refs[(model, "validation")]["$ref"].rpartition("/")[2]
        if "properties" in definitions.get(key, {}):
            _add_spellings(model, definitions[key]["properties"])
    return {
        "$schema": DIALECT,
        "title": "ds_core config",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": definitions,
    }


def _sayable(model: type[BaseModel]) -> bool:
    try:
        model.model_json_schema()
    except PydanticInvalidForJsonSchema:
        return False
    return True


def _about(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


def _add_spellings(model: type[BaseModel], properties: dict[str, Any]) -> None:
    """Aliases and deprecated spellings are accepted too."""
    for name, field in model.model_fields.items():
        if name not in properties:
            continue
        for alias in names_of(name, field):
            properties.setdefault(alias, properties[name])
        for old in old_names(field):
            said = {k: v for k, v in properties[name].items() if k != "x-ds-old-names"}
            properties.setdefault(
                old, {**said, "deprecated": True, "description": f"Deprecated: use {name}."}
            )
