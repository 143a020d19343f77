"""`init_inference`: an engine from a model, a config and keywords."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ds_core.config import read_config
from ds_core.config.build import notes_on
from ds_core.config.translate import translate_errors
from ds_core.errors import ConfigError
from ds_core.process import log_once
from ds_inference.config import DeepSpeedInferenceConfig

if TYPE_CHECKING:
    from torch import nn

    from ds_inference.engine import InferenceEngine

log = logging.getLogger("ds_inference")


def init_inference(model: nn.Module, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """An engine that answers with `model`.

    config: a dict, the path of a JSON file, or a `DeepSpeedInferenceConfig`.
    kwargs: more of its keys.

    Collective where several ranks divide the model. Raises ValueError for a key with two values,
    ConfigError for what is wrong in it.
    """
    from ds_inference.engine import InferenceEngine

    return InferenceEngine(model, make_config(config, **kwargs))


def make_config(config: Any = None, **kwargs: Any) -> DeepSpeedInferenceConfig:
    """The checked config, of one that is given and of keywords."""
    origin = "init_inference"
    if config is None:
        given: dict[str, Any] = {}
    elif isinstance(config, DeepSpeedInferenceConfig):
        # Only what was set: a default must not count as a value beside a keyword.
        given = {name: getattr(config, name) for name in config.model_fields_set}
    elif isinstance(config, Mapping):
        given = dict(config)
    elif isinstance(config, (str, os.PathLike)):
        read = read_config(config)
        given = read.raw
        origin = read.origin
    else:
        raise ConfigError(
            "config must be a dict, a path or a DeepSpeedInferenceConfig, not a "
            f"{type(config).__name__}"
        )
    merged = _merge(given, kwargs)
    try:
        parsed = DeepSpeedInferenceConfig.model_validate(merged)
    except ValidationError as error:
        problems = translate_errors(
            error, DeepSpeedInferenceConfig, owner="dscore-inference", data=merged
        )
        raise ConfigError(problems, origin) from error
    # The values of injection_policy are by class, which the notes could not show as JSON.
    written = {key: value for key, value in merged.items() if key != "injection_policy"}
    if notes := "; ".join(map(str, notes_on(parsed, written))):
        log_once(log, logging.WARNING, f"{origin}: {notes}".replace("%", "%%"))
    return parsed


def default_inference_config() -> dict[str, Any]:
    """Every key with its default."""
    return DeepSpeedInferenceConfig().model_dump(mode="json")


def _merge(given: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Both together, by the names of fields. ValueError for a key that has two values."""
    names = {
        field.alias: name
        for name, field in DeepSpeedInferenceConfig.model_fields.items()
        if field.alias is not None
    }
    merged: dict[str, Any] = {}
    for source in (given, more):
        for key, value in source.items():
            # A key and its other name are one key: given twice with the same value they are no
            # clash.
            name = names.get(key, key)
            if name in merged and not _same(merged[name], value):
                raise ValueError(
                    f"init_inference: {name} is {merged[name]!r} in one place and {value!r} in "
                    "another; give it once"
                )
            merged[name] = value
    return merged


def _same(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)
