"""Weights that are not in their parameters yet, as after ``ds_zero.Init``, for transforms that cut
parameters.

Who keeps such a weight elsewhere sets a `LazyWeight` as the attribute `LAZY` of the parameter,
which is empty then. Inside `with_shapes` a transform sees the shapes of all, and takes the weights
that it changes, one at a time; the others stay where they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn

LAZY = "_ds_lazy_weight"
"""The attribute of a parameter that leads to its weight."""


@runtime_checkable
class LazyWeight(Protocol):
    """A weight that is kept elsewhere.

    ranks: the global ranks that share it, and have the same values.
    """

    @property
    def ranks(self) -> tuple[int, ...]:
        """See the class."""

    def show_shape(self, param: nn.Parameter) -> None:
        """Give the parameter the shape of its weight, without memory for it."""

    def hide_shape(self, param: nn.Parameter) -> None:
        """Undo `show_shape`."""

    def take(self, param: nn.Parameter) -> Tensor:
        """The whole weight on its device, equal on all ranks that share it; the parameter is an
        ordinary one then, and the caller gives it a value. Collective over these ranks.
        """


def lazy_weight(param: Any) -> LazyWeight | None:
    """The weight of `param` that is kept elsewhere; None for an ordinary parameter."""
    found = getattr(param, LAZY, None)
    return found if isinstance(found, LazyWeight) else None


@contextlib.contextmanager
def with_shapes(model: nn.Module) -> Iterator[None]:
    """Inside, parameters whose weights are kept elsewhere have their shapes, and no values."""
    params = [p for p in model.parameters() if lazy_weight(p) is not None]
    for param in params:
        if (found := lazy_weight(param)) is not None:
            found.show_shape(param)
    try:
        yield
    finally:
        for param in params:
            if (found := lazy_weight(param)) is not None:  # else it was taken
                found.hide_shape(param)
