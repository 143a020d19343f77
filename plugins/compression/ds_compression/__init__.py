"""Quantisation-aware training, pruning and layer reduction, by the config section
``compression_training``.

`init_compression` prepares a model, training follows the config's schedule, and `redundancy_clean`
bakes the result into plain weights. The documented calls are here; `apply`, `clean` and `student`
have them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core import names_on_first_use

if TYPE_CHECKING:
    from ds_compression.apply import init_compression
    from ds_compression.clean import redundancy_clean
    from ds_compression.clock import set_step
    from ds_compression.student import student_initialization

__version__ = "0.1.0"
__all__ = ["init_compression", "redundancy_clean", "set_step", "student_initialization"]

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "apply": "init_compression",
        "clean": "redundancy_clean",
        "clock": "set_step",
        "student": "student_initialization",
    },
)
