"""Several engines in one process: a model has one engine, but one backward may go through the
models of several.

[Note: joint losses] Which engines a backward came to, and in which order, may differ between ranks;
reductions must not. So each engine but the first has its own process groups, and after a
backward ranks agree which engines took part on any of them, and finish the reductions of those:
first the one whose `backward` it was, then the others in the order in which they were made. With
one engine none of this happens.

[Note: backwards of a runner] The stages of a pipeline run backwards at different times, and each
waits for messages of others in between: agreeing after each of them would deadlock. So what a
runner runs by `run_backward` is agreed on once, when the batch is over.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ds_core import comm
from ds_core.errors import UsageError
from ds_core.process import STATE
from ds_core.undo import Undo

if TYPE_CHECKING:
    from torch import nn

    from ds_core.context import Context
    from ds_core.gradients.gradient_hooks import GradientHooks

_ATTRIBUTE = "ds_undo"

log = logging.getLogger("ds_core")


class JointBackwards:
    """The backward that runs while there are several engines, each of which has this as
    `GradientHooks.joint`.
    """

    driver: tuple[GradientHooks, float] | None = None
    """The engine whose ``backward`` runs, with what it multiplies losses by; None in a plain
    ``loss.backward()``."""
    group: Any = None
    """Of all ranks, for agreeing on engines after each backward; None in one process."""

    def __init__(self) -> None:
        # The number of the first engine that `group` serves.
        self._first = 0
        self._touched: set[GradientHooks] = set()
        # Whether `finish` will be called when the running backward ends.
        self._queued = False
        self._device = torch.device("cpu")

    def enter(self, ctx: Context) -> None:
        """One more engine was made. Collective."""
        if self._first != STATE.first:
            self.group = None
            self._first = STATE.first
        if self.group is None and ctx.world_size > 1:
            # Of all ranks, not along dp: that of a pipeline has fewer ranks than that of an engine
            # beside it. And not the mesh's, which ends with its engine.
            self.group = torch.distributed.new_group()
            comm.open_transport(self.group)
            self._device = ctx.accelerator.current_device()
        for hooks in filter(None, STATE.present()):
            hooks.joint = self
            if hooks.engine() is not None:
                hooks.install()

    def leave(self) -> None:
        """An engine was destroyed, on all ranks."""
        if len(STATE.present()) < 2:
            if self.group is not None:
                with contextlib.suppress(ValueError):  # all groups may have been destroyed
                    torch.distributed.destroy_process_group(self.group)
            self.group = None
            for hooks in filter(None, STATE.present()):
                hooks.joint = None

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
        """A backward is over: finish the reductions of the other engines that it came to on any
        rank. Collective.

        driver: the engine that ran it. It has finished its own first: they began in backward, where
        ranks may wait.
        """
        if self.group is None:
            return
        touched = self._touched.copy()
        self.forget()
        members = STATE.present()
        flags = torch.tensor(
            [m in touched for m in members], dtype=torch.uint8, device=self._device
        )
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


JOINT = JointBackwards()


# -- one model, one engine -------------------------------------------------------------------------


def release_model(model: nn.Module) -> None:
    """Make sure that no other engine trains `model` or a part of it. Collective.

    An engine of this very model, as a second ``initialize`` in a notebook finds it, is destroyed
    with a warning; hooks of one that was garbage-collected are removed. Raises UsageError while an
    engine of a part of the model, or of a module around it, is in use.
    """
    mine = {p: name for name, p in model.named_parameters() if p.requires_grad}
    if any(hooks.engine() is not None for hooks in _sharing(model, mine)):
        # an engine in a reference cycle lives on for a while though no code can reach it
        gc.collect()
    for hooks, what in _sharing(model, mine).items():
        if (engine := hooks.engine()) is None:
            hooks.remove()
            hooks.partitioner.detach()
        elif hooks.module is model:
            log.warning(
                "initialize was called again on a model whose engine is in use; that engine is "
                "destroyed, with its optimizer states (call its destroy() first to avoid this warning)"
            )
            engine.destroy()
        else:
            raise UsageError(
                f"{what} belongs to the engine that an earlier initialize made, which is still in "
                "use, and two engines cannot train the same weights; call destroy() on that engine first"
            )


def _sharing(model: nn.Module, trainable: dict[nn.Parameter, str]) -> dict[GradientHooks, str]:
    """The engines that have something of `model` too, by their hooks, and what it is in words."""
    found = {}
    for hooks in filter(None, [ref() for ref in STATE.members.values()]):
        if hooks.module is model:
            found[hooks] = "the model"
        elif name := next((trainable[p] for p in hooks.module.parameters() if p in trainable), ""):
            found[hooks] = f"the parameter {name!r} of the model"
    return found


# -- what a run has left in a model ----------------------------------------------------------------


@contextlib.contextmanager
def keep(undo: Undo, model: nn.Module) -> Iterator[None]:
    """Let `model` hold `undo`, so that it is found when nobody has destroyed the engine; run it if
    the block fails.
    """
    model.__dict__[_ATTRIBUTE] = undo
    # the first: it goes when nothing is left
    undo(lambda: model.__dict__.pop(_ATTRIBUTE, None), collective=True)
    try:
        yield
    except BaseException:
        undo.run(alone=comm.world_size() > 1)
        raise


def give_back(model: nn.Module) -> None:
    """Undo what a run has left in `model`: its `initialize` failed, or its engine was forgotten.

    Collective.
    """
    used = [engine.ctx.undo for engine in STATE.engines]
    for part in list(model.modules()):
        left = part.__dict__.get(_ATTRIBUTE)
        if isinstance(left, Undo) and left not in used:
            left.run()
