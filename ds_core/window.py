"""The accumulation window: how the gradients between two updates came about, and what is left to divide them by.

`engine.backward` divides a loss by the accumulation steps beforehand. A plain ``loss.backward()`` does not, so the step
does it for the whole window. A joint loss was divided by the engine whose `backward` it was. Two of these in one window
would be wrong by a factor, so the checks here refuse it.
"""

from __future__ import annotations

import math

import torch

from ds_core.errors import UsageError

__all__ = ["Window"]

MIXED = (
    "gradients of one accumulation window came both from engine.backward(loss), which divides by "
    "gradient_accumulation_steps, and from a plain loss.backward(), which does not; use one of the two between two "
    "steps, or add the losses up and call engine.backward once (engine.zero_grad() drops what has come)"
)
BEGAN_PLAIN = (
    "this accumulation window began with a plain loss.backward() and goes on with engine.backward(loss); use one of "
    "the two between two steps, since they divide by gradient_accumulation_steps at different times"
)
NO_BACKWARD = (
    "step() found no engine.backward(loss) for this micro-batch, though earlier ones of the window had one. A window "
    "that mixes it with loss.backward() is divided wrongly; to skip a micro-batch, skip its step() too"
)
UNSCALED = (
    "loss.backward() was called without the loss scale that fp16 needs; write engine.scale(loss).backward(), or "
    "engine.backward(loss)"
)


ENGINE, PLAIN, JOINT = 1, 2, 4
"""Which backwards gradients came from: bits of `Window.seen` and `Window.micro`. JOINT: another engine's, of a loss
that both share. (Plain integers, since an operation on `enum.Flag` costs a microsecond, and every step has several.)"""


class Window:
    """One engine's window; `restart` makes it the next one.

    gas: the accumulation steps of this window. micros: micro-batches that `step` has ended. seen, micro: where the
    gradients of the window, and of the running micro-batch, came from. scaled: whether the running micro-batch's loss
    went through ``engine.scale``. counts: whether `backwards` counts them, which takes hooks on gradients.
    """

    def __init__(self, gas: int, *, counts: bool = False) -> None:
        self.counts = counts
        self._inside = False  # a backward that is counted already
        self.restart(gas)

    def restart(self, gas: int) -> None:
        """The weights were updated, or will be from other gradients: begin anew."""
        self.gas, self.micros = gas, 0
        self.drop()

    def drop(self) -> None:
        """The gradients so far are dropped, and with them how they came about."""
        self.seen = self.micro = 0
        self.scaled = self._inside = False
        self.backwards = 0
        self._joint_factor: float | None = None

    @property
    def open(self) -> bool:
        """Whether a part of it has come, so that `gas` must stay."""
        return bool(self.micros or self.seen)

    @property
    def at_boundary(self) -> bool:
        """Whether the running micro-batch is the last."""
        return (self.micros + 1) % self.gas == 0

    @property
    def divisor(self) -> int:
        """What the step still divides the gradients by; 1 where losses were divided before backward."""
        return 1 if self.seen & (ENGINE | JOINT) else self.gas

    def drive(self) -> None:
        """``engine.backward`` begins."""
        if self.seen & PLAIN and self.gas > 1:
            raise UsageError(MIXED if self.micro & PLAIN else BEGAN_PLAIN)
        self._add(ENGINE)
        self.backwards += 1

    def note(self, factor: float | None) -> None:
        """For hooks on gradients: one has come from another backward than this engine's.

        factor: what the engine that runs it multiplied the loss by; None in a plain backward.
        """
        self._add(PLAIN if factor is None else JOINT)
        if factor is not None and factor != self._joint_factor:
            self._joint_factor = factor if self._joint_factor is None else math.nan
        if self.counts and not self._inside:
            self.backwards += 1
            if torch._C._current_graph_task_id() != -1:
                self._inside = True
                torch.autograd.Variable._execution_engine.queue_callback(self._over)

    def _over(self) -> None:
        self._inside = False

    def _add(self, origin: int) -> None:
        self.seen |= origin
        self.micro |= origin

    def take_batch(self) -> None:
        """A runner has run the whole window, with losses divided beforehand."""
        self.seen, self.micro, self.backwards = ENGINE, 0, self.gas

    def check(self, factor: float, *, scales: bool) -> None:
        """``engine.step`` was called: refuse gradients that cannot be right.

        factor: what this engine multiplies losses by. scales: whether it has a loss scaler.
        """
        several, driven, joint = self.gas > 1, self.micro & ENGINE, self.seen & JOINT
        if several and self.seen & PLAIN and (driven or joint):
            raise UsageError(MIXED)
        if joint and self._joint_factor != factor:
            raise UsageError(
                "gradients came from another engine's backward (a joint loss), which multiplied the loss by "
                f"{self._joint_factor:g}, and this engine multiplies by {factor:g} (loss scale over "
                "gradient_accumulation_steps); engines that share a loss need the same gradient_accumulation_steps, "
                "and bf16 or fp32, or the same fp16.loss_scale"
            )
        if scales and not self.scaled and (self.seen & PLAIN or not (driven or joint)):
            raise UsageError(UNSCALED)
        if several and not driven and not joint and self.seen & ENGINE:
            raise UsageError(NO_BACKWARD)
        if not driven and not joint:  # hooks may not watch plain backwards, and there may have been none
            self.seen |= PLAIN

    def next_micro(self) -> None:
        """A micro-batch is over, and it was not the last."""
        self.micros += 1
        self.micro, self.scaled = 0, False
