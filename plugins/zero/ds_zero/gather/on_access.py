"""Gather a sharded weight when code accesses it, inside constructors and inside `apply`.

[Note: gathered on access] A constructor may write to the weights of children that are finished, and
so sharded (``nn.init.normal_(self.head.weight)``, ``lin.weight.data.mul_(2)``). A torch function
mode sees each such call, on this thread and inside the context only: the weight is gathered before
the call, and written back as the first rank has it when another weight is accessed or the next
module begins. A weight of which a view is alive (``data = lin.weight.data``) stays unsharded until
the view is gone, since writes to the view count too. Shapes are answered without a gather.
"""

from __future__ import annotations

import contextvars
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_zero.gather.nested_tensors import tensors_of
from ds_zero.gather.weights import WeightHandle, agree, handle_of
from ds_zero.init.sharded_param import fill_alias, untracked

_DEPTH: contextvars.ContextVar[int] = contextvars.ContextVar("ds_zero.GatherOnAccess", default=0)
"""How many `GatherOnAccess` are active on this thread, one inside another."""

_TENSOR: Any = Tensor
"""Untyped, for the getters of its properties."""

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
"""Functions that are answered by a tensor of the right shape, without values."""

_NEED_NO_VALUES = {
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
"""Functions that need no values: they work on the empty tensor as well."""


def gathering_on_access() -> bool:
    """Whether a `GatherOnAccess` is active on this thread."""
    return _DEPTH.get() > 0


class GatherOnAccess(TorchFunctionMode):
    """Inside, torch functions get sharded parameters unsharded; see [Note: gathered on access].

    Collective.
    """

    def __init__(self) -> None:
        super().__init__()
        # What was gathered, and not yet written back and resharded.
        self._open: dict[nn.Parameter, WeightHandle] = {}

    def __enter__(self) -> Any:
        _DEPTH.set(_DEPTH.get() + 1)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        # The mode ends first: what follows calls torch functions with these parameters.
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        _DEPTH.set(_DEPTH.get() - 1)
        if kind is None:
            self.release(all_weights=True)
        # After an error writes may be incomplete, and other ranks may not come here.
        else:
            for handle in self._open.values():
                handle.reshard()
            self._open.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sharded = []
        for tensor in tensors_of((args, kwargs)):
            handle = handle_of(tensor)
            # Not one of ours, but maybe made of one and still empty.
            if handle is None:
                if func not in _NEED_NO_VALUES:
                    fill_alias(tensor)
            elif handle.is_sharded:
                sharded.append(handle)
        if not sharded or func in _NEED_NO_VALUES:
            return func(*args, **kwargs)
        # A shape is no reason for a collective.
        if func in _SHAPE:
            meta = torch.empty(sharded[0].shape, device="meta")
            return func(meta, *args[1:], **kwargs)
        # The last weights go before the next ones come, so that memory stays that of one call.
        # Sorted, since the order of gathers must be equal on all ranks.
        self.release()
        for handle in sorted(sharded, key=lambda h: h.order):
            handle.unshard()
            self._open[handle.param] = handle
        return func(*args, **kwargs)

    def release(self, *, all_weights: bool = False) -> None:
        """Write back and reshard what was gathered.

        all_weights: also weights of which a view is alive.
        """
        if not self._open:
            return
        handles = sorted(self._open.values(), key=lambda h: h.order)
        # Garbage is collected at another time on each rank, so ranks have to agree which views
        # live.
        in_use = [0] * len(handles)
        if not all_weights:
            in_use = agree(handles, [_in_use(h.param) for h in handles])
        for handle, stays in zip(handles, in_use, strict=True):
            if stays:
                continue
            del self._open[handle.param]
            # An engine may own it by now, or other code has resharded it. What is inside a
            # `GatheredParameters` is written back at its end.
            now = handle_of(handle.param)
            if now is not None and now.order == handle.order and not now.is_sharded:
                now.reshard() if now.in_context else now.commit()


@untracked
def _in_use(param: nn.Parameter) -> bool:
    """Whether there is another reference to the parameter's storage, as a view has."""
    # Two are there anyway: the parameter's, and `storage`.
    storage = param.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) > 2
