"""What ZenFlow keeps for each weight and for each bucket of a rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_zero.zenflow.columns import Chosen, Rectangle, count_of, rectangles, squares

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ds_core.accelerator import Accelerator
    from ds_zero.buckets.flat import FlatBucket
    from ds_zero.buckets.records import Fragment


@dataclass(slots=True, eq=False)
class Weight:
    """This rank's fragment of one parameter."""

    bucket: FlatBucket
    fragment: Fragment

    # -- columns of the weight, as a matrix --
    # How many there are, and how many of them are updated on the device.
    columns: int
    wanted: int
    # The fragment as rectangles of it.
    parts: list[Rectangle]
    # The columns that are updated on the device; None: not chosen yet.
    picked: Tensor | None = None
    # The fragment's elements of them, and what the device's optimizer updates.
    chosen: Chosen | None = None
    part: nn.Parameter | None = None

    # -- this step --
    # Whether any rank had a gradient, and this fragment's.
    now: bool = False
    grad: Tensor | None = None

    # -- this interval, and the run --
    # Whether any rank had a gradient in it.
    used: bool = False
    # How often devices have updated it; a rank may have had no part then.
    updates: int = 0
    # The sums of the mean norms of other and of picked columns.
    rest: float = 0.0
    most: float = 0.0

    @classmethod
    def of(cls, bucket: FlatBucket, fragment: Fragment, ratio: float) -> Weight:
        """ratio: of columns that are updated on the device."""
        columns = fragment.shape[-1] if len(fragment.shape) > 1 and 0 not in fragment.shape else 0
        parts = rectangles(fragment.start, fragment.stop, columns) if columns else []
        return cls(bucket, fragment, columns, count_of(columns, ratio), parts)

    @property
    def deferred(self) -> bool:
        """Whether any of it is updated on the host after the warm-up; else all of it is on the
        device.
        """
        return self.columns > self.wanted

    @property
    def tallied(self) -> bool:
        """Whether this rank counts it, of those that have fragments of it, where a share of all
        weights is asked for.
        """
        return (
            self.deferred
            and self.bucket.counted
            and self.fragment.start == 0
            and self.fragment.stop > 0
        )

    def begin_interval(self) -> None:
        """An interval begins."""
        self.used = False
        self.rest = 0.0
        self.most = 0.0

    def squares(self) -> Tensor:
        """For each column the sum of squares of this fragment's gradient."""
        if self.grad is not None:
            return squares(self.parts, self.grad.view(-1), self.columns)
        return squares([], self.bucket.full.new_empty(0), self.columns)

    def choose(self) -> None:
        """Make `chosen` and `part` for the columns that are picked, from the host's master."""
        fragment = self.fragment
        before = self.part
        self.chosen = self.part = None
        if not fragment.numel or not fragment.param.requires_grad:
            return
        if not self.deferred:
            self.chosen = Chosen(everything=fragment.numel)
        elif self.picked is not None:
            self.chosen = Chosen.of(self.parts, self.picked)
        if self.chosen is not None and self.chosen.numel:
            device = self.bucket.full.device if before is None else before.device
            self.part = nn.Parameter(
                self.chosen.take(fragment.master.data).to(device), requires_grad=False
            )

    def blank(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state for all of the fragment like `state`, which is that of its part: zeros, and no
        updates yet.
        """
        made: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                made[key] = torch.zeros_like(
                    self.fragment.master, dtype=value.dtype, requires_grad=False
                )
            elif key == "step":
                made[key] = torch.zeros_like(value) if isinstance(value, Tensor) else type(value)(0)
            else:
                made[key] = copy.deepcopy(value)
        return made


@dataclass(slots=True, eq=False)
class Tile:
    """A bucket, as the host updates it."""

    bucket: FlatBucket
    weights: list[Weight]
    # The place of the first of `weights` among those of all buckets.
    place: int

    # Sums of gradients, times the steps' factors: of this interval, and with overlap of the last
    # one, which the host applies meanwhile. Whether anything is in the first.
    sums: list[Tensor] = field(default_factory=list)
    begun: bool = False

    # The last step's gradient on its way into the sum, and the worker's job with it.
    arrived: Tensor | None = None
    adding: Future[None] | None = None

    # The new weights in their dtype, where masters have another.
    staged: Tensor | None = None
    # Whether this step changes weights; also without a gradient, by what the host has made.
    changed: bool = False

    @property
    def used(self) -> bool:
        """Whether any rank had a gradient for any of its weights in this interval."""
        return any(w.used for w in self.weights)

    def receive(self, shard: Tensor, accelerator: Accelerator, factor: float) -> Callable[[], None]:
        """Start to copy a step's gradient to the host; the function that then adds it, times
        `factor`, to the sum.
        """
        if self.arrived is None or self.arrived.dtype != shard.dtype:
            self.arrived = self.buffer(shard.dtype)
        self.arrived.copy_(shard, non_blocking=True)
        event = accelerator.new_event()
        event.record()
        begun, self.begun = self.begun, True
        return partial(_add, self._sum, self.arrived, event, factor, begun)

    def begin_sum(self) -> Tensor:
        """The sum of this interval; zeros if nothing is in it yet."""
        if not self.begun:
            self._sum.zero_()
            self.begun = True
        return self._sum

    def mean_of(self, everything: bool) -> list[Tensor | None]:
        """What the host's optimizer gets for each weight, to be divided by the number of steps;
        None: no update.
        """
        return [
            self.sums[0][w.fragment.within]
            if w.used and w.fragment.numel and (everything or w.deferred)
            else None
            for w in self.weights
        ]

    def turn(self, count: int) -> None:
        """Begin another sum, of `count` that take turns."""
        if len(self.sums) < count:
            self.sums.append(self._new_sum())
        self.sums.append(self.sums.pop(0))
        self.begun = False

    @property
    def _sum(self) -> Tensor:
        """The sum of this interval, with any values before it has begun."""
        if not self.sums:
            self.sums.append(self._new_sum())
        return self.sums[0]

    def _new_sum(self) -> Tensor:
        return self.buffer(torch.promote_types(self.bucket.masters.dtype, torch.float32))

    def buffer(self, dtype: torch.dtype) -> Tensor:
        """Host memory for a shard, with any values."""
        store = self.bucket.masters.store
        assert store is not None
        return store.buffer(self.bucket.layout.shard_numel, dtype)


def _add(total: Tensor, arrived: Tensor, event: Any, factor: float, begun: bool) -> None:
    event.synchronize()
    if begun:
        total.add_(arrived, alpha=factor)
    else:
        total.copy_(arrived).mul_(factor)
