"""Gradient accumulation: where the gradients between two updates come from, and which `step`
updates the weights.

`engine.backward` divides a loss by the accumulation steps before backward. A plain
``loss.backward()`` does not, so the step divides by them. The loss of a joint backward was divided
by the engine that ran it. Mixing these in one window would be wrong by a factor, so the checks here
refuse it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_core.config.core import Batch
    from ds_core.context import Context
    from ds_core.engine import Batches
    from ds_core.gradients.gradient_hooks import GradientHooks
    from ds_core.partition import Partitioner

MIXED = (
    "gradients of one accumulation window came both from engine.backward(loss), which divides by "
    "gradient_accumulation_steps, and from a plain loss.backward(), which does not; use one of "
    "the two between two steps, or add the losses up and call engine.backward once "
    "(engine.zero_grad() drops what has come)"
)
NO_BACKWARD = (
    "step() found no engine.backward(loss) for this micro-batch, though earlier ones of the "
    "window had one. A window that mixes it with loss.backward() is divided wrongly; to skip a "
    "micro-batch, skip its step() too"
)
UNSCALED = (
    "loss.backward() was called without the loss scale that fp16 needs; write "
    "engine.scale(loss).backward(), or engine.backward(loss)"
)


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """What becomes of the gradients of one backward.

    The core decides it; a partitioner follows it.
    """

    changed: bool = False
    """Whether parameters were frozen or unfrozen since the last backward; true in the first."""

    reduce: bool = False
    """Whether gradients are to be reduced, each as soon as it is ready; else a later backward, or
    the step, does it.
    """

    keep_local: bool = False
    """Whether gradients must stay with this rank for now, even partitioned ones (`reduce` is off
    then).
    """

    may_wait: bool = True
    """Whether `on_gradient` may wait for other ranks. False where a backward may reach the models
    of several engines, in an order that differs between ranks."""


REDUCE = BackwardPlan(reduce=True)
LATER = BackwardPlan(reduce=False)
KEEP = BackwardPlan(reduce=False, keep_local=True)


class Origin(IntEnum):
    """Whose backward gradients of one engine come from; several are or-ed together as bits of an
    int.
    """

    NONE = 0
    """No backward."""
    ENGINE = 1
    """The engine's own ``backward``."""
    PLAIN = 2
    """A ``loss.backward()``."""
    JOINT = 4
    """Another engine's ``backward``, of a loss that both engines contributed to."""


# As plain integers: ``|`` and ``&`` of an enum's members cost 0.1 us each, several times a step.
ENGINE = int(Origin.ENGINE)
PLAIN = int(Origin.PLAIN)
JOINT = int(Origin.JOINT)


class Window:
    """The gradients of one engine between two updates; `restart` makes it the next window."""

    # -- sizes
    gas: int
    """Accumulation steps of this window."""
    micros: int
    """Micro-batches that `step` has ended."""

    # -- where gradients came from
    seen: int
    """The origins, as bits, of the window's gradients."""
    micro: int
    """The origins, as bits, of the running micro-batch's gradients."""
    backwards: int
    """How many there were, as far as hooks on gradients saw them."""
    scaled: bool
    """Whether the running micro-batch's loss went through ``engine.scale``."""

    # -- for resuming
    data: Any = None
    """The position of the engine's loader when the window began."""

    def __init__(self, gas: int) -> None:
        self.restart(gas)

    def restart(self, gas: int) -> None:
        """Begin a new window: the weights were updated, or other gradients follow."""
        self.gas = gas
        self.micros = 0
        self.drop()

    def drop(self) -> None:
        """Forget where the gradients so far came from; they were dropped."""
        self.seen = self.micro = self.backwards = 0
        self.scaled = False
        # What other engines multiplied joint losses by; NaN, which equals nothing, where they differ.
        self._joint_factor: float | None = None

    @property
    def open(self) -> bool:
        """Whether the window has begun, so that `gas` must stay."""
        return bool(self.micros or self.seen)

    @property
    def at_boundary(self) -> bool:
        """Whether the running micro-batch is the last."""
        return (self.micros + 1) % self.gas == 0

    @property
    def divisor(self) -> int:
        """What the step still divides gradients by; 1 where losses were divided before backward."""
        return 1 if self.seen & ENGINE or self.seen & JOINT else self.gas

    def add(self, origin: Origin, factor: float = 1.0) -> None:
        """A backward gives gradients.

        factor: what another engine multiplied a joint loss by.
        """
        # Here, not only in `check`: the backward that follows may reduce the sum.
        if self.seen & PLAIN and origin == ENGINE and self.gas > 1:
            raise UsageError(MIXED)
        if origin == JOINT and factor != self._joint_factor:
            self._joint_factor = factor if self._joint_factor is None else math.nan
        self.seen |= origin
        self.micro |= origin
        self.backwards += 1

    def add_batch(self) -> None:
        """A runner has run the whole window, with losses divided before backward."""
        self.seen = ENGINE
        self.micro = 0
        self.backwards = self.gas

    def check(self, factor: float, *, scales: bool) -> None:
        """``engine.step`` was called: raise UsageError for gradients that cannot be right.

        factor: what this engine multiplies losses by.
        scales: whether it has a loss scaler.
        """
        # With one micro-batch all backwards are divided by 1, so any mixture is right.
        several = self.gas > 1
        driven = self.micro & ENGINE
        joint = self.seen & JOINT
        if several and self.seen & PLAIN and (driven or joint):
            raise UsageError(MIXED)
        if joint and self._joint_factor != factor:
            raise UsageError(
                "gradients came from another engine's backward (a joint loss), which multiplied "
                f"the loss by {self._joint_factor:g}, and this engine multiplies by {factor:g} "
                "(loss scale over gradient_accumulation_steps); engines that share a loss need "
                "the same gradient_accumulation_steps, and bf16 or fp32, or the same "
                "fp16.loss_scale"
            )
        if scales and not self.scaled and (self.seen & PLAIN or not (driven or joint)):
            raise UsageError(UNSCALED)
        if several and not driven and not joint and self.seen & ENGINE:
            raise UsageError(NO_BACKWARD)
        # Without hooks a plain backward is not seen, and there may have been none.
        if not driven and not joint:
            self.seen |= PLAIN

    def next_micro(self) -> None:
        """A micro-batch has ended that was not the last."""
        self.micros += 1
        self.micro = 0
        self.scaled = False


class Reduction(Enum):
    """When gradients are reduced."""

    AT_BOUNDARY = "in the last backward of the window"
    NO_SYNC = "no_sync"
    COALESCED = "coalesce_grad_reduction"


class Accumulation:
    """Decides which backward reduces gradients and which `step` updates, and changes the batch
    sizes.
    """

    plan: BackwardPlan
    """Of the next backward, unless a runner has another one."""

    def __init__(
        self, ctx: Context, partitioner: Partitioner, hooks: GradientHooks, batches: Batches
    ) -> None:
        self._ctx = ctx
        self._partitioner = partitioner
        self._hooks = hooks
        self._batches = batches
        self._managed = ctx.config.core.managed_gradient_accumulation
        # Whether the next `step` updates, where the user decides.
        self._forced: bool | None = None
        # Sizes that were set in the middle of a window, for the next one.
        self._next_batch: Batch | None = None
        self._reduction = Reduction.AT_BOUNDARY
        self._window = hooks.window
        self._window.data = batches.position()
        hooks.accumulation = self
        self.update()

    @property
    def at_boundary(self) -> bool:
        """Whether the coming `step` updates the weights."""
        if self._forced is not None:
            return self._forced
        return not self._managed or self._window.at_boundary

    def force_boundary(self, boundary: bool | None) -> None:
        """Decide whether the next `step` updates; None goes back to counting."""
        self._forced = boundary
        self.update()

    def update(self) -> None:
        """Plan the next backward. Called whenever the answer may have changed."""
        # Without managed accumulation any backward may be followed by another, so the step reduces.
        counted = self._managed or self._forced is not None
        if self._reduction is not Reduction.AT_BOUNDARY:
            # Several backwards go into one reduction, so no rank may give its part away before.
            self.plan = KEEP
        else:
            self.plan = REDUCE if counted and self.at_boundary else LATER

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Engine.no_sync`."""
        assert not self._partitioner.partitions_gradients, (
            "no_sync cannot be used when gradients are sharded over ranks"
        )
        assert self._reduction is Reduction.AT_BOUNDARY, (
            f"no_sync cannot be nested in {self._reduction.value}"
        )
        with self._reducing(Reduction.NO_SYNC):
            yield

    @contextlib.contextmanager
    def coalesced(self) -> Iterator[None]:
        """See `Engine.coalesce_grad_reduction`."""
        if self._reduction is not Reduction.AT_BOUNDARY:
            raise UsageError(f"coalesce_grad_reduction cannot be nested in {self._reduction.value}")
        with self._reducing(Reduction.COALESCED):
            yield
        # Only after a block that succeeded: this is collective, and an error may pass on one rank.
        self._partitioner.finish(self.plan)

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
                f"step() inside {self._reduction.value}(): gradients are not reduced yet; call it "
                "after the block"
            )
        self._hooks.forget()
        self._window.check(factor, scales=scales)

    def samples(self) -> int:
        """Samples over all ranks that the window's gradients came from. Called once per window."""
        batch = self._ctx.batch
        # Where the user decides on boundaries, the window may have had any number of backwards.
        return self._batches.take_samples(
            batch.train if self._managed else batch.train // batch.gas * self._window.backwards
        )

    def set_batch(self, change: Callable[[Batch, int, int], Batch], size: int) -> None:
        """Change the batch sizes; in the middle of a window for the next one."""
        batch = change(self._next_batch or self._ctx.batch, size, self._ctx.mesh.size("batch"))
        if batch.micro != self._ctx.batch.micro:
            self._batches.check_resizable()
        self._next_batch = batch
        if not self._window.open:
            self.begin_window()

    def begin_window(self) -> None:
        """The weights were updated, or gradients dropped: a new window begins, with the batch sizes
        that were set.
        """
        if (batch := self._next_batch) is not None:
            if batch.micro != self._ctx.batch.micro:
                self._batches.set_batch_size(batch.micro)
            self._ctx.batch = batch
            self._next_batch = None
            # Whose backward a gradient comes from matters only with several micro-batches.
            self._hooks.install()
        self._window.restart(self._ctx.batch.gas)
        self._window.data = self._batches.position()
        self._hooks.forget()
        self.update()

    def next_micro(self) -> None:
        """A micro-batch has ended that was not the last."""
        self._window.next_micro()
        self.update()

    def drop_gradients(self) -> None:
        """Drop the gradients of the optimizer's parameters, and how they came about; the window
        continues counting.
        """
        self._partitioner.zero_grad()
        self._window.drop()
        self._hooks.forget()
