"""How a module or a parameter is divided: the record that every source of rules makes (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias


class Kind(Enum):
    """How a module is divided, or what is done around it."""

    COLUMN = "column"
    """A linear layer, or a parameter of experts, whose outputs are cut."""
    ROW = "row"
    """One whose inputs are cut; its outputs are summed over the ranks."""
    COPIED = "copied"
    """A full layer of keys or values; each rank computes those of its own queries."""
    VOCABULARY = "vocabulary"
    """An embedding whose rows are cut."""
    EMBEDDING = "embedding"
    """An embedding whose columns are cut."""
    HEADS = "heads"
    """An embedding of one number per head, whose columns are cut and stay so."""
    WHOLE = "whole"
    """Every rank has all of it."""
    SUM_GRADIENT = "sum gradient"
    """Full, and used on each rank's own part, so that its gradient is summed over the ranks."""
    EXPERTS = "experts"
    """A module of which every rank computes a part, with its parts of parameters and of `local`
    layers; its outputs are summed, and the gradients of its inputs."""
    ROPE_LATENT = "rope latent"
    """DeepSeek's first projection of keys and values, whose last outputs each rank uses for its own
    heads."""
    SHARED = "shared"
    """Full, inside of a module whose outputs are summed."""
    SEQUENCE = "sequence"
    """A module that works on each rank's part of the sequence."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule."""

    kind: Kind
    segments: int | tuple[int, ...] | Literal["heads"] = 1
    """How many equal matrices are fused along the dimension that is cut, or their lengths; "heads":
    queries, keys and values, as long as the attention's heads say."""
    dim: int | None = None
    """That dimension of the weight; None: the usual one of the layer."""
    gather_output: bool = False
    """Of a COLUMN: every rank gets all outputs."""
    split_input: bool = False
    """Of a ROW: every rank has its full input."""
    local: bool = False
    """No sums of its own, as the module around it sums."""
    source: str = ""
    """Where the rule is from, for messages."""

    def lengths(self, whole: int, heads: tuple[int, ...] = ()) -> tuple[int, ...]:
        """The lengths of the fused matrices in a dimension of length `whole`; ValueError where they
        do not fit.

        heads: the widths of queries, keys and values.
        """
        segments = heads if self.segments == "heads" else self.segments
        if isinstance(segments, int):
            if whole % segments:
                raise ValueError(
                    f"a length of {whole} does not divide into {segments} equal matrices"
                )
            return (whole // segments,) * segments
        if sum(segments) != whole:
            raise ValueError(f"lengths {list(segments)} add up to {sum(segments)}, not to {whole}")
        return tuple(segments)


Rules: TypeAlias = Mapping[str, Rule]
"""Name of a module or a parameter -> its rule."""
