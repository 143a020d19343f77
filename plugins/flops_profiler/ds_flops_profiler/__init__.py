"""Counts FLOPs, MACs, parameters and latency per module: `FlopsProfiler`, `get_model_profile`, and
the section ``flops_profiler``, which profiles one step of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core import names_on_first_use

if TYPE_CHECKING:
    from ds_flops_profiler.counter import Counter, Tally
    from ds_flops_profiler.model_profile import get_model_profile
    from ds_flops_profiler.profiler import FlopsProfiler
    from ds_flops_profiler.units import (
        bytes_to_string,
        duration_to_string,
        flops_to_string,
        macs_to_string,
        number_to_string,
        params_to_string,
    )

__all__ = [
    "bytes_to_string",
    "Counter",
    "duration_to_string",
    "flops_to_string",
    "FlopsProfiler",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
    "Tally",
]

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "counter": "Counter Tally",
        "model_profile": "get_model_profile",
        "profiler": "FlopsProfiler",
        "units": "bytes_to_string duration_to_string flops_to_string macs_to_string "
        "number_to_string params_to_string",
    },
)
