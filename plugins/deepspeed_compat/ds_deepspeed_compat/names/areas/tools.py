"""Launcher, report, profiling, monitors, elasticity, autotuning."""

from __future__ import annotations

from collections.abc import Mapping

from ds_deepspeed_compat.names.entry import Rows, differs, missing

_AUTOTUNING = missing(
    "no class tunes: `dscore tune` and `dscore run --autotuning` do, with dscore-autotuning"
)
_MONITORS = "ds_deepspeed_compat.services.monitors"

NAMES: Mapping[str, Rows] = {
    "deepspeed.launcher.runner": {
        "main parse_args fetch_hostfile parse_resource_filter parse_inclusion_exclusion "
        "parse_node_config "
        "parse_node_config_list apply_num_nodes_and_gpus "
        "encode_world_info": "ds_deepspeed_compat.launcher",
        "DEEPSPEED_ENVIRONMENT_NAME": "ds_deepspeed_compat.constants",
    },
    "deepspeed.launcher.multinode_runner": {
        "MultiNodeRunner PDSHRunner OpenMPIRunner MPICHRunner IMPIRunner SlurmRunner "
        "MVAPICHRunner": missing(
            "each launcher is a package, and `dscore run --launcher NAME` runs it; the hook "
            "ds_launchers adds others"
        ),
    },
    "deepspeed.nvme": {"ds_io_main": "ds_deepspeed_compat.io_command:main"},
    "deepspeed.io": {
        "PyFileWriter MockFileWriter": "ds_deepspeed_compat.services.file_writers",
        "FastFileWriter FastFileWriterConfig": differs(
            "ds_deepspeed_compat.services.file_writers",
            "writes through the system's cache, then waits for the disk",
        ),
    },
    "deepspeed.io.base_file_writer": {
        "BaseFileWriter": "ds_deepspeed_compat.services.file_writers"
    },
    "deepspeed.env_report": {"main cli_main": "ds_deepspeed_compat.report"},
    "deepspeed.profiling.flops_profiler deepspeed.profiling.flops_profiler.profiler": {
        "FlopsProfiler get_model_profile number_to_string flops_to_string macs_to_string "
        "params_to_string "
        "duration_to_string bytes_to_string": "ds_flops_profiler",
    },
    "deepspeed.profiling.config": {
        "DeepSpeedFlopsProfilerConfig": "ds_deepspeed_compat.configs.section_defaults"
    },
    "deepspeed.comm.config": {
        "CommsLoggerConfig": "ds_deepspeed_compat.configs.config_models",
        "DeepSpeedCommsConfig": "ds_deepspeed_compat.configs.section_defaults",
    },
    "deepspeed.compile.config": {"CompileConfig": "ds_deepspeed_compat.configs.config_models"},
    "deepspeed.utils.config": {
        "DeepSpeedThroughputTimerConfig get_timers_config": "ds_deepspeed_compat.configs.section_defaults",
    },
    "deepspeed.autotuning.config": {
        "DeepSpeedAutotuningConfig": "ds_deepspeed_compat.configs.section_defaults"
    },
    "deepspeed.monitor.monitor": {
        "MonitorMaster TensorBoardMonitor csvMonitor WandbMonitor CometMonitor": _MONITORS,
        "Monitor": "ds_core.engine",
    },
    "deepspeed.monitor.config": {
        "TensorBoardConfig WandbConfig CometConfig CSVConfig": "ds_deepspeed_compat.configs.config_models",
        "DeepSpeedMonitorConfig get_monitor_config": "ds_deepspeed_compat.configs.section_defaults",
    },
    "deepspeed.monitor.tensorboard": {"TensorBoardMonitor": _MONITORS},
    "deepspeed.monitor.csv_monitor": {"csvMonitor": _MONITORS},
    "deepspeed.monitor.wandb": {"WandbMonitor": _MONITORS},
    "deepspeed.monitor.comet": {"CometMonitor": _MONITORS},
    "deepspeed.elasticity": {
        "compute_elastic_config elasticity_enabled "
        "ensure_immutable_elastic_config": "ds_elasticity",
        "DSElasticAgent": missing("`dscore run --nnodes MIN:MAX` is the agent of an elastic run"),
    },
    "deepspeed.elasticity.elasticity": {
        "compute_elastic_config elasticity_enabled "
        "ensure_immutable_elastic_config": "ds_elasticity",
    },
    "deepspeed.elasticity deepspeed.elasticity.elasticity deepspeed.elasticity.config": {
        "ElasticityError ElasticityConfigError ElasticityIncompatibleWorldSize": "ds_elasticity",
    },
    "deepspeed.autotuning": {"Autotuner": _AUTOTUNING},
    "deepspeed.autotuning.autotuner": {"Autotuner": _AUTOTUNING},
    "deepspeed.autotuning.scheduler": {
        "ResourceManager Node Reservation run_experiment": _AUTOTUNING
    },
    "deepspeed.elasticity.elastic_agent": {
        "DSElasticAgent": missing("`dscore run --nnodes MIN:MAX` is the agent of an elastic run"),
    },
    "deepspeed.nebula": {},
}
