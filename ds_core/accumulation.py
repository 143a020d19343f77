"""Gradient accumulation: which backward reduces gradients, which `step` updates the weights, and the batch sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from enum import Enum
from typing import TYPE_CHECKING

from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_core.config.core import Batch
    from ds_core.context import Context
    from ds_core.gradient_hooks import GradientHooks
    from ds_core.partition import Partitioner
    from ds_core.runner import Batches

__all__ = ["Accumulation"]


class Reduction(Enum):
    """When gradients are reduced."""

    AT_BOUNDARY = "in the last backward of the window"
    NO_SYNC = "no_sync"
    COALESCED = "coalesce_grad_reduction"


class Accumulation:
    """The accumulation of one engine's gradients; tells its partitioner what the next backward shall do."""

    def __init__(self, ctx: Context, partitioner: Partitioner, hooks: GradientHooks, batches: Batches) -> None:
        self._ctx, self._partitioner, self._hooks, self._batches = ctx, partitioner, hooks, batches
        self._managed = ctx.config.core.managed_gradient_accumulation
        self._forced: bool | None = None  # the boundary, where the user decides
        self._next_batch: Batch | None = None  # set in the middle of a window, for the next one
        self._reduction = Reduction.AT_BOUNDARY
        self.window = hooks.window
        self.update()

    @property
    def at_boundary(self) -> bool:
        """Whether the coming `step` updates the weights."""
        if self._forced is not None:
            return self._forced
        return not self._managed or self.window.at_boundary

    def force_boundary(self, boundary: bool | None) -> None:
        """Decide whether the next `step` updates; None goes back to counting."""
        self._forced = boundary
        self.update()

    def update(self) -> None:
        """Tell the partitioner whether the next backward reduces. Called whenever the answer may have changed."""
        # Without managed accumulation any backward may be followed by another, so the step reduces.
        counted = self._managed or self._forced is not None
        at_boundary = self._reduction is Reduction.AT_BOUNDARY
        self._partitioner.sync = counted and at_boundary and self.at_boundary
        self._partitioner.hold = not at_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Engine.no_sync`."""
        assert not self._partitioner.partitions_gradients, (
            "no_sync cannot be used when gradients are partitioned over ranks"
        )
        assert self._reduction is not Reduction.NO_SYNC, "no_sync cannot be nested"
        assert self._reduction is not Reduction.COALESCED, "no_sync cannot be used inside coalesce_grad_reduction"
        with self._reducing(Reduction.NO_SYNC):
            yield

    @contextlib.contextmanager
    def coalesced(self) -> Iterator[None]:
        """See `Engine.coalesce_grad_reduction`."""
        if self._reduction is not Reduction.AT_BOUNDARY:
            raise UsageError("coalesce_grad_reduction cannot be nested, neither in itself nor in no_sync")
        with self._reducing(Reduction.COALESCED):
            yield
        self._partitioner.finish()

    @contextlib.contextmanager
    def _reducing(self, reduction: Reduction) -> Iterator[None]:
        self._reduction = reduction
        self.update()
        try:
            yield
        finally:
            self._reduction = Reduction.AT_BOUNDARY
            self.update()

    def check_step(self, factor: float, *, scales: bool) -> None:
        """Refuse a `step` whose gradients cannot be right; see `Window.check`."""
        if self._reduction is not Reduction.AT_BOUNDARY:
            raise UsageError(
                "step() inside no_sync() or coalesce_grad_reduction(): gradients are not reduced yet; call "
                "it after the block"
            )
        self._hooks.forget()
        self.window.check(factor, scales=scales)

    def samples(self) -> int:
        """Samples over all ranks that the window's gradients came from. Called once per window."""
        batch = self._ctx.batch
        return self._batches.take_samples(
            batch.train if self._managed else batch.train // batch.gas * self.window.backwards
        )

    def set_batch(self, change: Callable[[Batch, int, int], Batch], size: int) -> None:
        """Change the batch sizes; in the middle of a window for the next one."""
        batch = change(self._next_batch or self._ctx.batch, size, self._ctx.mesh.size("dp"))
        if batch.micro != self._ctx.batch.micro:
            self._batches.check_resizable()
        self._next_batch = batch
        if not self.window.open:
            self.begin_window()
            self.update()

    def begin_window(self) -> None:
        """The weights were updated, or gradients dropped: a new window begins, with the batch sizes that were set."""
        if (batch := self._next_batch) is not None:
            if batch.micro != self._ctx.batch.micro:
                self._batches.set_batch_size(batch.micro)
            self._ctx.batch, self._next_batch = batch, None
            self._hooks.install()
        self.window.restart(self._ctx.batch.gas)
        self._hooks.forget()

    def drop_gradients(self) -> None:
        """Drop the gradients of the optimizer's parameters, and how they came about; the window goes on counting."""
        self._partitioner.zero_grad()
        self.window.drop()
        self._hooks.forget()
