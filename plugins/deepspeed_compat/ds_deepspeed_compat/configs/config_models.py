"""DeepSpeed's config models: the sections of ds_core and its packages, with values that can be set.

Each is a subclass of the section's own model: the same keys, defaults and checks, also when a value
is set. It is made when it is first asked for; a package that is not installed is named then.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, create_model, model_validator

from ds_core.config import Section
from ds_core.config.core import CoreConfig
from ds_core.config.section import is_class


class DeepSpeedConfigModel(Section):
    """Base of DeepSpeed's config models.

    A value that is set is checked; "auto" counts as left out.
    """

    model_config = ConfigDict(frozen=False, validate_assignment=True)

    @model_validator(mode="before")
    @classmethod
    def _without_auto(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v != "auto"} if isinstance(data, dict) else data


class _FP16(DeepSpeedConfigModel):
    """What DeepSpeed's section of float16 computes."""

    def initial_dynamic_scale(self: Any) -> float:
        """The dynamic loss scale at the start."""
        return float(2**self.initial_scale_power)

    def dynamic_loss_scale_args(self: Any) -> dict[str, Any] | None:
        """Arguments of a dynamic loss scaler; None where the config has none of them."""
        keys = {
            "initial_scale_power",
            "loss_scale_window",
            "min_loss_scale",
            "hysteresis",
            "consecutive_hysteresis",
        }
        if keys.isdisjoint(self.model_fields_set):
            return None
        return {
            "init_scale": 2**self.initial_scale_power,
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


class _Zero(DeepSpeedConfigModel):
    """Defaults that depend on the stage, as values."""

    @model_validator(mode="after")
    def _values(self) -> Any:
        values = vars(self)
        if values["overlap_comm"] is None:
            values["overlap_comm"] = values["stage"] == 3
        if values["gather_16bit_weights_on_model_save"] is None:
            values["gather_16bit_weights_on_model_save"] = False
        return self


_MODELS: Mapping[str, tuple[str, type[DeepSpeedConfigModel]]] = {
    "DeepSpeedZeroConfig": ("ds_zero.config:ZeroConfig", _Zero),
    "DeepSpeedZeroOffloadParamConfig": (
        "ds_zero.config_offload:OffloadParam",
        DeepSpeedConfigModel,
    ),
    "DeepSpeedZeroOffloadOptimizerConfig": (
        "ds_zero.config_offload:OffloadOptimizer",
        DeepSpeedConfigModel,
    ),
    "ZenFlowConfig": ("ds_zero.config_offload:ZenFlowConfig", DeepSpeedConfigModel),
    "DeepSpeedZeroLeafModuleConfig": ("ds_zero.config:LeafModules", DeepSpeedConfigModel),
    "TensorBoardConfig": ("ds_monitor_tensorboard.config:TensorBoardConfig", DeepSpeedConfigModel),
    "CSVConfig": ("ds_monitor_csv.config:CSVConfig", DeepSpeedConfigModel),
    "WandbConfig": ("ds_monitor_wandb.config:WandbConfig", DeepSpeedConfigModel),
    "CometConfig": ("ds_monitor_comet.config:CometConfig", DeepSpeedConfigModel),
    "CompileConfig": ("ds_compile.config:CompileConfig", DeepSpeedConfigModel),
    "HybridEngineConfig": ("ds_inference.hybrid_config:HybridEngine", DeepSpeedConfigModel),
    "CommsLoggerConfig": ("ds_comms_logger.config:CommsLogger", DeepSpeedConfigModel),
}
"""DeepSpeed's name -> the section's model, and what DeepSpeed's adds to it."""


def model_named(name: str) -> Any:
    """The model that DeepSpeed calls `name`, made now.

    Raises ModuleNotFoundError without the section's package.
    """
    if name not in _MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    reference, base = _MODELS[name]
    module, _, attribute = reference.partition(":")
    return opened(getattr(importlib.import_module(module), attribute), base, name)


__getattr__ = model_named


@functools.cache
def opened(
    model: type[BaseModel], base: type[DeepSpeedConfigModel] = DeepSpeedConfigModel, name: str = ""
) -> type[BaseModel]:
    """`model` with values that can be set, in the sections inside it too; `base` has what comes on
    top.
    """
    changed: dict[str, Any] = {}
    for key, field in model.model_fields.items():
        hint = _opened_hint(field.annotation)
        if hint != field.annotation:
            field = copy.copy(field)
            if isinstance(field.default, BaseModel):
                field.default = opened(type(field.default), *_known(type(field.default)))()
            changed[key] = (hint, field)
    made: type[BaseModel] = create_model(
        name or model.__name__,
        __base__=(model, base),
        __module__=__name__,
        __doc__=model.__doc__,
        **changed,
    )
    return made


def _opened_hint(hint: Any) -> Any:
    if is_class(hint, Section):
        return opened(hint, *_known(hint))
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(_opened_hint(member) for member in get_args(hint))]  # noqa: UP007  made at run time
    return hint


def _known(model: type[BaseModel]) -> tuple[type[DeepSpeedConfigModel], str]:
    """What DeepSpeed adds to a model, and its name there."""
    reference = f"{model.__module__}:{model.__qualname__}"
    return next(
        ((base, name) for name, (known, base) in _MODELS.items() if known == reference),
        (DeepSpeedConfigModel, ""),
    )


def values_of(parsed: BaseModel | None, model: type[BaseModel]) -> Any:
    """A section as it was parsed, as one whose values can be set; the defaults for None."""
    return (
        model() if parsed is None else model.model_validate(parsed.model_dump(exclude_unset=True))
    )


_FIELDS: Any = CoreConfig.model_fields
DeepSpeedFP16Config: Any = opened(_FIELDS["fp16"].annotation, _FP16, "DeepSpeedFP16Config")
DeepSpeedBF16Config: Any = opened(
    _FIELDS["bf16"].annotation, DeepSpeedConfigModel, "DeepSpeedBF16Config"
)


def get_scalar_param(
    param_dict: Mapping[str, Any], param_name: str, param_default_value: Any
) -> Any:
    """One value of a section, or a default."""
    return param_dict.get(param_name, param_default_value)


def get_float16_config(param_dict: Mapping[str, Any]) -> Any:
    """The section ``fp16`` of a whole config."""
    return DeepSpeedFP16Config(**param_dict.get("fp16", {}))


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> Any:
    """The section ``bf16`` of a whole config, also under its old name."""
    return DeepSpeedBF16Config(**param_dict.get("bf16", param_dict.get("bfloat16", {})))


def get_zero_config(param_dict: Mapping[str, Any]) -> Any:
    """The section ``zero_optimization`` of a whole config."""
    return model_named("DeepSpeedZeroConfig").model_validate(
        param_dict.get("zero_optimization", {})
    )
