"""What torch's operations do with a `PieceTensor`.

Each element is somewhere once, so what is computed element by element is computed where it is, and
norms are put together over ranks. All else needs the full tensor, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_map

from ds_core import comm
from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_dtensor.tensor import PieceTensor

    Kind = type[PieceTensor]

D = TypeVar("D", bound=DTensor)

_LIKE = {
    "clone", "_to_copy", "zeros_like", "ones_like", "empty_like", "full_like", "zero_", "fill_",
}  # fmt: skip
"""Operations without the tag `pointwise` that give each element by itself."""

_SINGLE = {"_foreach_norm": "linalg_vector_norm"}
"""What an operation on lists does to each tensor, where the names differ."""


def run(kind: type[PieceTensor], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operation `func`, of which an argument is of `kind`, a `PieceTensor`.

    Raises UsageError for one that would need other ranks' elements.
    """
    name: str = func.overloadpacket.__name__
    if (special := _SPECIAL.get(name)) is not None:
        return special(kind, func, args, kwargs)
    if name.startswith("_foreach_"):
        return _each(kind, func, args, kwargs)
    if name in _LIKE or torch.Tag.pointwise in func.tags:
        return _elementwise(kind, func, args, kwargs)
    raise UsageError(
        f"{name}: a PieceTensor has this rank's elements only, and this operation needs others; "
        "call it on .full_tensor(), which gathers the whole one (every rank calls it)"
    )


def _elementwise(kind: Kind, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    first = next(a for a in (*args, *kwargs.values()) if isinstance(a, kind))
    local = _locals(kind, first, func)
    found = func(*tree_map(local, args), **tree_map(local, dict(kwargs)))
    # In place: the argument itself is the answer.
    if func.overloadpacket.__name__.endswith("_"):
        return args[0]
    return first.like(found)


def _locals(kind: Kind, first: PieceTensor, func: Any) -> Callable[[Any], Any]:
    """Gives what the operation sees here of an argument."""

    def local(arg: Any) -> Any:
        if isinstance(arg, kind) and first.same_layout(arg):
            return arg._local_tensor
        if isinstance(arg, DTensor) and not isinstance(arg, kind) and arg.dim() == 0:
            return arg.full_tensor()
        if isinstance(arg, Tensor) and (arg.dim() or isinstance(arg, DTensor)):
            raise UsageError(
                f"{func.overloadpacket.__name__}: a PieceTensor of shape {tuple(first.shape)} "
                f"goes with numbers, and with PieceTensors of the same elements, not with a "
                f"{type(arg).__name__} of shape {tuple(arg.shape)}; use .full_tensor() of both"
            )
        return arg

    return local


def _each(kind: Kind, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operation on lists of tensors, one by one: kernels want tensors of one kind."""
    name = func.overloadpacket.__name__
    single = getattr(torch.ops.aten, _SINGLE.get(name, name.removeprefix("_foreach_")))
    lists = [a for a in args if isinstance(a, (list, tuple))]
    rows = [
        single(*(a[i] if isinstance(a, (list, tuple)) else a for a in args), **kwargs)
        for i in range(len(lists[0]))
    ]
    return None if name.endswith("_") else rows


def _norm(kind: Kind, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DTensor:
    """The norm of all elements, on every rank. Collective over the mesh."""
    tensor, *rest = args
    order = float(rest[0] if rest else kwargs.get("ord", 2))
    if (len(rest) > 1 and rest[1] is not None) or kwargs.get("dim") is not None:
        raise UsageError("a norm along dimensions needs the full tensor: use .full_tensor()")
    dtype = kwargs.get("dtype") or tensor.dtype
    precise = torch.promote_types(dtype, torch.float32)
    value = _combine(_part(tensor, order, precise), order, device_of(tensor)).to(dtype)
    return replicated(value, tensor.device_mesh)


def _part(tensor: PieceTensor, order: float, dtype: torch.dtype) -> Tensor:
    """What the elements here add to a norm: a number that is summed, or the largest or smallest."""
    local = tensor._local_tensor
    if not tensor.counts or not local.numel():
        return torch.tensor(torch.inf if order == -torch.inf else 0.0, dtype=dtype)
    found: Tensor = torch.linalg.vector_norm(local, order, dtype=dtype)
    if order != 0 and abs(order) != torch.inf:
        found = found.pow(order)
    return found


def _combine(part: Tensor, order: float, device: torch.device) -> Tensor:
    part = part.to(device).reshape(1)
    op = {torch.inf: ReduceOp.MAX, -torch.inf: ReduceOp.MIN}.get(order, ReduceOp.SUM)
    comm.all_reduce(part, op)
    if order != 0 and abs(order) != torch.inf:
        part = part.pow(1.0 / order)
    return part[0]


def device_of(tensor: PieceTensor) -> torch.device:
    """Where the group of the mesh sends from."""
    device = tensor._local_tensor.device
    kind = tensor.device_mesh.device_type
    return device if device.type == kind else torch.empty(0, device=kind).device


def wrapped(kind: type[D], local: Tensor, spec: DTensorSpec) -> D:
    """A DTensor of that kind around `local`, wherever in its storage that begins.

    A DTensor has no memory of its own, and torch tells that by its address: it must not begin at
    the offset of `local`.
    """
    made = kind(local.new_empty(0), spec, requires_grad=False)
    made._local_tensor = local.detach()
    return made


def replicated(value: Tensor, mesh: Any) -> DTensor:
    """`value`, which every rank has, as a DTensor on its memory."""
    meta = TensorMeta(value.shape, tuple(value.stride()), value.dtype)
    spec = DTensorSpec(mesh, (Replicate(),), tensor_meta=meta)
    return wrapped(DTensor, value, spec)


def _copy(kind: Kind, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    into, source = args[:2]
    if isinstance(into, kind) and isinstance(source, DTensor) and into.same_layout(source):
        into._local_tensor.copy_(source._local_tensor)
        return into
    full = source.full_tensor() if isinstance(source, DTensor) else source
    if isinstance(into, kind):
        into.fill(full.expand(into.shape))
    else:
        into.copy_(full)
    return into


def _itself(kind: Kind, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    tensor = args[0]
    return tensor.like(tensor._local_tensor)


def _new(kind: Kind, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`new_empty`: of the same shape it has the same layout; copies that torch stages are so."""
    tensor, size = args[:2]
    if tuple(size) == tuple(tensor.shape):
        return tensor.like(torch.empty_like(tensor._local_tensor, **kwargs))
    return tensor._local_tensor.new_empty(size, **kwargs)


_SPECIAL: Mapping[str, Callable[[Kind, Any, Sequence[Any], Mapping[str, Any]], Any]] = {
    "linalg_vector_norm": _norm,
    "copy_": _copy,
    "detach": _itself,
    "alias": _itself,
    "new_empty": _new,
}
