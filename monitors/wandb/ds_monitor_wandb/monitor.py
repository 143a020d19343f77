"""The monitor for Weights & Biases.

[Note: the x axis] wandb's own step must never fall, and drops what comes late. Users log at steps
of their own, so each row has the number of samples as a metric, which is declared as the x axis of
all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds_monitor_kit import rows

from ds_core.entries import Event
from ds_monitor_wandb.config import WandbConfig

AXIS = "global_samples"


class WandbMonitor:
    """Logs to the run of this process where the program has started one, else to a new one, which
    it finishes.

    config: recorded with a new run; it must hold no secrets.
    """

    name = "wandb"

    def __init__(self, section: WandbConfig, config: Mapping[str, Any]) -> None:
        import wandb

        self._owned = wandb.run is None
        self._run: Any = wandb.run or wandb.init(
            project=section.project, group=section.group, entity=section.team, config=dict(config)
        )
        # wandb's own step must grow with each row; samples are an axis of ours, since metrics of
        # one step may come in several rows.
        self._run.define_metric(AXIS, hidden=True)
        self._run.define_metric("*", step_metric=AXIS)
        self._closed = False

    def write_events(self, events: Sequence[Event]) -> None:
        """Hand the events to wandb, a row per step."""
        for step, row in rows(events):
            self._run.log({**row, AXIS: step})

    def flush(self) -> None:
        """Nothing: wandb's own process has the rows, and writes them when it sees fit."""

    def close(self) -> None:
        """Finish the run, if it was started here; wandb then has written and sent all of it."""
        if self._owned and not self._closed:
            self._closed = True
            self._run.finish()
