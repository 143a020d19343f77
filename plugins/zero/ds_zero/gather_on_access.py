"""A partitioned weight that some code touches becomes whole for it: inside constructors, and inside `apply`.

[Note: touched] A constructor may write to the weights of children that are finished, and so partitioned
(``nn.init.normal_(self.head.weight)``, ``lin.weight.data.mul_(2)``). Torch's function mode sees each such call, on
this thread and inside the context alone: the weight is gathered before it, and put back, as the first rank has it,
when another one is touched or a further module begins. A weight of which somebody still holds a view (``data =
lin.weight.data``) stays whole until nobody does, since writes to the view count too. Questions of shape are answered
without gathering.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_core import comm
from ds_zero.sharded_param import fill_alias, quietly
from ds_zero.weights import Home, home_of

__all__ = ["Touching", "touching"]

_DEPTH: contextvars.ContextVar[int] = contextvars.ContextVar("ds_zero touching", default=0)
_TENSOR: Any = Tensor
_SHAPE = {
    _TENSOR.shape.__get__,
    _TENSOR.ndim.__get__,
    Tensor.size,
    Tensor.numel,
    Tensor.nelement,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.__len__,
    Tensor.stride,
    Tensor.is_contiguous,
}
_INDIFFERENT = {
    _TENSOR.requires_grad.__get__,
    _TENSOR.requires_grad.__set__,
    _TENSOR.grad.__get__,
    _TENSOR.grad_fn.__get__,
    _TENSOR.dtype.__get__,
    _TENSOR.device.__get__,
    _TENSOR.layout.__get__,
    _TENSOR.is_leaf.__get__,
    _TENSOR.is_meta.__get__,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.requires_grad_,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    torch.is_floating_point,
    torch.is_complex,
}
"""What can be asked of, or done to, an empty tensor as well."""


def touching() -> bool:
    """Whether partitioned weights become whole by being touched here and now."""
    return _DEPTH.get() > 0


class Touching(TorchFunctionMode):
    """Inside, a partitioned parameter that a torch function is given is whole; see [Note: touched]. Collective."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[nn.Parameter, Home] = {}
        self._tokens: list[Any] = []

    def __enter__(self) -> Any:
        self._tokens.append(_DEPTH.set(_DEPTH.get() + 1))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        _DEPTH.reset(self._tokens.pop())
        if kind is None:
            self.settle(all_of_them=True)
        else:
            for home in self._open.values():
                home.let_go()
            self._open.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        away = []
        for tensor in _tensors((args, kwargs)):
            home = home_of(tensor)
            if home is None:
                if func not in _INDIFFERENT:
                    fill_alias(tensor)
            elif home.away:
                away.append(home)
        if not away or func in _INDIFFERENT:
            return func(*args, **kwargs)
        if func in _SHAPE:
            ghost = torch.empty(away[0].shape, device="meta")
            return func(ghost, *args[1:], **kwargs)
        self.settle()
        for home in sorted(away, key=lambda h: h.order):
            home.hold()
            self._open[home.param] = home
        return func(*args, **kwargs)

    def settle(self, *, all_of_them: bool = False) -> None:
        """Put back what was touched, unless somebody holds a view of it."""
        if not self._open:
            return
        homes = sorted(self._open.values(), key=lambda h: h.order)
        busy = [False] * len(homes) if all_of_them else _agree(homes, [_in_use(h.param) for h in homes])
        for home, stays in zip(homes, busy, strict=True):
            if stays:
                continue
            del self._open[home.param]
            now = home_of(home.param)  # an engine may have taken it over, or somebody else put it back
            if now is not None and now.order == home.order and not now.away:
                now.let_go() if now.entered else now.settle()


@quietly
def _in_use(param: nn.Parameter) -> bool:
    """Whether anybody but the parameter refers to its memory (the question itself makes one more)."""
    storage = param.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) > 2


@quietly
def _agree(homes: list[Home], flags: list[bool]) -> list[bool]:
    """A view that lives on one rank counts on all of the ranks that share the parameters."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, home in enumerate(homes):
        groups.setdefault(home.ranks, []).append(index)
    agreed = list(flags)
    for ranks in sorted(groups):
        members, place = groups[ranks], homes[groups[ranks][0]]
        if len(ranks) > 1:
            votes = torch.tensor([flags[i] for i in members], dtype=torch.uint8, device=place.device)
            comm.all_reduce(votes, op=torch.distributed.ReduceOp.MAX, group=place.group)
            for index, vote in zip(members, votes.tolist(), strict=True):
                agreed[index] = bool(vote)
    return agreed


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments, which may lie in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
