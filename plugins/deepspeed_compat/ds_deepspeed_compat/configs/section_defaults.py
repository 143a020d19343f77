"""Objects and dicts by which DeepSpeed's config shows some of its sections, with the documented
defaults: to be read.

The others are models of the packages that serve them, see
`ds_deepspeed_compat.configs.config_models`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ds_core.config import option
from ds_deepspeed_compat.configs.config_models import DeepSpeedConfigModel, model_named


class DeepSpeedThroughputTimerConfig(DeepSpeedConfigModel):
    """``timers.throughput``."""

    enabled: bool = option(True, "Measure samples per second.")
    synchronized: bool = option(True, "Synchronise the device before the clock is read.")


class DeepSpeedMonitorConfig(DeepSpeedConfigModel):
    """The sections of the monitors together."""

    tensorboard: Any = option({}, "The section tensorboard.")
    comet: Any = option({}, "The section comet.")
    wandb: Any = option({}, "The section wandb.")
    csv_monitor: Any = option({}, "The section csv_monitor.")

    def model_post_init(self, _: Any) -> None:
        """Sections given as dicts become models."""
        models = {
            "tensorboard": "TensorBoard",
            "comet": "Comet",
            "wandb": "Wandb",
            "csv_monitor": "CSV",
        }
        for name, model in models.items():
            if isinstance(given := getattr(self, name), Mapping):
                vars(self)[name] = model_named(f"{model}Config")(**given)

    @property
    def enabled(self) -> bool:
        """Whether one of them is on."""
        return any(m.enabled for m in (self.tensorboard, self.comet, self.wandb, self.csv_monitor))


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """The monitors' sections of a whole config."""
    return DeepSpeedMonitorConfig(
        **{k: param_dict.get(k) or {} for k in DeepSpeedMonitorConfig.model_fields}
    )


def get_timers_config(param_dict: Mapping[str, Any]) -> DeepSpeedThroughputTimerConfig:
    """``timers.throughput`` of a whole config."""
    return DeepSpeedThroughputTimerConfig(**(param_dict.get("timers") or {}).get("throughput", {}))


class _Values:
    """The values of one section of a whole config, `defaults` where it says nothing."""

    section: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]]

    def __init__(self, param_dict: Mapping[str, Any] | None = None) -> None:
        given = (param_dict or {}).get(self.section) or {}
        vars(self).update(
            {
                **self.defaults,
                **{k: v for k, v in given.items() if k in self.defaults and v != "auto"},
            }
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


class DeepSpeedActivationCheckpointingConfig(_Values):
    """The section ``activation_checkpointing``."""

    section = "activation_checkpointing"
    defaults: ClassVar[Mapping[str, Any]] = {
        "partition_activations": False,
        "contiguous_memory_optimization": False,
        "cpu_checkpointing": False,
        "number_checkpoints": None,
        "synchronize_checkpoint_boundary": False,
        "profile": False,
    }


class DeepSpeedFlopsProfilerConfig(_Values):
    """The section ``flops_profiler``."""

    section = "flops_profiler"
    defaults: ClassVar[Mapping[str, Any]] = {
        "enabled": False,
        "recompute_fwd_factor": 0.0,
        "profile_step": 1,
        "module_depth": -1,
        "top_modules": 1,
        "detailed": True,
        "output_file": None,
    }


class DeepSpeedAutotuningConfig(_Values):
    """The section ``autotuning``."""

    section = "autotuning"
    defaults: ClassVar[Mapping[str, Any]] = {
        "enabled": False,
        "fast": True,
        "results_dir": "autotuning_results",
        "exps_dir": "autotuning_exps",
        "overwrite": True,
        "metric": "throughput",
        "metric_path": None,
        "arg_mappings": None,
        "model_info": None,
        "model_info_path": None,
        "mp_size": 1,
        "start_profile_step": 3,
        "end_profile_step": 5,
        "tuner_type": "gridsearch",
        "tuner_early_stopping": 5,
        "tuner_num_trials": 50,
        "max_train_batch_size": None,
        "min_train_batch_size": 1,
        "max_train_micro_batch_size_per_gpu": 1024,
        "min_train_micro_batch_size_per_gpu": 1,
        "num_tuning_micro_batch_sizes": 3,
    }


class DeepSpeedCommsConfig:
    """Whether collectives are logged, and how."""

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        self.comms_logger_enabled = bool(ds_config.get("comms_logger"))
        if self.comms_logger_enabled:
            self.comms_logger = model_named("CommsLoggerConfig")(**ds_config["comms_logger"])


AIO_DEFAULT_DICT: Mapping[str, Any] = {
    "block_size": 1048576,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
    "use_gds": False,
}


def get_aio_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``aio`` of a whole config."""
    given = param_dict.get("aio") or {}
    threads = {"intra_op_parallelism": given["thread_count"]} if "thread_count" in given else {}
    return {
        **AIO_DEFAULT_DICT,
        **threads,
        **{k: v for k, v in given.items() if k in AIO_DEFAULT_DICT},
    }
