"""The accumulation window: where the gradients between two updates came from, and what they are still divided by.

`engine.backward` divides a loss by the accumulation steps before backward. A plain ``loss.backward()`` does not, so the
step divides by them. The loss of a joint backward was divided by the engine that ran it. Mixing these in one window
would be wrong by a factor, so the checks here refuse it.
"""

from __future__ import annotations

import enum
import math

from ds_core.errors import UsageError

__all__ = ["Origin", "Window"]

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


class Origin(enum.IntEnum):
    """Whose backward gradients of one engine come from; several are or-ed together as bits of an int.

    NONE: no backward. ENGINE: the engine's own ``backward``. PLAIN: a ``loss.backward()``. JOINT: another engine's
    ``backward``, of a loss that both engines contributed to.
    """

    NONE = 0
    ENGINE = 1
    PLAIN = 2
    JOINT = 4


ENGINE, PLAIN, JOINT = int(Origin.ENGINE), int(Origin.PLAIN), int(Origin.JOINT)  # a member's ``|`` costs 0.1 us


class Window:
    """One engine's accumulation window; `restart` makes it the next one.

    gas: accumulation steps of this window. micros: micro-batches that `step` has ended. seen, micro: the origins, as
    bits, of the gradients of the window and of the running micro-batch. scaled: whether the running micro-batch's loss
    went through ``engine.scale``. backwards: how many there were, as far as hooks on gradients saw them.
    """

    def __init__(self, gas: int) -> None:
        self.restart(gas)

    def restart(self, gas: int) -> None:
        """Begin a new window: the weights were updated, or other gradients follow."""
        self.gas, self.micros = gas, 0
        self.drop()

    def drop(self) -> None:
        """Forget where the gradients so far came from; they were dropped."""
        self.seen = self.micro = self.backwards = 0
        self.scaled = False
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
        """A backward gives gradients. factor: what another engine multiplied a joint loss by."""
        if self.seen & PLAIN and origin == ENGINE and self.gas > 1:
            raise UsageError(MIXED if self.micro & PLAIN else BEGAN_PLAIN)
        if origin == JOINT and factor != self._joint_factor:
            self._joint_factor = factor if self._joint_factor is None else math.nan
        self.seen |= origin
        self.micro |= origin
        self.backwards += 1

    def add_batch(self) -> None:
        """A runner has run the whole window, with losses divided before backward."""
        self.seen, self.micro, self.backwards = ENGINE, 0, self.gas

    def check(self, factor: float, *, scales: bool) -> None:
        """``engine.step`` was called: raise UsageError for gradients that cannot be right.

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
        if not driven and not joint:  # without hooks a plain backward is not seen, and there may have been none
            self.seen |= PLAIN

    def next_micro(self) -> None:
        """A micro-batch has ended that was not the last."""
        self.micros += 1
        self.micro, self.scaled = 0, False
