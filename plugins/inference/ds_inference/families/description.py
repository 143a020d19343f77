"""A transformer of one of the known families, in words that do not depend on the family.

Each family reads its modules into these (`llama`, `gpt`, `encoders`); `emit` makes the
instructions. Modules, not tensors: what a module is (a linear layer, a quantised or a divided one)
is seen where the instruction is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ds_inference_kit.program import Activation
from torch import Tensor, nn

Tables = Callable[[], tuple[Tensor, Tensor]]
"""Makes the cosines and sines of a rotary embedding, fp32 [positions, dims / 2], on the device of
its module.
"""


class Order(Enum):
    """Where a layer normalises: before attention and MLP, after each, or before both, which have
    the same input.
    """

    PRE = 0
    POST = 1
    PARALLEL = 2


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """The attention of a layer."""

    # One layer for each of q, k and v, or one for all.
    qkv: tuple[nn.Module, ...]
    out: nn.Module
    head_dim: int
    scale: float
    # Only for one layer for all: its outputs are ordered by head (q, k and v of the first head,
    # ...); otherwise all of q comes first.
    interleaved: bool = False
    # Norms of each head of q and of each head of k; None: there are none.
    norms: tuple[nn.Module, nn.Module] | None = None
    rotary: Tables | None = None
    # Tokens that are seen; None: all.
    window: int | None = None
    # ALiBi's slopes, for the heads of all ranks; None: no ALiBi.
    slopes: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """down(activation(up(x))), or down(activation(gate(x)) * up(x))."""

    up: nn.Module
    down: nn.Module
    activation: Activation
    gate: nn.Module | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """A mixture of experts, those of this rank in one module."""

    # A module with the `weight` [experts, width].
    router: nn.Module
    # gate_up_proj [n, 2 inner, width] and down_proj [n, width, inner].
    experts: nn.Module
    top_k: int
    activation: Activation


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer."""

    attention: Attention
    mlp: Dense | Sparse
    # That of attention and that of the MLP.
    norms: tuple[nn.Module, nn.Module]
    order: Order = Order.PRE


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Transformer:
    """The model, without its head."""

    # The embedding of tokens.
    tokens: nn.Embedding
    layers: tuple[Layer, ...]
    causal: bool
    # How many positions there are; None: any number.
    most: int | None
    # The embedding of positions; offset: of its lines.
    positions: nn.Module | None = None
    offset: int = 0
    # The embedding of token types.
    types: nn.Module | None = None
    # A norm of the embeddings' sum.
    embedded: nn.Module | None = None
    # After the layers, before project_out.
    norm: nn.Module | None = None
    # Projections between the embedding's width and the layers' width, before and after the layers.
    project_in: nn.Module | None = None
    project_out: nn.Module | None = None
    # Positions that the caller does not give are those among the tokens that are not padding, else
    # those in the row of the batch.
    counted: bool = False
