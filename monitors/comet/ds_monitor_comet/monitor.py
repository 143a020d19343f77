"""The monitor for Comet."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ds_monitor_kit import flat, hiding

from ds_core.entries import Event
from ds_monitor_comet.config import CometConfig


class CometMonitor:
    """Logs to an experiment as the section says; a value of a metric at most every
    ``samples_log_interval`` samples.

    config: recorded with the experiment; it must hold no secrets.
    """

    name = "comet"

    def __init__(self, section: CometConfig, config: Mapping[str, Any]) -> None:
        import comet_ml

        self._every = section.samples_log_interval
        self._last = dict[str, int]()
        self._secrets = {key for key in (section.api_key, os.environ.get("COMET_API_KEY")) if key}
        name = section.experiment_name or os.environ.get("COMET_EXPERIMENT_NAME")
        with hiding("comet", self._secrets):
            self._experiment: Any = comet_ml.start(
                # an archive needs none
                api_key=section.api_key if section.online is not False else None,
                project=section.project,
                workspace=section.workspace,
                experiment_key=section.experiment_key,
                mode=section.mode,
                online=section.online,
            )
            if name is not None:
                self._experiment.set_name(name)
            self._experiment.log_parameters(flat(config), nested_support=False)
        self._closed = False

    def write_events(self, events: Sequence[Event]) -> None:
        """Hand over the events that are due, each metric's first one included."""
        with hiding("comet", self._secrets):
            for name, value, step in events:
                # A step below the last one is of a run that went back to a checkpoint: it is due.
                last = self._last.get(name)
                if last is None or not 0 <= step - last < self._every:
                    self._last[name] = step
                    self._experiment.log_metric(name, value, step=step)

    def flush(self) -> None:
        """Have Comet send or write what it holds."""
        with hiding("comet", self._secrets):
            self._experiment.flush()

    def close(self) -> None:
        """End the experiment; offline, its archive is then complete."""
        if not self._closed:
            self._closed = True
            with hiding("comet", self._secrets):
                self._experiment.end()
