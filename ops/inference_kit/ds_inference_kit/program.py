"""An inference program: what a transformer computes for the rows (tokens) of one step, as a list of
instructions.

A model is lowered to a program once. A provider of the kernel ``inference_program`` loads the
program and runs it for every step: plain torch (`reference`), C++ or CUDA. Instructions read and
write *registers*, matrices of [rows, width] that live as long as a step. There are no shapes of
batches in a program: rows of all sequences of a step follow each other without padding
(`step.Step`).

Weights are the parameters themselves, not copies: a provider looks their addresses up when it loads
a program and again when `Runnable.rebind` is called. What is not said here is arithmetic in the
activations' dtype or wider; but with weights in 8 or 4 bits a program of bf16 may round what they
are multiplied with to 8 bits, a scale for 32 numbers of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ds_inference_kit.weights import Quantized

if TYPE_CHECKING:
    from jaxtyping import Float

    from ds_inference_kit.step import KVCache, Step

Register = int
Weight = Tensor | Quantized
"""A matrix [out, inner]; a tensor has contiguous rows or contiguous columns (a transposed view),
and any float dtype.
"""


class Activation(Enum):
    """An elementwise function.

    GELU is by erf, GELU_TANH its approximation by tanh, QUICK_GELU x * sigmoid(1.702 x).
    """

    NONE = 0
    RELU = 1
    GELU = 2
    GELU_TANH = 3
    SILU = 4
    QUICK_GELU = 5
    TANH = 6


class Norm(Enum):
    """RMS: x / sqrt(mean(x^2) + eps) * weight; LAYER: mean subtracted, variance of the
    population."""

    RMS = 0
    LAYER = 1


class By(Enum):
    """Which number of a row picks the line of an embedding table."""

    TOKENS = 0
    POSITIONS = 1
    TYPES = 2


class Rotary(Enum):
    """Which elements of a head turn together: HALF (i, i + dims/2), as llama; PAIRS (2i, 2i + 1),
    as GPT-J.
    """

    HALF = 0
    PAIRS = 1


@dataclass(frozen=True, slots=True, eq=False)
class Embed:
    """out = table[index + offset] * scale."""

    out: Register
    table: Float[Tensor, "lines width"]
    # Which number of a row is the index.
    by: By = By.TOKENS
    offset: int = 0
    scale: float = 1.0
    # Added to what the register has, instead of replacing it.
    add: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Normalize:
    """out = norm(x) * weight + bias, over each of `groups` equal parts of a row (1: the full row).

    Sums are in fp32. `out` may be `x`.
    """

    x: Register
    out: Register
    weight: Float[Tensor, " part"] | None
    bias: Float[Tensor, " part"] | None
    eps: float
    norm: Norm
    groups: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """out = activation(x @ weight.T + bias) + add. `out` may be `add`, never `x`."""

    x: Register
    out: Register
    weight: Weight
    bias: Float[Tensor, " out"] | None = None
    activation: Activation = Activation.NONE
    add: Register | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Gated:
    """out = activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias)."""

    x: Register
    out: Register
    gate: Weight
    up: Weight
    gate_bias: Float[Tensor, " inner"] | None = None
    up_bias: Float[Tensor, " inner"] | None = None
    activation: Activation = Activation.SILU


@dataclass(frozen=True, slots=True, eq=False)
class Rotate:
    """Rotary position embedding of `x` in place: heads of `head_dim`, of which the first ``2 *
    cos.shape[1]`` turn.

    (a, b) -> (a cos - b sin, b cos + a sin), with the angle of the row's position.
    """

    x: Register
    head_dim: int
    # fp32.
    cos: Float[Tensor, "positions pairs"]
    sin: Float[Tensor, "positions pairs"]
    rotary: Rotary = Rotary.HALF


@dataclass(frozen=True, slots=True, eq=False)
class Attend:
    """out = softmax(q k^T * scale + slope * (key position - query position)) v, head by head.

    q and out are [rows, heads * head_dim], k and v [rows, kv_heads * head_dim].
    """

    q: Register
    k: Register
    v: Register
    out: Register
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    # The layer of the cache into which k and v of these rows are written first, and whose tokens up
    # to the row's own are attended to. None, or a run without a cache: rows of the same sequence in
    # this step.
    layer: int | None
    # A row sees no later ones.
    causal: bool = True
    # And only the last `window` tokens, itself included; None: all.
    window: int | None = None
    # fp32, of ALiBi; None: 0.
    slopes: Float[Tensor, " heads"] | None = None
    # The key head of each query head; None: ``h * kv_heads // heads``.
    groups: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """out = the sum, over the `top_k` most probable experts e, of p_e * expert_e(x); p = softmax(x
    @ router.T).

    expert(x) = (activation(x @ gate.T) * (x @ up.T)) @ down.T.
    """

    x: Register
    out: Register
    # The router's weight, with rows for the experts of all ranks.
    router: Float[Tensor, "experts width"]
    # The weights of this rank's experts.
    gates: tuple[Weight, ...]
    ups: tuple[Weight, ...]
    downs: tuple[Weight, ...]
    top_k: int
    # The chosen probabilities are divided by their sum.
    normalize: bool = True
    activation: Activation = Activation.SILU
    # The number of this rank's first expert; others add nothing on this rank (see `Reduce`).
    first: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Add:
    """out = x + y + bias. `out` may be either."""

    x: Register
    y: Register
    out: Register
    bias: Float[Tensor, " width"] | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """out = columns ``first : first + width`` of each of `groups` equal parts of `x`, side by side.

    So what one product of a fused weight gave is taken apart: `groups` are the heads where queries,
    keys and values of a head lie together.
    """

    x: Register
    out: Register
    first: int
    width: int
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Reduce:
    """x = the sum of `x` over the ranks of the program's group (`Collectives.reduce`)."""

    x: Register


@dataclass(frozen=True, slots=True)
class Gather:
    """out = the `x` of all ranks of the group, side by side (`Collectives.gather`)."""

    x: Register
    out: Register


@dataclass(frozen=True, slots=True)
class Keep:
    """out = the rows of `x` that `Step.wanted` names, in that order; later instructions have only
    those rows.
    """

    x: Register
    out: Register


Instruction = (
    Embed
    | Normalize
    | Linear
    | Gated
    | Columns
    | Rotate
    | Attend
    | Experts
    | Add
    | Reduce
    | Gather
    | Keep
)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """What a model computes, and the cache that it needs."""

    # In the order in which they run.
    instructions: tuple[Instruction, ...]
    # The width of each register.
    widths: tuple[int, ...]
    # The register that a run returns.
    output: Register
    # The dtype of the activations.
    dtype: torch.dtype
    # The shape of the KV cache; 0 layers: there is none.
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    # The register that `Step.embeds` fills instead of the instructions before the first that is not
    # `Embed` by tokens; None where embeddings cannot be given.
    embeds: Register | None = None


@dataclass(frozen=True, slots=True)
class Collectives:
    """What `Reduce` and `Gather` call, on every rank of the program's group alike."""

    # In place.
    reduce: Callable[[Float[Tensor, "rows width"]], None]
    gather: Callable[[Float[Tensor, "rows width"]], Float[Tensor, "rows whole_width"]]


class Runnable(Protocol):
    """A loaded program. Not for several threads at once."""

    def __call__(self, step: Step, cache: KVCache | None = None) -> Float[Tensor, "rows width"]:
        """Run one step; the output register (after `Keep`: the wanted rows), the caller's own."""

    def rebind(self) -> None:
        """Look the addresses of weights up again, after they moved.

        Their shapes and dtypes are as before.
        """


class Load(Protocol):
    """The kernel ``inference_program``."""

    def __call__(self, program: Program, collectives: Collectives | None = None) -> Runnable:
        """Load `program`.

        collectives: for one with `Reduce` or `Gather`.
        """
