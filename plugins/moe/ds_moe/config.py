"""The section ``expert_parallel``: AutoEP, with every documented key (torch-free)."""

from __future__ import annotations

import re
import warnings
from typing import Literal

from pydantic import field_validator, model_validator
from typing_extensions import Self

from ds_core.config import Section, option
from ds_core.errors import PluginError, nearest

ROUTING = (
    "score_func",
    "route_norm",
    "route_scale",
    "routed_scaling_factor",
    "top_k",
    "num_expert_groups",
)
"""The keys that change the model's routing."""


class ExpertParallelConfig(Section):
    """Expert parallelism for models with their own MoE blocks (AutoEP)."""

    enabled: bool = option(
        False, "Find the model's MoE blocks and spread their experts over ranks."
    )
    autoep_size: int = option(
        1,
        "Ranks that share the experts of a layer; divides their number and the data-parallel size.",
        ge=1,
        json_schema_extra={"x-ds-tune": {"values": "divides_world", "needs": ["experts", "given"]}},
    )
    expert_tensor_parallel_size: int = option(1, "Reserved: experts are not cut further. Only 1.")
    preset_model: str | None = option(
        None,
        "The family of models: mixtral, qwen3_moe, qwen3_5_moe, deepseek_v2, deepseek_v3, one that "
        "a plugin adds, or 'package.module:PRESET'. Default: found by the model's type.",
        min_length=1,
    )
    use_grouped_mm: bool = option(
        True, "Run all local experts as one grouped product instead of one after the other."
    )
    disable_triton_grouped_mm: bool = option(
        False,
        "Never a Triton kernel.",
        without_effect="dscore-moe has no Triton kernel, so none is ever taken",
    )
    moe_layer_pattern: str | None = option(
        None, "Regular expression that matches the full name of a MoE block."
    )
    router_pattern: str | None = option(None, "Name of the block's child that is the router.")
    expert_pattern: str | None = option(None, "Name of the block's child that holds the experts.")
    shared_experts_pattern: str | None = option(
        None, "Name of the block's child that every token passes."
    )
    shared_experts_gate_pattern: str | None = option(
        None, "Name of the child that weighs the shared experts' output."
    )
    expert_w1: str | None = option(
        None, "Name of the experts' first weight: gate, or gate and up in one."
    )
    expert_w2: str | None = option(None, "Name of the experts' last weight: down.")
    expert_w3: str | None = option(
        None, "Name of the experts' up weight; null: expert_w1 holds it. Absent: the preset's."
    )
    num_experts_attr: str | None = option(
        None, "Attribute of the model's config with the number of experts."
    )
    top_k_attr: str | None = option(
        None, "Attribute of the model's config with the experts per token."
    )
    has_shared_experts: bool | None = option(
        None, "Whether blocks have shared experts; needs shared_experts_pattern."
    )
    score_func: Literal["auto", "softmax", "sigmoid"] = option(
        "auto", "How router logits become scores."
    )
    score_apply: Literal["auto", "pre", "post"] = option(
        "auto", "Multiply the experts' input or output by the scores."
    )
    combine_impl: Literal["auto", "weighted_sum", "legacy_bmm"] = option(
        "auto",
        "How a token's experts are added up: a weighted sum, or a batched matrix product. The same "
        "numbers.",
    )
    route_norm: bool | None = option(
        None, "Divide the chosen scores of a token by their sum. Default: as the model."
    )
    route_scale: float = option(
        1.0, "The scores are multiplied by this, on top of routed_scaling_factor."
    )
    routed_scaling_factor: float | Literal["auto"] = option(
        "auto", "The same; 'auto': the value in the model's config."
    )
    top_k: int | Literal["auto"] = option(
        "auto", "Experts per token, instead of what top_k_attr names."
    )
    num_expert_groups: int | None = option(None, "Group-limited routing: groups of experts.", ge=1)
    num_limited_groups: int | None = option(
        None, "Group-limited routing: groups a token may use.", ge=1
    )
    load_balance_coeff: float | None = option(None, "Reserved: only null.")
    validate_folding_routing: bool = option(
        False,
        "Check in every forward that routing is complete and each row has reached its expert. "
        "Slow.",
    )

    @property
    def reroutes(self) -> tuple[str, ...]:
        """The keys that are set to other values than the model's."""
        fields = type(self).model_fields
        return tuple(key for key in ROUTING if getattr(self, key) != fields[key].get_default())

    @field_validator("expert_tensor_parallel_size")
    @classmethod
    def _one(cls, value: int) -> int:
        if value != 1:
            raise ValueError(f"{value} is not possible: experts are not cut further; use 1")
        return value

    @field_validator("load_balance_coeff")
    @classmethod
    def _null(cls, value: float | None) -> float | None:
        if value is not None:
            raise ValueError(
                f"{value:g} is not possible: the key is reserved, and a router's selection bias "
                "stays the model's; use null, and the model's own auxiliary loss"
            )
        return value

    @field_validator("preset_model")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        from ds_moe.autoep import presets

        if value is None:
            return value
        try:
            found = presets.find(value)
        except PluginError as error:
            raise ValueError(str(error)) from error
        if found is None:
            known = presets.names()
            hint = nearest(value, known)
            meant = f"; did you mean {hint!r}?" if hint else ""
            raise ValueError(f"unknown preset {value!r}{meant}; use {', '.join(known)}")
        return value

    @field_validator("moe_layer_pattern")
    @classmethod
    def _regex(cls, value: str | None) -> str | None:
        if value is not None:
            if not value:
                raise ValueError(
                    "is empty; give a regular expression such as 'model\\.layers\\.\\d+\\.mlp'"
                )
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"{value!r} is no regular expression: {error}") from error
        return value

    @field_validator(
        "router_pattern",
        "expert_pattern",
        "shared_experts_pattern",
        "shared_experts_gate_pattern",
        "expert_w1",
        "expert_w2",
        "expert_w3",
        "num_experts_attr",
        "top_k_attr",
    )
    @classmethod
    def _one_name(cls, value: str | None) -> str | None:
        if value is not None and (not value.strip() or "." in value):
            raise ValueError(
                f"{value!r} is not the name of a direct child or attribute; give one name, without "
                "dots (it is no regular expression)"
            )
        return value

    @field_validator("routed_scaling_factor", "top_k")
    @classmethod
    def _positive(cls, value: float | str) -> float | str:
        if not isinstance(value, str) and value <= 0:
            raise ValueError(f"{value:g} is not possible; give a number above 0, or 'auto'")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        groups = self.num_expert_groups
        limited = self.num_limited_groups
        if (groups is None) != (limited is None):
            given, other = (
                ("num_expert_groups", "num_limited_groups")
                if limited is None
                else ("num_limited_groups", "num_expert_groups")
            )
            raise ValueError(f"{given} is set without {other}; set both, or none")
        if groups is not None and limited is not None and limited > groups:
            raise ValueError(
                f"num_limited_groups {limited} is more than num_expert_groups {groups}; use 1 to "
                f"{groups}"
            )
        if self.top_k != "auto" and self.top_k_attr is not None:
            warnings.warn(
                f"expert_parallel: top_k {self.top_k} overrides top_k_attr {self.top_k_attr!r}; "
                "leave one out",
                UserWarning,
                stacklevel=2,
            )
        named = self.shared_experts_pattern is not None
        if (named or self.has_shared_experts is not None) and named != bool(
            self.has_shared_experts
        ):
            warnings.warn(
                f"expert_parallel: shared_experts_pattern is {self.shared_experts_pattern!r} and "
                f"has_shared_experts {self.has_shared_experts}; they go together: set both, or "
                "has_shared_experts false alone",
                UserWarning,
                stacklevel=2,
            )
        return self
