"""The steps of an epoch, one after the other, and the place between two of them: the same on all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_data_sampling.batching.batches import Feed, Plan, samples_in

if TYPE_CHECKING:
    from ds_data_sampling.batching.order import Order

PlanSteps = Callable[[Feed, int, int], Sequence[Plan]]
"""``(feed, step, micros) -> plans``: of one step or of several ones; none where the epoch ends."""


@dataclass(frozen=True)
class Method:
    """How steps are planned.

    shape: what its plans depend on besides the order; JSON.
    """

    plan: PlanSteps
    shape: Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    number: counted over all epochs.
    state: of the planner, before this step.
    """

    plan: Plan
    number: int
    state: Mapping[str, Any]


def at_start(epoch: int, step: int) -> dict[str, Any]:
    """The state at the start of `epoch`, where `step` optimizer steps were taken before."""
    return {
        "epoch": epoch,
        "step": step,
        "order": None,
        "pending": [],
        "window": [],
        "shape": None,
        "done": 0,
    }


class Planner:
    """Plans steps.

    make_order: gives an order of samples.
    usable: whether a sample can be used at all.
    drop_last: an incomplete step at the end of an epoch is left out.
    """

    def __init__(
        self,
        make_order: Callable[[], Order],
        *,
        usable: Callable[[int], bool] | None = None,
        drop_last: bool = False,
    ) -> None:
        self._make = make_order
        self._usable = usable
        self._drop_last = drop_last
        self._order = make_order()
        self.epoch = self.step = 0
        self.load(at_start(0, 0), {})

    def __len__(self) -> int:
        """Samples of an epoch."""
        return len(self._order)

    def load(self, state: Mapping[str, Any], shape: Mapping[str, Any], ranks: int = 1) -> int:
        """Go on from `state`, for a method of `shape`; returns how many micro-batches of the first
        step are done.

        Where the state was saved with another shape, or within a round of `ranks`, its unused
        samples are the first of the next step.
        """
        self.epoch = int(state["epoch"])
        self.step = int(state["step"])
        if state["order"] is None:
            self._order.start(self.epoch)
        else:
            self._order.load_state_dict(state["order"])
        self._window = [list(plan) for plan in state["window"]]
        pending = list(state["pending"])
        done = state["done"]
        # All micro-batches of the step were yielded before the state was saved: the next step is
        # the first.
        if self._window and done >= len(self._window[0]):
            self._window.pop(0)
            self.step = self.step + 1
            done = 0
        # Another batch size, or a number of ranks that does not divide what is left: what was
        # planned is not used, and its samples come first in new plans, so that none is lost and
        # none comes twice.
        if self._window and (state["shape"] != dict(shape) or done % ranks):
            self._window[0] = self._window[0][done:]
            pending = [
                i for plan in self._window for micro in plan for i in samples_in(micro)
            ] + pending
            self._window = []
            done = 0
        again = None if self._drop_last else self._restarted
        self._feed = Feed(self._order, pending, self._usable, again)
        return int(done)

    def _restarted(self) -> Order:
        order = self._make()
        order.start(self.epoch)
        return order

    def next(self, method: Method, micros: int) -> Step | None:
        """The next step of the epoch, with `micros` micro-batches; None where the epoch ends."""
        # A method may plan several steps at once; they are taken one by one.
        if not self._window:
            plans = method.plan(self._feed, self.step, micros) if self._feed.more(self.step) else ()
            if not plans:
                return None
            self._window = list(plans)
        # The place before this step: a run that resumes within it repeats no planning.
        state = {
            "epoch": self.epoch,
            "step": self.step,
            "order": self._order.state_dict(),
            "pending": list(self._feed.pending),
            "window": list(self._window),
            "shape": dict(method.shape),
            "done": 0,
        }
        self.step += 1
        return Step(self._window.pop(0), self.step - 1, state)
