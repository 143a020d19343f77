"""ds-step-log: progress lines, times of phases and steps, and memory of a ds_core run."""

from __future__ import annotations

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__, {"memory": "see_memory_usage"})
