"""The part ``data_routing`` of the section ``data_efficiency`` (torch-free)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from ds_core.config import Section, option


class RandomLTDSteps(Section):
    """How fast the kept length grows."""

    require_steps: int = option(..., "Steps until max_value is reached.", gt=0)
    seq_per_step: int = option(..., "The kept length is a multiple of this many tokens.", gt=0)


class RandomLTDSchedule(Section):
    """How many tokens a layer keeps, by step."""

    min_value: int = option(..., "Tokens kept at the first step.", gt=0)
    max_value: int = option(..., "Tokens kept at the end: the whole sequence.", gt=0)
    schedule_type: Literal["fixed_linear"] = option("fixed_linear", "How it grows: fixed_linear.")
    schedule_config: RandomLTDSteps = option(..., "The numbers of the schedule.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_value > self.max_value:
            raise ValueError(f"min_value {self.min_value} is more than max_value {self.max_value}")
        return self


class LayerTokenLR(Section):
    """A learning rate by the tokens that layers have seen."""

    enabled: bool = option(
        False, "Scale the learning rate by the tokens that layers have seen: not offered."
    )

    @field_validator("enabled")
    @classmethod
    def _off(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "is documented but unfinished in DeepSpeed, too; set it to false and use a "
                "scheduler"
            )
        return value


class RandomLTD(Section):
    """Random layer token drop: middle layers work on some of the tokens."""

    enabled: bool = option(False, "Let layers drop tokens.")
    total_layer_num: int | None = option(None, "Layers of the model.", gt=0)
    random_ltd_layer_num: int | None = option(None, "How many of them drop tokens.", gt=0)
    random_ltd_layer_id: list[Annotated[int, Field(ge=0)]] | None = option(
        None, "Which of them drop tokens, counted from 0.", min_length=1
    )
    model_mask_name: str | None = option(
        None, "Argument of a layer's forward that is the attention mask; null: none."
    )
    model_type: Literal["decoder", "encoder"] | None = option(
        None,
        "Kind of model.",
        without_effect="kept tokens stay in order, and masks are cut to them, in both kinds",
    )
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] | None = option(
        None, "Order of the dimensions of hidden states."
    )
    random_ltd_schedule: RandomLTDSchedule | None = option(
        None, "How many tokens a layer keeps, by step."
    )
    layer_token_lr_schedule: LayerTokenLR = option(LayerTokenLR(), "Not offered.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.enabled:
            return self
        needed = (
            "total_layer_num",
            "random_ltd_layer_num",
            "random_ltd_layer_id",
            "hidden_state_order",
        )
        for key in (*needed, "random_ltd_schedule"):
            if getattr(self, key) is None:
                raise ValueError(f"{key} must be given when random_ltd is enabled")
        ids = self.random_ltd_layer_id or []
        count = self.random_ltd_layer_num
        total = self.total_layer_num or 0
        if len(set(ids)) != len(ids):
            raise ValueError("random_ltd_layer_id names a layer twice")
        if len(ids) != count:
            raise ValueError(
                f"random_ltd_layer_id names {len(ids)} layers, and random_ltd_layer_num is {count}"
            )
        if max(ids) >= total:
            raise ValueError(
                f"random_ltd_layer_id names layer {max(ids)}, and total_layer_num is {total}"
            )
        return self


class DataRouting(Section):
    """Which tokens pass which layers."""

    enabled: bool = option(False, "Use this section.")
    random_ltd: RandomLTD = option(RandomLTD(), "Random layer token drop.")
