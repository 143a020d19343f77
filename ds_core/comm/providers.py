"""Works, the collectives of one process group, and which provider (hook ``ds_collectives``) betters
torch's.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from ds_core.entries import CollectivesEntry, ask
from ds_core.errors import CommError, ConfigError, PluginError
from ds_core.plugins import Answer, blaming

if TYPE_CHECKING:
    from ds_core.config import RunConfig
    from ds_core.plugins import Found, Plugins

log = logging.getLogger("ds_core.comm")

# Backends that average by themselves; the others are given a sum, which is then divided.
_AVERAGING = ("nccl", "xccl")
# torch 2.13 renamed these two and warns about the old names.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# What gloo reduces in another dtype: it has no int16, and would round every partial sum of 16-bit
# floats.
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.int16: torch.int32}
# Elements divided at a time: stays in the cache, and is below 32768, from which on torch starts
# threads, which on a machine full of ranks costs milliseconds.
_PIECE = (1 << 15) - 64


class Work(Protocol):
    """A collective under way, as `async_op=True` returns it."""

    def wait(self, timeout: timedelta = ...) -> Any:
        """Block until the result is in its tensor."""

    def is_completed(self) -> bool:
        """Whether it is. torch's gloo says so of messages only after `wait`; a provider's works can
        be polled.
        """


class AfterWork:
    """Works under way, and what is left to do here when they have ended; done once, by wait or
    is_completed.
    """

    def __init__(self, works: Sequence[Any], finish: Callable[[], Any] | None = None) -> None:
        self._works = list(works)
        self._finish = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is in its tensor. Raises what the backend raises."""
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        self._works = []
        finish, self._finish = self._finish, None
        if finish is not None:
            with torch.no_grad():
                finish()
        return True

    def is_completed(self) -> bool:
        """Whether the result is in its tensor; finishes what has fully arrived."""
        return all(work.is_completed() for work in self._works) and self.wait()


class GroupCollectives:
    """The collectives of one process group by torch.distributed, with what it lacks on a backend.

    A provider inherits and overrides what it does better; a call that it leaves goes to
    ``super()``, on all ranks of the group or on none. A method returns None when the result is in
    its tensor, or, with `async_op`, a `Work`. Ranks of a group make the same collectives in the
    same order, asynchronous ones too; those of different groups may cross.

    Tensors are flat and contiguous, and require no gradient; lengths and dtypes were checked.
    Reductions give the same bits on every rank; 16-bit floats are added in fp32, and AVG of
    integers rounds towards zero. op: torch's ReduceOp. Ranks are numbers in the group. An instance
    must not keep its group alive: it lives as long as the group.
    """

    def __init__(self, group: ProcessGroup, messages: bool) -> None:
        """messages: whether torch.distributed or another provider carried messages of the group
        before.
        """
        self._group = weakref.ref(group)
        self.size = group.size()
        self.rank = group.rank()
        self.backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))

    @property
    def group(self) -> ProcessGroup:
        """The group, which must not have been destroyed."""
        group = self._group()
        if group is None:
            raise CommError(
                "the process group was destroyed while a collective ran on it; wait for its work "
                "first"
            )
        return group

    def open(self) -> None:
        """Set up what all ranks take part in. Collective; called where ds_core makes the group."""

    def all_reduce(self, tensor: Tensor, op: Any, async_op: bool) -> Any:
        """Replace `tensor`, on every rank, by the reduction over all ranks."""
        return self._reduced(
            tensor, op, async_op, lambda wide, op: dist.all_reduce(wide, op, self.group, True)
        )

    def reduce(self, tensor: Tensor, dst: int, op: Any, async_op: bool) -> Any:
        """Reduce into `tensor` of rank `dst`; elsewhere its content is undefined afterwards."""
        to = self._global(dst)
        return self._reduced(
            tensor, op, async_op, lambda wide, op: dist.reduce(wide, to, op, self.group, True)
        )

    def reduce_scatter(self, output: Tensor, input: Tensor, op: Any, async_op: bool) -> Any:
        """Fill `output` with this rank's part of the reduction of `input`, n times as long, which
        stays as it is.

        gloo has it only since torch 2.8: an all_reduce.
        """
        if self._is_gloo(input):
            total = input.clone()
            work = self.all_reduce(total, op, True)
            return _end(work, lambda: output.copy_(total.view(self.size, -1)[self.rank]), async_op)
        wire_op, finish = self._average_after(output, op)
        return _end(_SCATTER(output, input, wire_op, self.group, True), finish, async_op)

    def all_gather_into(self, output: Tensor, input: Tensor, async_op: bool) -> Any:
        """Fill `output`, n times as long, with every rank's `input`, which may lie in its place in
        `output` already.
        """
        return _GATHER(self._wire(output), self._wire(input), self.group, async_op)

    def broadcast(self, tensor: Tensor, src: int, async_op: bool) -> Any:
        """Replace `tensor`, on every rank, by that of rank `src`."""
        return dist.broadcast(self._wire(tensor), self._global(src), self.group, async_op)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        taken: list[int] | None,
        given: list[int] | None,
        async_op: bool,
    ) -> Any:
        """Send the next ``given[i]`` elements of `input` to rank i, and put ``taken[i]`` from it
        into `output`.

        None: equally many for each.
        """
        return dist.all_to_all_single(output, input, taken, given, self.group, async_op)

    def isend(self, tensor: Tensor, dst: int) -> Work:
        """Start sending to rank `dst`. All messages of a group go by torch.distributed, or none."""
        return AfterWork([dist.isend(tensor, self._global(dst), self.group)])

    def irecv(self, tensor: Tensor, src: int) -> Work:
        """Start receiving from rank `src`."""
        return AfterWork([dist.irecv(tensor, self._global(src), self.group)])

    def _reduced(
        self, tensor: Tensor, op: Any, async_op: bool, call: Callable[[Tensor, Any], Any]
    ) -> Any:
        wide = (
            tensor.to(_WIDE[tensor.dtype])
            if tensor.dtype in _WIDE and self._is_gloo(tensor)
            else tensor
        )
        wire_op, finish = self._average_after(wide, op)
        if wide is tensor:
            return _end(call(tensor, wire_op), finish, async_op)

        def narrow() -> None:
            if finish is not None:
                finish()
            tensor.copy_(wide)

        return _end(call(wide, wire_op), narrow, async_op)

    def _average_after(self, tensor: Tensor, op: Any) -> tuple[Any, Callable[[], Any] | None]:
        """The operation to ask the backend for, and what is left to do afterwards."""
        if op != ReduceOp.AVG or self.backends.get(tensor.device.type) in _AVERAGING:
            return op, None
        return ReduceOp.SUM, lambda: average(tensor, self.size)

    def _is_gloo(self, tensor: Tensor) -> bool:
        return self.backends.get(tensor.device.type) == "gloo"

    def _wire(self, tensor: Tensor) -> Tensor:
        """What is only moved, as bytes over gloo, which does not know every dtype."""
        return tensor.view(torch.uint8) if self._is_gloo(tensor) else tensor

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)


# -- which provider serves -------------------------------------------------------------------------

PLAIN = "torch"
"""The name, in the config, of torch.distributed without a provider."""


@dataclass(frozen=True, slots=True)
class Provider:
    """A chosen entry, and whose it is.

    Called with a group, it makes the group's `GroupCollectives`.
    """

    name: str
    entry: CollectivesEntry
    plugin: Found
    config: RunConfig | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.name} ({self.plugin.dist})"

    def __call__(self, group: ProcessGroup, messages: bool) -> GroupCollectives:
        """See `GroupCollectives`.

        Raises PluginError, naming the plugin, for whatever goes wrong.
        """
        load = Answer(self.plugin, self.entry).resolve(
            self.entry.load, f"collectives {self.name!r}"
        )
        with blaming(self.plugin, f"failed in {self.entry.load} (ds_collectives)"):
            more = {"config": self.config} if "config" in inspect.signature(load).parameters else {}
            made = load(group, messages, **more)
            if not isinstance(made, GroupCollectives):
                raise TypeError(f"it must give a ds_core.comm.GroupCollectives, not {made!r}")
        return made


def choose_providers(
    plugins: Plugins, wanted: str | None, config: RunConfig | None = None
) -> dict[tuple[str, str], Provider]:
    """(device type, backend) -> what serves its groups: the highest priority that is available, or
    `wanted` alone.

    config: of the run, for providers that have a section.

    Raises ConfigError when no plugin offers `wanted` or it is not available, PluginError for two of
    one priority.
    """
    offers = plugins.named("ds_collectives", "collectives")
    if wanted is not None and wanted.lower() not in (PLAIN, *offers):
        from ds_core.catalogue import missing

        raise ConfigError(
            [missing("collectives", wanted, [*offers, PLAIN], more=plugins.quarantined())],
            "collectives",
        )
    names = offers if wanted is None else {wanted.lower()} - {PLAIN}
    found = [
        Provider(name, offers[name].value, offers[name].plugin, config) for name in sorted(names)
    ]
    chosen: dict[tuple[str, str], Provider] = {}
    for one in sorted(found, key=lambda provider: -provider.entry.priority):
        pair = one.entry.device, one.entry.backend
        best = chosen.get(pair)
        # A better one serves the pair already, so this one is not asked whether it could.
        if best is not None and best.entry.priority > one.entry.priority:
            continue
        if (reason := ask(one.entry.available)) is not None:
            if wanted is not None:
                raise ConfigError(f"{one} cannot serve: {reason}", "collectives")
            log.info("collectives are not served by %s: %s", one, reason)
        elif best is not None:
            raise PluginError(
                f"collectives on {' over '.join(pair)} are offered by {best} and {one} with equal "
                f'priority; choose one with "collectives": "{one.name}"'
            )
        else:
            chosen[pair] = one
            plugins.join(one.plugin)
    return chosen


# -- helpers ---------------------------------------------------------------------------------------


def average(total: Tensor, count: int) -> None:
    """Divide `total` in place by the number of ranks; integers towards zero."""
    if total.dtype == torch.bool:
        raise CommError(
            "the average of bool tensors means nothing; reduce with MAX (any) or MIN (all)"
        )
    rounding = None if total.is_floating_point() or total.is_complex() else "trunc"
    if total.device.type != "cpu" or not total.is_contiguous():
        total.div_(count, rounding_mode=rounding)
        return
    for piece in total.view(-1).split(_PIECE):
        piece.div_(count, rounding_mode=rounding)


def _end(work: Any, finish: Callable[[], Any] | None, async_op: bool) -> AfterWork | None:
    after = AfterWork([work], finish)
    if async_op:
        return after
    after.wait()
    return None
