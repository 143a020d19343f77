"""Rules as objects, by DeepSpeed's names, for scripts that build them in Python (torch-free).

They are mappings with the keys of ``tensor_parallel.partition_config``, so one can stand in a
config wherever that dict can: reading the config copies it to plain data, which is validated as any
other.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

from ds_core.config import read_config
from ds_core.errors import UsageError
from ds_tensor_parallel.config import PRESETS, PartitionConfig
from ds_tensor_parallel.planning.presets import BUILT_IN
from ds_tensor_parallel.planning.rules import Kind


class PartitionType(str, Enum):
    """How a layer is divided: its outputs, its inputs, or not at all."""

    COLUMN = "column"
    ROW = "row"
    SKIP = "skip"


class _Keys(Mapping[str, Any]):
    """The fields of a dataclass as keys."""

    def __getitem__(self, key: str) -> Any:
        if key not in list(self):
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return (f.name for f in dataclasses.fields(self))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(list(iter(self)))


@dataclass
class TPLayerSpec(_Keys):
    """One rule; the fields are those of an entry of ``layer_specs``."""

    patterns: list[str]
    partition_type: PartitionType = PartitionType.COLUMN
    shape: Sequence[int | Sequence[int]] | None = None
    partition_dim: int | None = None
    model_types: list[str] | None = None
    gather_output: bool = False
    grad_allreduce: bool = False

    def matches(self, param_name: str, model_type: str | None = None) -> bool:
        """Whether the rule is for the parameter `param_name` of a model of this type."""
        if self.model_types and (model_type or "").lower() not in [
            t.lower() for t in self.model_types
        ]:
            return False
        return any(re.match(pattern, param_name) for pattern in self.patterns)


@dataclass
class AutoTPConfig(_Keys):
    """Rules in order; the fields are those of ``partition_config``."""

    tp_size: int = 1
    layer_specs: list[TPLayerSpec] = field(default_factory=list)
    embedding_partition_dim: int = 1
    lm_head_patterns: list[str] = field(default_factory=lambda: ["lm_head", "embed_out"])
    use_default_specs: bool = True
    strict_mode: bool = False

    def find_matching_spec(
        self, param_name: str, model_type: str | None = None
    ) -> TPLayerSpec | None:
        """The first rule that is for the parameter."""
        return next(
            (spec for spec in self.layer_specs if spec.matches(param_name, model_type)), None
        )

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> AutoTPConfig:
        """From a dict like ``partition_config``, checked as the section is."""
        values = PartitionConfig.model_validate(read_config(config_dict).raw).model_dump()
        return cls(**{**values, "layer_specs": [_spec(spec) for spec in values["layer_specs"]]})


def _spec(values: Mapping[str, Any]) -> TPLayerSpec:
    shape = values["shape"]
    tuples = None if shape is None else tuple(tuple(n) if isinstance(n, list) else n for n in shape)
    return TPLayerSpec(
        **{**values, "partition_type": PartitionType(values["partition_type"]), "shape": tuples}
    )


def merge_autotp_configs(base: AutoTPConfig, override: AutoTPConfig) -> AutoTPConfig:
    """The rules of `override`, then those of `base`; the other fields are of `override`.

    A tp_size of 1 and empty lm_head_patterns are taken from `base`.
    """
    return dataclasses.replace(
        override,
        tp_size=override.tp_size if override.tp_size > 1 else base.tp_size,
        layer_specs=[*override.layer_specs, *base.layer_specs],
        lm_head_patterns=override.lm_head_patterns or base.lm_head_patterns,
    )


def _preset(name: str) -> AutoTPConfig:
    """The rules of a preset of ds_tensor_parallel.

    UsageError where ``layer_specs`` cannot say them.
    """
    specs = []
    for pattern, rule in BUILT_IN[name].rules.items():
        if rule.kind not in (Kind.COLUMN, Kind.ROW) or rule.segments != 1:
            raise UsageError(
                f"AutoTPPresets: {name} is cut by the model's own heads or experts, which "
                f"layer_specs cannot say; set tensor_parallel.preset_model to {name!r}, with "
                "partition_config for your rules"
            )
        names = rf".*{pattern.removesuffix('$')}\.weight$"
        specs.append(TPLayerSpec([names], PartitionType(rule.kind.value)))
    return AutoTPConfig(layer_specs=specs)


class AutoTPPresets:
    """The presets as objects. A family whose rules `AutoTPConfig` cannot hold is a UsageError."""

    bloom, chatglm, deepseek_v2, llama, mixtral, phi3, qwen2 = (
        staticmethod(partial(_preset, name))
        for name in ("bloom", "chatglm", "deepseek_v2", "llama", "mixtral", "phi3", "qwen2")
    )

    @staticmethod
    def get_preset(model_type: str) -> AutoTPConfig | None:
        """The preset of that name, in any case; None where there is none."""
        return _preset(model_type.lower()) if model_type.lower() in PRESETS else None
