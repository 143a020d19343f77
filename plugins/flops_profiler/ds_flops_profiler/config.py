"""The section ``flops_profiler`` (torch-free)."""

from __future__ import annotations

from ds_core.config import Section, option


class FlopsProfilerConfig(Section):
    """Profile one step: FLOPs, MACs, parameters and latency of each module."""

    enabled: bool = option(False, "Profile one step, and print what was measured on rank 0.")
    profile_step: int = option(
        1, "The step to profile, from 0; the first steps are slower than others.", ge=0
    )
    module_depth: int = option(-1, "How deep modules are shown; -1: all.", ge=-1)
    top_modules: int = option(1, "How many kinds of modules to name at each depth.", ge=1)
    detailed: bool = option(True, "Print the tree of modules.")
    output_file: str | None = option(None, "The file to write to, instead of standard output.")
    recompute_fwd_factor: float = option(
        0.0,
        "Forwards that the backward does again, for the assumed FLOPs: 1.0 if all is checkpointed.",
        ge=0,
    )
    peak_tflops: float | None = option(
        None,
        "What a rank's device can do, in 1e12 FLOPs per second, for the metric "
        "`Train/Samples/mfu`.",
        gt=0,
    )
