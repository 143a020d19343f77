"""Tensors that are kept in fewer bytes than their values would take.

[Note: read only] To everybody but its optimizer a `Compact` is a plain tensor that can be read: any
operation is given the values. So checkpoints have all of them, and any layout can read them. Of
what would write to it only ``copy_`` is there: the nearest to the new values are kept.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ds_core.errors import UsageError
from ds_optimizers.moments.rows import over_elements

if TYPE_CHECKING:
    from ds_optimizers.moments.rows import Rows


class Compact(Tensor):
    """A state of an optimizer, made of smaller tensors; see [Note: read only]."""

    @abc.abstractmethod
    def dense(self) -> Tensor:
        """The values, in the shape of the tensor."""

    @abc.abstractmethod
    def replace(self, values: Tensor) -> None:
        """Keep the nearest to `values`, of the shape of the tensor."""

    @abc.abstractmethod
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """As torch asks of a tensor that is made of others: their names, and what else it takes."""

    @property
    def bytes_taken(self) -> int:
        """What it takes in memory."""
        return sum(getattr(self, name).nbytes for name in self.__tensor_flatten__()[0])

    def _alias(self) -> Tensor:
        """Another wrapper of the same tensors: what is written to it is written to this one."""
        names, context = self.__tensor_flatten__()
        inner = {name: getattr(self, name) for name in names}
        kind: Any = type(self)
        alias: Tensor = kind.__tensor_unflatten__(inner, context, self.shape, None)
        return alias

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default and isinstance(args[0], Compact):
            return args[0]._alias()
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Compact):
            args[0].replace(_read(args[1]).expand(args[0].shape))
            return args[0]
        if func._schema.is_mutable and isinstance(args[0], Compact):
            raise UsageError(
                f"{func} would write to a state that is kept in fewer bytes; put a new tensor in "
                "its place in optimizer.state"
            )
        args, kwargs = tree_map(_read, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Tensor:
        """Another with the same values."""
        names, context = self.__tensor_flatten__()
        inner = {name: getattr(self, name).clone() for name in names}
        kind: Any = type(self)
        copy: Tensor = kind.__tensor_unflatten__(inner, context, self.shape, None)
        return copy

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        """The values."""
        return f"{type(self).__name__}({self.dense()!r})"


def wrapped(kind: type[Tensor], shape: torch.Size, like: Tensor, dtype: torch.dtype) -> Any:
    """A new tensor of `kind` without memory of its own, on the device of `like`."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=like.device)


def _read(value: Any) -> Any:
    return value.dense() if isinstance(value, Compact) else value


class PerRow(Compact):
    """One value for all elements of a row."""

    kept: Tensor
    """[rows that this rank has elements of]"""
    columns: int
    """Elements of a row in this rank's slice."""
    before: int
    """Those of the first row that are on another rank."""

    @staticmethod
    def __new__(cls, kept: Tensor, shape: torch.Size, columns: int, before: int) -> PerRow:
        """As `of` makes one."""
        made = wrapped(cls, shape, kept, kept.dtype)
        made.kept = kept
        made.columns = columns
        made.before = before
        return made  # type: ignore[no-any-return]

    def __init__(self, *given: Any) -> None:
        """See `PerRow.of`, which makes one."""

    @classmethod
    def of(cls, dense: Tensor, rows: Rows) -> PerRow:
        """The nearest to `dense`; see `replace`."""
        made = cls.zeros(dense, rows)
        made.replace(dense)
        return made

    @classmethod
    def zeros(cls, like: Tensor, rows: Rows) -> PerRow:
        """Of zeros, for a parameter of the shape, dtype and device of `like`."""
        kept = torch.zeros(len(rows.numbers), dtype=like.dtype, device=like.device)
        return cls(kept, like.shape, rows.columns, rows.before)

    def replace(self, values: Tensor) -> None:
        """Keep the mean of each row's elements: exactly theirs, where they are equal."""
        count = self.kept.numel()
        padding = (self.before, count * self.columns - self.before - values.numel())
        inside = torch.ones(values.numel(), dtype=torch.bool, device=values.device)
        inside, grid = (
            torch.nn.functional.pad(x, padding).view(count, self.columns)
            for x in (inside, values.detach().reshape(-1))
        )
        # The first row may begin elsewhere, so its first element here is not the first one.
        first = grid.gather(1, inside.int().argmax(1, keepdim=True)) if count else grid[:, :1]
        apart = torch.where(inside, grid - first, 0).sum(1) / inside.sum(1)
        self.kept.copy_(first[:, 0] + apart)

    def dense(self) -> Tensor:
        """See `Compact.dense`."""
        # Of a single row `spread` gives a view of one value.
        return self.spread(self.kept).contiguous()

    def spread(self, values: Tensor) -> Tensor:
        """For each element what `values` has for its row."""
        return over_elements(values, self.columns, self.before, self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """See `Compact`."""
        return ["kept"], (self.columns, self.before)

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, shape: Any, stride: Any) -> PerRow:
        """The reverse."""
        return PerRow(inner["kept"], torch.Size(shape), *context)
