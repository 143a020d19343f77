"""`FlopsProfiler`: profile the forwards of a model between `start_profile` and `stop_profile`."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import nn

from ds_core.accelerator import get_accelerator
from ds_core.errors import UsageError
from ds_flops_profiler import report
from ds_flops_profiler.counter import Counter, Tally
from ds_flops_profiler.parameters import stored_here
from ds_flops_profiler.units import (
    duration_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)


class FlopsProfiler:
    """FLOPs, MACs, parameters and latency of the forward of a model, by module.

    model: a module, or an engine, whose module is meant.
    ds_engine: the engine that trains it; its world size, batch and parameters over ranks are then
        printed too.
    recompute_fwd_factor: forwards that the backward does again, for the assumed FLOPs of the
        backward.
    """

    def __init__(
        self, model: Any, ds_engine: Any = None, recompute_fwd_factor: float = 0.0
    ) -> None:
        module = model if isinstance(model, nn.Module) else getattr(model, "module", None)
        if not isinstance(module, nn.Module):
            raise UsageError(
                f"FlopsProfiler takes a torch.nn.Module or an engine, not {type(model).__name__}"
            )
        self.model: nn.Module = module
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self._counter: Counter | None = None
        self._active = contextlib.ExitStack()

    @property
    def started(self) -> bool:
        """Whether there is a profile: from `start_profile` to `end_profile`."""
        return self._counter is not None

    @property
    def counter(self) -> Counter:
        """What has been counted.

        Raises UsageError before `start_profile`, and after `end_profile`.
        """
        if self._counter is None:
            raise UsageError(
                "there is no profile: call start_profile() before, and end_profile() after"
            )
        return self._counter

    def start_profile(self, ignore_list: Collection[type] | None = None) -> None:
        """Profile from here on, from zero.

        ignore_list: classes of modules whose work counts at their callers.
        """
        self.attach(ignore_list)
        self._active.enter_context(self.counter.measuring())

    def attach(self, ignore_list: Collection[type] | None = None) -> None:
        """Measure the time of modules from here on; operations count only in ``with
        profiler.counter.measuring()``.
        """
        self.end_profile()
        self._counter = counter = Counter(
            self.model, ignore_list or (), get_accelerator().synchronize
        )
        counter.attach()
        self._active.callback(counter.detach)

    def stop_profile(self) -> None:
        """Stop measuring; what was measured can still be asked for."""
        self._active.close()

    def reset_profile(self) -> None:
        """All counts are zero again."""
        self.counter.reset()

    def end_profile(self) -> None:
        """Stop, and forget what was measured."""
        self.stop_profile()
        self._counter = None

    # -- what was measured -------------------------------------------------------------------------

    def total(self) -> Tally:
        """Of the whole model's forwards."""
        return self.counter.total(self.model)

    def get_total_flops(self, as_string: bool = False) -> Any:
        """FLOPs of the forwards."""
        flops = self.total().flops
        return number_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """MACs of the forwards."""
        macs = self.total().macs
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds that the forwards took."""
        seconds = self.total().seconds
        return duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Parameters that this rank stores."""
        params = stored_here(self.model)
        return params_to_string(params) if as_string else params

    # -- printed -----------------------------------------------------------------------------------

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the totals, the most expensive kinds of modules by depth, and with `detailed` the
        tree of modules.

        profile_step: printed in the heading.
        module_depth: how deep; -1: all.
        top_modules: how many kinds at each depth.
        output_file: written instead of standard output; its folder is made.
        """
        rows = report.totals(self)
        self.write(rows, profile_step, module_depth, top_modules, detailed, output_file)

    def write(
        self,
        rows: report.Rows,
        profile_step: int,
        module_depth: int,
        top_modules: int,
        detailed: bool,
        output_file: str | None,
    ) -> None:
        """Print `rows`, and of the modules what is asked for."""
        counter = self.counter
        text = report.heading(profile_step, rows)
        text += report.aggregated(counter, module_depth, top_modules)
        if detailed:
            text += report.tree(counter, module_depth)
        text += report.footnotes(counter)
        if output_file:
            path = Path(output_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        else:
            print(text, end="", flush=True)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the `top_modules` most expensive kinds of modules at each depth up to
        `module_depth`.
        """
        print(report.aggregated(self.counter, module_depth, top_modules), end="", flush=True)
