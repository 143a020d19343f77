"""What is to happen to a module or a parameter: the record that every source of rules gives
(torch-free).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias


class Kind(Enum):
    """How a module is divided, or what is done around it.

    COLUMN: a linear layer, or a parameter of experts, whose outputs are cut. ROW: whose inputs are
        cut; its outputs are summed over the ranks. COPIED: a layer of keys or values that is whole;
        each rank computes those of its own queries.
    VOCABULARY, EMBEDDING: an embedding whose rows or columns are cut. HEADS: an embedding of one
        number for each head, whose columns are cut and stay so. WHOLE: every rank has all of it.
        SUM_GRADIENT: whole, and used on each rank's own part, so that its gradient is summed over
        the ranks. EXPERTS: a module in which every rank computes a part with its parts of
        parameters and of `local` layers; its outputs are summed, and the gradients of its inputs.
        ROPE_LATENT: DeepSeek's first projection of keys and values, whose last outputs are used on
        each rank's own heads. SHARED: whole, inside of a module whose outputs are summed. SEQUENCE:
        a module that works on each rank's part of the sequence.
    """

    COLUMN = "column"
    ROW = "row"
    COPIED = "copied"
    VOCABULARY = "vocabulary"
    EMBEDDING = "embedding"
    HEADS = "heads"
    WHOLE = "whole"
    SUM_GRADIENT = "sum gradient"
    EXPERTS = "experts"
    ROPE_LATENT = "rope latent"
    SHARED = "shared"
    SEQUENCE = "sequence"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    segments: how many equal matrices are fused along the dimension that is cut, or their lengths;
    "heads": queries, keys and values, as long as the attention's heads say. dim: that dimension of
    the weight; None: the usual one of the layer. gather_output: of a COLUMN, every rank gets all
    outputs. split_input: of a ROW, its input is whole on every rank. local: no sums of its own, as
    the module around it sums. source: where the rule is from, for messages.
    """

    kind: Kind
    segments: int | tuple[int, ...] | Literal["heads"] = 1
    dim: int | None = None
    gather_output: bool = False
    split_input: bool = False
    local: bool = False
    source: str = ""

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
