"""Enumerations of DeepSpeed's that scripts compare with."""

from __future__ import annotations

from enum import Enum, IntEnum

import torch


class ZeroStageEnum(IntEnum):
    """The stages of ZeRO, by what is divided over ranks."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class ActivationFuncType(IntEnum):
    """Activation functions of transformer layers."""

    UNKNOWN = 0
    GELU = 1
    ReLU = 2
    GATED_GELU = 3
    GATED_SILU = 4


class NormType(IntEnum):
    """Normalisations of transformer layers."""

    UNKNOWN = 0
    LayerNorm = 1
    GroupNorm = 2
    RMSNorm = 3


class ZeroParamType(Enum):
    """How a parameter is held at stage 3."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class DtypeEnum(Enum):
    """Names that a dtype has in a config; ``DtypeEnum.from_str("half")`` finds one by any of
    them."""

    fp16 = (torch.float16, "torch.float16", "fp16", "float16", "half")
    fp32 = (torch.float32, "torch.float32", "fp32", "float32", "float")
    int8 = (torch.int8, "torch.int8", "int8")
    bf16 = (torch.bfloat16, "torch.bfloat16", "bf16", "bfloat16")

    @property
    def dtype(self) -> torch.dtype:
        """torch's dtype."""
        found: torch.dtype = self.value[0]
        return found

    @classmethod
    def from_str(cls, value: str) -> DtypeEnum:
        """The member that has the name `value`."""
        for member in cls:
            if value in member.value:
                return member
        raise ValueError(f"{value!r} is not a dtype; known: {', '.join(m.name for m in cls)}")

    @classmethod
    def _missing_(cls, value: object) -> DtypeEnum | None:
        return next((member for member in cls if value in member.value), None)
