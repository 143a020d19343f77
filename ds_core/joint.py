"""Several engines in one process, whose parts one backward may go through: a joint loss.

[Note: one order] Which engines' parts a backward came to, and in which order, may differ between ranks; reductions
must not. So each engine but the first talks on process groups of its own, and after a backward ranks agree which
engines took part on any of them, and finish the reductions of those: first the one whose `backward` it was, then the
others in the order in which they were made. With one engine none of this exists.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from ds_core import comm
from ds_core.process import STATE

if TYPE_CHECKING:
    from ds_core.mesh import Mesh
    from ds_core.partition import Partitioner

__all__ = ["Joint", "enter", "leave", "others"]


class Joint:
    """Ends backwards while several engines live. group: along dp, used for nothing else. device: it talks of."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._touched: set[int] = set()
        self._queued = False

    def touch(self, partitioner: Partitioner) -> None:
        """A gradient of `partitioner` comes in a backward that its engine did not begin. Runs inside backward."""
        self._touched.add(id(partitioner))
        if STATE.driver is None and not self._queued:  # an engine that drives calls `finish` itself
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def finish(self, driver: Partitioner | None = None) -> None:
        """A backward is over: finish the reductions of all engines that took part on any rank. Collective."""
        touched = self._touched
        self.forget()
        if driver is not None:  # its reductions began in backward, and ranks may be waiting there for each other's
            driver.finish()
        members = [STATE.attached[serial]() for serial in sorted(STATE.attached)]
        flags = torch.tensor([m is not None and id(m) in touched for m in members], dtype=torch.uint8)
        flags = flags.to(self._device)
        comm.label("which engines took part in this backward")
        comm.all_reduce(flags, op=torch.distributed.ReduceOp.MAX, group=self._group)
        for member, took_part in zip(members, flags.tolist(), strict=True):
            if took_part and member is not None and member is not driver:
                if id(member) not in touched:  # only other ranks have gradients; these count here, too
                    member.note_origin()
                    member.begin()
                member.finish()

    def forget(self) -> None:
        """Be ready for a new backward; the last one may have broken off."""
        self._touched, self._queued = set(), False


def others() -> bool:
    """Whether other engines are there, so that a new one needs process groups of its own. The same on all ranks."""
    _drop_those_of_another_world()
    return bool(STATE.attached)


def enter(serial: int, partitioner: Partitioner, mesh: Mesh, device: torch.device) -> None:
    """An engine begins. Collective."""
    _drop_those_of_another_world()
    STATE.attached[serial] = weakref.ref(partitioner)
    for member in [ref() for ref in STATE.attached.values()]:
        if member is not None and len(STATE.attached) > 1:
            member.rewatch()
    if len(STATE.attached) > 1 and STATE.joint is None and mesh.size("dp") > 1:
        STATE.joint = Joint(mesh.own_group("dp"), device)


def leave(serial: int) -> None:
    """An engine ends; `destroy` says so on all ranks, unlike the garbage collector."""
    STATE.attached.pop(serial, None)
    if len(STATE.attached) < 2:
        STATE.joint = None


def _drop_those_of_another_world() -> None:
    """Engines that were never destroyed, but whose process group was: nothing can be reduced with them."""
    world = torch.distributed.group.WORLD
    if (STATE.world() if STATE.world is not None else None) is not world:
        STATE.attached.clear()
        STATE.joint = None
        STATE.world = weakref.ref(world) if world is not None else None
