"""The section ``autotuning`` (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import model_validator

from ds_core.config import Section, option


class ModelInfo(Section):
    """What is known of the model beforehand."""

    profile: bool = option(False, "Measure the model even where num_params is given.")
    num_params: int | None = option(
        None, "Number of parameters; given, the model is not measured first.", gt=0
    )
    hidden_size: int | None = option(None, "Width of a layer; shown in the results.", gt=0)
    num_layers: int | None = option(None, "Number of layers; shown in the results.", gt=0)


class Autotuning(Section):
    """What is tried, how long, and where results lie."""

    enabled: bool = option(
        False, "Let `dscore run --autotuning` tune; by itself it changes nothing."
    )
    fast: bool = option(True, "Try only ZeRO's stage and the micro-batch size.")
    metric: Literal["throughput", "latency", "flops"] = option(
        "throughput",
        "What is best: most samples/s, fewest seconds per step, most flops per device.",
    )
    tuner_type: Literal["gridsearch", "random", "model_based"] = option(
        "model_based",
        "The order of trials: one after another, random, or where a model of the trials expects "
        "most.",
    )
    tuner_early_stopping: int = option(
        5, "Stop a stage after this many trials without a better one; 0: never.", ge=0
    )
    tuner_num_trials: int = option(50, "Most trials in all.", gt=0)
    seed: int = option(0, "Seed of the order of trials.", ge=0, lt=2**32)
    start_profile_step: int = option(3, "First optimizer step that is timed, from 1.", gt=0)
    end_profile_step: int = option(
        5, "Last optimizer step that is timed; the trial ends with it.", gt=0
    )
    max_train_batch_size: int | None = option(None, "Largest global batch that may be tried.", gt=0)
    min_train_batch_size: int = option(1, "Smallest global batch that may be tried.", gt=0)
    max_train_micro_batch_size_per_gpu: int = option(
        1024, "Largest micro-batch that may be tried.", gt=0
    )
    min_train_micro_batch_size_per_gpu: int = option(
        1, "Smallest micro-batch that may be tried.", gt=0
    )
    num_tuning_micro_batch_sizes: int = option(
        3, "How many micro-batch sizes to try other keys with, of gridsearch and random.", gt=0
    )
    mp_size: int = option(
        1, "Ranks that share one model by the script's own model parallelism.", gt=0
    )
    space: dict[str, tuple[Any, ...]] = option(
        {},
        "Key of the config -> its values to try: adds a dimension or replaces one; an empty list "
        "removes it.",
    )
    arg_mappings: dict[str, str] | None = option(
        None, "Key of the config -> flag of the script that says the same."
    )
    results_dir: str = option(
        "autotuning_results", "Folder of the best config, its command and the summary."
    )
    exps_dir: str = option("autotuning_exps", "Folder of the trials, from which a restart resumes.")
    overwrite: bool = option(False, "Start over: trials that are in exps_dir are run again.")
    trial_seconds: float = option(600.0, "Longest time of one trial, in seconds.", gt=0)
    device_memory_gb: float | None = option(
        None,
        "Memory of a device that a trial may use, in GB; null: what is free when tuning begins.",
        gt=0,
    )
    host_memory_gb: float | None = option(
        None,
        "Memory of the host that one process of a trial may use, in GB; null: its share of what is "
        "free.",
        gt=0,
    )
    metric_path: str | None = option(None, "Set by the tuner in a trial: the file for the result.")
    model_info_path: str | None = option(
        None, "Set by the tuner in the first run: the file for the model's profile."
    )
    model_info: ModelInfo | None = option(
        None, "What is known of the model; num_params skips the first run."
    )

    @model_validator(mode="after")
    def _ordered(self) -> Autotuning:
        for low, high in (
            (self.start_profile_step, self.end_profile_step),
            (self.min_train_batch_size, self.max_train_batch_size),
            (self.min_train_micro_batch_size_per_gpu, self.max_train_micro_batch_size_per_gpu),
        ):
            if high is not None and low > high:
                raise ValueError(
                    f"{low} is more than {high}: end_profile_step, max_train_batch_size and "
                    "max_train_micro_batch_size_per_gpu must not be below their start or min"
                )
        return self

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """A run that no tuner started is an ordinary one; and what the chosen tuner does not
        use."""
        if self.enabled and self.metric_path is None and self.model_info_path is None:
            yield (
                "enabled",
                "has no effect in a run that is not started by `dscore tune` or `dscore run "
                "--autotuning`",
            )
        if (
            self.tuner_type == "model_based"
            and isinstance(given, dict)
            and "num_tuning_micro_batch_sizes" in given
        ):
            yield (
                "num_tuning_micro_batch_sizes",
                "has no effect: with tuner_type model_based any size may be tried",
            )

    @property
    def measures(self) -> bool:
        """Whether this run is a trial or the profile run of a tuner."""
        return self.enabled and (self.metric_path is not None or self.model_info_path is not None)
