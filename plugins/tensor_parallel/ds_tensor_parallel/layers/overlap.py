"""Column-parallel layers that compute gradients of weights while gradients of inputs are summed
over the ranks.

Dimensions: ``batch`` any leading ones, ``inputs``, ``outputs``.

[Note: the order of a backward] Autograd runs, of what is ready, what was recorded last. So the
layers that are given one tensor are recorded as four kinds of nodes, in this order:

1. `_Wait`: waits for the sum;
2. `_Weight`, one per layer: computes the gradient of its weight;
3. `_Start`: starts the sum;
4. `_Layer`, one per layer: the product, whose backward is the gradient of the layer's input.

Backwards: the layers' inputs, start the sum, weights, wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ds_core import comm

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch.distributed import ProcessGroup

    from ds_core.comm import Work


def can_overlap(x: Tensor) -> bool:
    """Whether it can be done now: not in a graph, under autocast, or without a gradient."""
    return (
        x.requires_grad
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(x.device.type)
    )


class Overlapped:
    """One tensor on its way through column-parallel layers, and back.

    layers: those that may be given `x`.
    transposed: their weights are [inputs, outputs].
    """

    def __init__(
        self, layers: Sequence[Any], x: Tensor, group: ProcessGroup, transposed: bool
    ) -> None:
        self.group = group
        self.transposed = transposed
        # The sum over ranks of the gradient of `x`, while it runs.
        self.work: Work | None = None
        # The gradient of each layer's output, by id, from its `_Layer` to its `_Weight`.
        self.grads: dict[int, Tensor] = {}
        # Recorded in the order of the note, before any layer runs.
        waits = _call(_Wait, x, self)
        self.tokens = {
            id(n): _call(_Weight, n.weight, n.bias, x.detach(), self, id(n)) for n in layers
        }
        self.x = _call(_Start, waits, self)

    def outputs(self, layer: Any) -> Tensor:
        """What `layer` gives."""
        # Detached: the gradient of the weight does not come from this product, but from the token.
        bias = layer.bias.detach() if layer.bias is not None else None
        y: Tensor = _call(
            _Layer, self.x, self.tokens[id(layer)], layer.weight.detach(), bias, self, id(layer)
        )
        return y


def _call(function: Any, *args: Any) -> Any:
    return function.apply(*args)


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Overlapped) -> Tensor:
        ctx.way = way
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.way.work is not None:
            ctx.way.work.wait()
            ctx.way.work = None
        return grad, None


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Overlapped) -> Tensor:
        ctx.way = way
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        # Autograd made this tensor from the layers' gradients, so it may be summed in place.
        total = grad.contiguous()
        comm.label("gradient of the input of column-parallel layers")
        # Returned before it is complete: only `_Wait` is behind it, which waits.
        ctx.way.work = comm.all_reduce(total, group=ctx.way.group, async_op=True)
        return total, None


class _Weight(Function):
    """A token without a value, by which autograd runs this backward at its time.

    The gradient itself is in `Overlapped.grads`.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, x: Tensor, way: Overlapped, key: int
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.way = way
        ctx.key = key
        ctx.has_bias = bias is not None
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        # Popped, so that the gradient of the output is freed as soon as it is used.
        grad = ctx.way.grads.pop(ctx.key).flatten(0, -2)
        rows = x.flatten(0, -2)
        weight = bias = None
        if ctx.needs_input_grad[0]:
            weight = rows.t() @ grad if ctx.way.transposed else grad.t() @ rows
        if ctx.has_bias and ctx.needs_input_grad[1]:
            bias = grad.sum(0)
        return weight, bias, None, None, None


class _Layer(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "*batch inputs"],
        token: Float[Tensor, ""],
        weight: Float[Tensor, "rows columns"],
        bias: Float[Tensor, " outputs"] | None,
        way: Overlapped,
        key: int,
    ) -> Float[Tensor, "*batch outputs"]:
        ctx.save_for_backward(weight)
        ctx.way = way
        ctx.key = key
        return functional.linear(x, weight.t() if way.transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.way.grads[ctx.key] = grad
        inputs = grad @ (weight.t() if ctx.way.transposed else weight)
        return (
            inputs,
            # The token's gradient: any value makes autograd run `_Weight`; None would not.
            grad.new_zeros(()) if ctx.needs_input_grad[1] else None,
            None,
            None,
            None,
            None,
        )
