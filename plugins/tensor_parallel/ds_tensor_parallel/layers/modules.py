"""Rules for modules that are no linear layers: experts, shared rotary keys, norms of own heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from ds_comm_autograd import copy_to, reduce_from
from ds_run_state.divided import DIVIDED, Divided
from torch import Tensor, nn

from ds_core import comm

if TYPE_CHECKING:
    from ds_tensor_parallel.layers.linear import Place


def sum_output(module: nn.Module, place: Place) -> None:
    """Every rank has a part of the module's parameters, so its outputs are summed, and the
    gradients of its inputs.

    As of experts, each of which is cut: hidden states and routing weights are equal on all ranks.
    """

    def enter(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(_copy_value(a, place) for a in args), {
            k: _copy_value(v, place) for k, v in kwargs.items()
        }

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (reduce_from(output[0], place.group), *output[1:])
        return output if output is None else reduce_from(output, place.group)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)
    setattr(module, DIVIDED, Divided(place.rank, place.size, sums=True))


def _copy_value(value: Any, place: Place) -> Any:
    # Only what can have a gradient has one to be summed.
    differs = isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad
    return copy_to(value, place.group) if differs else value


def share_tail(module: nn.Module, tail: int, place: Place) -> None:
    """The last `tail` outputs are used by each rank for its own heads, so their gradient is summed
    over the ranks.

    As of keys with rotary positions that all heads share; the other outputs go on through a
    column-parallel layer.
    """

    def leave(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        # The first outputs go on through a column-parallel layer, which sums their gradient itself.
        own, shared = output.split([output.shape[-1] - tail, tail], -1)
        return torch.cat([own, copy_to(shared, place.group)], -1)

    module.register_forward_hook(leave)


def rope_size(around: nn.Module) -> int:
    """How many of the last outputs of a latent projection are the rotary key; ValueError where
    nobody says it.
    """
    for source in (around, getattr(around, "config", None)):
        if isinstance(size := getattr(source, "qk_rope_head_dim", None), int):
            return size
    raise ValueError(
        f"neither {type(around).__name__} nor its config has qk_rope_head_dim, the size of the "
        "rotary key"
    )


def sum_gradient(param: nn.Parameter, place: Place) -> None:
    """The gradient of a parameter that every rank uses for its own part of the work is summed over
    the ranks.
    """

    def add(grad: Tensor) -> Tensor:
        total = grad.clone()
        comm.label("gradient of a weight that tensor-parallel ranks share")
        comm.all_reduce(total, group=place.group)
        return total

    trained = param.requires_grad
    # torch gives no hook to a frozen parameter; it may be trained later.
    param.requires_grad_(True)
    param.register_hook(add)
    param.requires_grad_(trained)


def divide_input(module: nn.Module, place: Place) -> None:
    """Divide the input of a module that every rank runs alike inside a module whose outputs are
    summed (an expert that returns its input).
    """

    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # The sum over ranks then gives its output once.
        return (args[0] / place.size, *args[1:])

    module.register_forward_pre_hook(enter)
