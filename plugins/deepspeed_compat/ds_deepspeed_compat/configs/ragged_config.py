"""The configs of ``deepspeed.inference.v2``, whose engine serves many requests: checked, for
programs that make them.

The engine is that of dscore-inference: `dscore serve`, or ``init_inference`` with the section
``serve``.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from pydantic import Field, PositiveInt, model_validator

from ds_deepspeed_compat.configs.config_models import DeepSpeedConfigModel


class AllocationMode(Enum):
    """How the memory of keys and values is given: all but a reserve, or a number of blocks."""

    RESERVE = "reserve"
    ALLOCATE = "allocate"


class MemoryConfig(DeepSpeedConfigModel):
    """Memory of keys and values.

    size: the reserve in bytes, or with ALLOCATE the number of blocks.
    """

    mode: AllocationMode = AllocationMode.RESERVE
    size: PositiveInt = 1_000_000_000


class DSStateManagerConfig(DeepSpeedConfigModel):
    """How many sequences and tokens are worked on at a time."""

    max_tracked_sequences: PositiveInt = 2048
    max_ragged_batch_size: PositiveInt = 768
    max_ragged_sequence_count: PositiveInt = 512
    max_context: PositiveInt = 8192
    memory_config: MemoryConfig = MemoryConfig()
    offload: bool = False

    @model_validator(mode="after")
    def _check(self) -> Any:
        for key in ("max_tracked_sequences", "max_ragged_batch_size"):
            if self.max_ragged_sequence_count > getattr(self, key):
                raise ValueError(
                    f"max_ragged_sequence_count {self.max_ragged_sequence_count} is more than {key}"
                )
        return self


class DeepSpeedTPConfig(DeepSpeedConfigModel):
    """Over how many ranks layers are divided."""

    tp_size: int = 1


class QuantizationConfig(DeepSpeedConfigModel):
    """quantization_mode: a name such as wf6af16; None: weights stay as they are."""

    quantization_mode: str | None = None


class RaggedInferenceEngineConfig(DeepSpeedConfigModel):
    """The whole config."""

    tensor_parallel: DeepSpeedTPConfig = Field(default_factory=DeepSpeedTPConfig, alias="tp")
    state_manager: DSStateManagerConfig = Field(
        default_factory=DSStateManagerConfig, alias="manager"
    )
    quantization: QuantizationConfig = QuantizationConfig()
