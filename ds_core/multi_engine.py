"""Several engines in one process: a model has one engine, but one backward may go through the models of several.

[Note: joint losses] Which engines a backward came to, and in which order, may differ between ranks; reductions must
not. So each engine but the first has process groups of its own, and after a backward ranks agree which engines took
part on any of them, and finish the reductions of those: first the one whose `backward` it was, then the others in the
order in which they were made. With one engine none of this happens.
"""

from __future__ import annotations

import gc
import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ds_core import comm
from ds_core.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from ds_core.gradient_hooks import GradientHooks
    from ds_core.mesh import Mesh

__all__ = ["ENGINES", "Engines", "release_model", "reset"]

log = logging.getLogger("ds_core")


class Engines:
    """The engines of this process that were not destroyed, by their hooks on gradients, and the backward that runs.

    driver: the engine whose ``backward`` runs, with what it multiplies losses by; None in a plain ``loss.backward()``.
    group: along dp, for agreeing on engines after each backward; None where that is not needed.
    members: by serial number; an engine that was garbage-collected stays, since that happens on each rank by itself.
    """

    def __init__(self) -> None:
        self.driver: tuple[GradientHooks, float] | None = None
        self.members: dict[int, weakref.ref[GradientHooks]] = {}
        self._made = 0
        self._world: Any = None  # a weak reference to the process group of the members from `_first` on
        self._first = 0
        self._touched: set[GradientHooks] = set()
        self._queued = False  # `finish` is called when the running backward ends
        self.group: Any = None
        self._device = torch.device("cpu")

    # -- which engines there are -----------------------------------------------------------------------------

    def enter(self, hooks: GradientHooks, mesh: Mesh, device: torch.device) -> int:
        """An engine was made; returns its serial number. Collective."""
        self._follow_world()
        self._made += 1
        self.members[self._made] = weakref.ref(hooks)
        members = self._present()
        if len(members) > 1 and self.group is None and mesh.size("dp") > 1:
            self.group, self._device = mesh.own_group("dp"), device
        for member in members:
            if member is not None and member.engine() is not None:
                member.install()
        return self._made

    def leave(self, serial: int) -> None:
        """An engine was destroyed, on all ranks."""
        self.members.pop(serial, None)
        if len(self._present()) < 2:
            self._stop_agreeing()

    def _stop_agreeing(self) -> None:
        self.group = None
        for member in self._present():
            if member is not None:
                member.partitioner.may_wait = True

    def _follow_world(self) -> None:
        """With another process group, nothing of the engines made before can be reduced any more."""
        world = torch.distributed.group.WORLD
        if (self._world() if self._world is not None else None) is not world:
            self._world = weakref.ref(world) if world is not None else None
            self._first = self._made + 1
            self._stop_agreeing()

    def _present(self) -> list[GradientHooks | None]:
        """In the order in which they were made, as many on all ranks; None: garbage-collected."""
        return [ref() for serial, ref in sorted(self.members.items()) if serial >= self._first]

    @property
    def others(self) -> bool:
        """Whether a new engine needs process groups of its own. The same on all ranks."""
        self._follow_world()
        return bool(self._present())

    @property
    def several(self) -> bool:
        """Whether more than one engine lives on this rank."""
        return sum(m is not None and m.engine() is not None for m in self._present()) > 1

    # -- joint backwards -------------------------------------------------------------------------------------

    def finish_later(self, hooks: GradientHooks) -> None:
        """Have `hooks.leave` called when the running backward is over. Runs inside backward."""
        queue = torch.autograd.Variable._execution_engine.queue_callback
        if self.group is None:
            queue(hooks.leave)
            return
        self._touched.add(hooks)
        if self.driver is None and not self._queued:  # an engine that drives calls `finish` itself
            self._queued = True
            queue(self.finish)

    def finish(self, driver: GradientHooks | None = None) -> None:
        """A backward is over: finish the reductions of all engines that it came to on any rank. Collective.

        driver: the engine that ran it.
        """
        if driver is not None:  # its reductions began in backward, and ranks may be waiting there for each other's
            driver.partitioner.finish()
        if self.group is None:
            return
        touched = self._touched.copy()
        self.forget()
        members = self._present()
        flags = torch.tensor([m in touched for m in members], dtype=torch.uint8, device=self._device)
        comm.label("which engines took part in this backward")
        comm.all_reduce(flags, op=torch.distributed.ReduceOp.MAX, group=self.group)
        for member, took_part in zip(members, flags.tolist(), strict=True):
            if took_part and member is not None and member is not driver:
                if member not in touched:  # only other ranks have gradients; these count here, too
                    member.begin()
                    member.note()
                member.leave()

    def forget(self) -> None:
        """Be ready for a new backward; the last one may have failed half-way."""
        self._touched.clear()
        self._queued = False


ENGINES = Engines()


def reset() -> None:
    """Forget all engines. For `ds_core.reset`."""
    ENGINES.members.clear()
    ENGINES.leave(0)
    ENGINES.forget()


# -- one model, one engine -------------------------------------------------------------------------------------------


def release_model(model: nn.Module) -> None:
    """Make sure that no other engine trains `model` or a part of it. Collective.

    An engine of this very model, as a second ``initialize`` in a notebook finds it, is destroyed with a warning; hooks
    of one that was garbage-collected are removed. Raises UsageError while an engine of a part of the model, or of a
    module around it, is in use.
    """
    mine = {p: name for name, p in model.named_parameters() if p.requires_grad}
    if _in_use(model, mine):
        gc.collect()  # an engine in a reference cycle lives on for a while though nobody can reach it
    for hooks in _members():
        if hooks.module is model and (engine := hooks.engine()) is not None:
            log.warning(
                "initialize was called again on a model whose engine is in use; that engine is destroyed, with its "
                "optimizer states (call its destroy() first to avoid this warning)"
            )
            engine.destroy()
    if what := _in_use(model, mine):
        raise UsageError(
            f"{what} belongs to the engine that an earlier initialize made, which is still in use, and two engines "
            "cannot train the same weights; call destroy() on that engine first"
        )
    for hooks in _members():
        if _shared(hooks, model, mine):
            hooks.remove()
            hooks.partitioner.detach()


def _members() -> list[GradientHooks]:
    return [hooks for ref in ENGINES.members.values() if (hooks := ref()) is not None]


def _in_use(model: nn.Module, trainable: dict[nn.Parameter, str]) -> str:
    shared = (_shared(hooks, model, trainable) for hooks in _members() if hooks.engine() is not None)
    return next(filter(None, shared), "")


def _shared(hooks: GradientHooks, model: nn.Module, trainable: dict[nn.Parameter, str]) -> str:
    """What of `model` the engine has too, in words; "" for nothing."""
    if hooks.module is model:
        return "the model"
    name = next((trainable[p] for p in hooks.module.parameters() if p in trainable), None)
    return "" if name is None else f"the parameter {name!r} of the model"
