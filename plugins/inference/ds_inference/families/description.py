"""A transformer of one of the known families, in words that do not depend on the family.

Each family reads its modules into these (`llama`, `gpt`, `encoders`); `emit` makes the
instructions. Modules, not
tensors: what a module is (a linear layer, a quantised or a divided one) is seen where the
    instruction is made.
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
    """qkv: one layer for each of q, k and v, or one for all. interleaved: its outputs lie head by
    head (q, k and v of the first head, ...), else all of q first. norms: of each head of q and of
    k. slopes: of ALiBi, of all ranks' heads.
    """

    qkv: tuple[nn.Module, ...]
    out: nn.Module
    head_dim: int
    scale: float
    interleaved: bool = False
    norms: tuple[nn.Module, nn.Module] | None = None
    rotary: Tables | None = None
    window: int | None = None
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
    """A mixture of experts, those of this rank in one module: gate_up_proj [n, 2 inner, width] and
    down_proj [n, width, inner]. router: a module with the `weight` [experts, width].
    """

    router: nn.Module
    experts: nn.Module
    top_k: int
    activation: Activation


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """norms: that of attention and that of the MLP."""

    attention: Attention
    mlp: Dense | Sparse
    norms: tuple[nn.Module, nn.Module]
    order: Order = Order.PRE


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Transformer:
    """tokens, positions, types: embeddings; offset: of lines of `positions`. embedded: a norm of
    their sum.

    project_in: between `tokens` and the rest. norm: after the layers, before project_out. counted:
        positions that the caller does not give are those among the tokens that are not padding,
        else those in the row of the batch.
    most: how many positions there are (None: any number).
    """

    tokens: nn.Embedding
    layers: tuple[Layer, ...]
    causal: bool
    most: int | None
    positions: nn.Module | None = None
    offset: int = 0
    types: nn.Module | None = None
    embedded: nn.Module | None = None
    norm: nn.Module | None = None
    project_in: nn.Module | None = None
    project_out: nn.Module | None = None
    counted: bool = False
