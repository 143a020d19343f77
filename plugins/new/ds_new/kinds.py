"""The kinds of plugins there are templates for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of plugin that ``dscore new plugin`` can write."""

    meaning: str
    """One line, for the list."""
    hooks: tuple[str, ...]
    """What such a plugin implements."""
    section: bool
    """Whether it owns a config section."""
    title: str
    """Of its part in `page`."""
    page: str
    """The file in docs/plugins, without its suffix."""
    needs: tuple[str, ...] = ()
    """Distributions besides dscore-train; ours have no bound here."""
    test_needs: tuple[str, ...] = ()
    """The same, for its tests."""


OBSERVERS = (
    *("ds_step_begin", "ds_step_end", "ds_request", "ds_phase_begin", "ds_phase_end"),
    *("ds_checkpoint_saved", "ds_checkpoint_loaded", "ds_open", "ds_close", "ds_checkpointables"),
)

KINDS: dict[str, Kind] = {
    "config-format": Kind(
        "a format of config files",
        ("ds_config_formats",),
        False,
        "A format of config files",
        "config",
    ),
    "rendezvous": Kind(
        "how ranks find each other", ("ds_rendezvous",), False, "A rendezvous", "config"
    ),
    "optimizer": Kind(
        "an optimizer, by name", ("ds_optimizers",), False, "An optimizer", "optimizers"
    ),
    "scheduler": Kind(
        "a learning-rate schedule, by name", ("ds_schedulers",), False, "A schedule", "optimizers"
    ),
    "monitor": Kind(
        "where metrics are written",
        ("ds_monitors",),
        True,
        "A monitor",
        "watching",
        needs=("dscore-monitor-kit",),
    ),
    "interceptor": Kind(
        "called around every collective", ("ds_interceptors",), True, "An interceptor", "devices"
    ),
    "gradients": Kind(
        "changes the gradients of a step", ("ds_gradients",), True, "Gradients", "optimizers"
    ),
    "observer": Kind(
        "watches a run; may ask it to stop or to save",
        OBSERVERS,
        True,
        "An observer, and asking all ranks to stop or save",
        "watching",
    ),
    "accelerator": Kind(
        "a type of device", ("ds_accelerators",), False, "An accelerator", "devices"
    ),
    "metrics": Kind(
        "numbers of a step, for monitors", ("ds_metrics",), True, "Metrics", "watching"
    ),
    "engine-methods": Kind(
        "methods for the engine", ("ds_engine_methods",), True, "Methods for the engine", "training"
    ),
    "mesh-axis": Kind(
        "an axis along which parameters differ",
        ("ds_mesh_axes", "ds_param_axes"),
        True,
        "A mesh axis with parameters that differ on it",
        "sharding",
    ),
    "mesh": Kind(
        "a mesh over groups that the user has",
        ("ds_mesh", "ds_param_axes"),
        False,
        "A mesh over groups that the user has",
        "sharding",
    ),
    "transform": Kind(
        "changes the model before training",
        ("ds_transforms",),
        True,
        "A transform",
        "models",
        needs=("dscore-run-state",),
    ),
    "divided-layers": Kind(
        "divides layers among ranks",
        ("ds_mesh_axes", "ds_param_axes", "ds_transforms"),
        True,
        "Layers that are divided among ranks",
        "models",
        needs=("dscore-comm-autograd", "dscore-run-state"),
        test_needs=("dscore-checkpoint",),
    ),
    "partitioner": Kind(
        "how model states are sharded",
        ("ds_partitioner",),
        True,
        "A partitioner",
        "sharding",
        needs=("dscore-run-state",),
    ),
    "checkpointer": Kind(
        "saves and loads checkpoints",
        ("ds_checkpointer",),
        True,
        "A checkpointer",
        "states",
        needs=("dscore-checkpoint", "dscore-run-state"),
    ),
    "state-store": Kind(
        "where offloaded states are kept",
        ("ds_state_stores",),
        False,
        "A state store",
        "states",
        needs=("dscore-state-stores",),
    ),
    "runner": Kind(
        "runs the micro-batches of a step", ("ds_runner",), True, "A runner", "training"
    ),
    "loader": Kind("turns a dataset into batches", ("ds_loader",), True, "A loader", "training"),
    "precision": Kind(
        "dtypes, loss scaling, layers", ("ds_precision",), True, "A precision mode", "optimizers"
    ),
    "kernel": Kind("serves a named operation", ("ds_kernels",), False, "A kernel", "devices"),
    "collectives": Kind(
        "serves all-reduce and others",
        ("ds_collectives",),
        False,
        "A provider of collectives",
        "devices",
    ),
    "launcher": Kind(
        "starts processes for dscore run",
        ("ds_launchers",),
        False,
        "A launcher",
        "commands",
        needs=("dscore-cli",),
    ),
    "command": Kind(
        "a command of dscore",
        ("ds_commands",),
        False,
        "A command",
        "commands",
        needs=("dscore-cli", "typer>=0.12"),
    ),
    "compile-pass": Kind(
        "changes the graphs of torch.compile",
        ("ds_compile_passes",),
        False,
        "A pass over compiled graphs",
        "models",
        needs=("dscore-compile",),
    ),
    "pipeline-schedule": Kind(
        "the order of work in a pipeline",
        ("ds_pipeline_schedules",),
        False,
        "A pipeline schedule",
        "training",
        needs=("dscore-pipeline",),
    ),
    "check": Kind("rules that span a config's sections", ("ds_check",), True, "A check", "config"),
    "chart": Kind(
        "what dscore plan shows of a config", ("ds_charts",), True, "A chart", "watching"
    ),
    "memory": Kind(
        "how much memory it keeps",
        ("ds_memory",),
        True,
        "What a plugin keeps in memory",
        "sharding",
    ),
}
"""By the name that ``--kind`` takes; in the order of the list."""
