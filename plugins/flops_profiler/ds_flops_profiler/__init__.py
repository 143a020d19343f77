"""Counts FLOPs, MACs, parameters and latency per module: `FlopsProfiler`, `get_model_profile`, and
the section ``flops_profiler``, which profiles one step of a run."""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
