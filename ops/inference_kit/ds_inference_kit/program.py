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
    from ds_inference_kit.step import KVCache, Step

Register = int
Weight = Tensor | Quantized
"""A matrix [out, in]; a tensor has contiguous rows or contiguous columns (a transposed view), and
any float dtype.
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
    """out = table[index + offset] * scale; added to what `out` holds where `add`. table: [n,
    width].
    """

    out: Register
    table: Tensor
    by: By = By.TOKENS
    offset: int = 0
    scale: float = 1.0
    add: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Normalize:
    """out = norm(x) * weight + bias, over each of `groups` equal parts of a row (1: the whole row).

    weight, bias: [width / groups], or None. Sums are in fp32. `out` may be `x`.
    """

    x: Register
    out: Register
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    norm: Norm
    groups: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """out = activation(x @ weight.T + bias) + add. `out` may be `add`, never `x`."""

    x: Register
    out: Register
    weight: Weight
    bias: Tensor | None = None
    activation: Activation = Activation.NONE
    add: Register | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Gated:
    """out = activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias)."""

    x: Register
    out: Register
    gate: Weight
    up: Weight
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    activation: Activation = Activation.SILU


@dataclass(frozen=True, slots=True, eq=False)
class Rotate:
    """Rotary position embedding of `x` in place: heads of `head_dim`, of which the first ``2 *
    cos.shape[1]`` turn.

    cos, sin: fp32 [positions, dims / 2], by the row's position. (a, b) -> (a cos - b sin, b cos + a
    sin).
    """

    x: Register
    head_dim: int
    cos: Tensor
    sin: Tensor
    rotary: Rotary = Rotary.HALF


@dataclass(frozen=True, slots=True, eq=False)
class Attend:
    """out = softmax(q k^T * scale + slope * (key position - query position)) v, head by head.

    q, out: [rows, heads * head_dim]; k, v: [rows, kv_heads * head_dim]; query head h reads key head
    ``h * kv_heads // heads``, or what `groups` says. layer: the layer of the cache that first takes
    k and v of these rows and whose tokens up to the row's own are attended to; None, or a run
    without a cache: rows of the same sequence in this step. causal: a row sees no later ones.
    window: and only the last `window` tokens, itself included. slopes: fp32 [heads], ALiBi.
    """

    q: Register
    k: Register
    v: Register
    out: Register
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    layer: int | None
    causal: bool = True
    window: int | None = None
    slopes: Tensor | None = None
    groups: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """out = the sum, over the `top_k` most probable experts e, of p_e * expert_e(x); p = softmax(x
    @ router.T).

    expert(x) = (activation(x @ gate.T) * (x @ up.T)) @ down.T. router: [experts, width], of the
    experts of all ranks.
    first: the number of the first expert held here (others add nothing on this rank; see `Reduce`).
        normalize: the chosen probabilities are divided by their sum.
    """

    x: Register
    out: Register
    router: Tensor
    gates: tuple[Weight, ...]
    ups: tuple[Weight, ...]
    downs: tuple[Weight, ...]
    top_k: int
    normalize: bool = True
    activation: Activation = Activation.SILU
    first: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Add:
    """out = x + y + bias. `out` may be either."""

    x: Register
    y: Register
    out: Register
    bias: Tensor | None = None


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
    """instructions: in order. widths: of each register. output: the register that a run returns.

    dtype: of the activations. layers, kv_heads, head_dim: of the KV cache that it needs (layers 0:
        none).
    embeds: the register that `Step.embeds` fills instead of the instructions before the first that
        is not `Embed` by tokens; None where embeddings cannot be given.
    """

    instructions: tuple[Instruction, ...]
    widths: tuple[int, ...]
    output: Register
    dtype: torch.dtype
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    embeds: Register | None = None


@dataclass(frozen=True, slots=True)
class Collectives:
    """What `Reduce` (in place) and `Gather` ([rows, width] -> [rows, width of all]) call."""

    reduce: Callable[[Tensor], None]
    gather: Callable[[Tensor], Tensor]


class Runnable(Protocol):
    """A loaded program. Not for several threads at once."""

    def __call__(self, step: Step, cache: KVCache | None = None) -> Tensor:
        """Run one step; [rows, width] of the output register (after `Keep`: the wanted rows), the
        caller's own.
        """

    def rebind(self) -> None:
        """Look the addresses of weights up again, after they moved.

        Their shapes and dtypes are as before.
        """


class Load(Protocol):
    """The kernel ``inference_program``."""

    def __call__(self, program: Program, collectives: Collectives | None = None) -> Runnable:
        """Load `program`. collectives: for one with `Reduce` or `Gather`."""
