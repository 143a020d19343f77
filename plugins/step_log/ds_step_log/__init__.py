"""dscore-step-log: progress lines, times of phases and steps, and memory of a ds_core run."""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
