"""The kinds of plugins there are templates for."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KINDS", "Kind"]


@dataclass(frozen=True, slots=True)
class Kind:
    """meaning: for the list, one line. hooks: what such a plugin implements. section: whether it owns a config section.

    title: of its part in docs/plugins.md. needs, test_needs: distributions besides ds-core, and for its tests.
    """

    meaning: str
    hooks: tuple[str, ...]
    section: bool
    title: str
    needs: tuple[str, ...] = ()
    test_needs: tuple[str, ...] = ()


OBSERVERS = (
    *("ds_step_begin", "ds_step_end", "ds_request", "ds_phase_begin", "ds_phase_end", "ds_eval_begin", "ds_eval_end"),
    *("ds_checkpoint_saved", "ds_checkpoint_loaded", "ds_exception", "ds_close", "ds_checkpointables"),
)

KINDS: dict[str, Kind] = {
    "config-format": Kind("a format of config files", ("ds_config_formats",), False, "A format of config files"),
    "rendezvous": Kind("how ranks find each other", ("ds_rendezvous",), False, "A rendezvous"),
    "optimizer": Kind("an optimizer, by name", ("ds_optimizers",), False, "An optimizer"),
    "scheduler": Kind("a learning-rate schedule, by name", ("ds_schedulers",), False, "A schedule"),
    "monitor": Kind("where metrics are written", ("ds_monitors",), True, "A monitor"),
    "interceptor": Kind("called around every collective", ("ds_interceptors",), True, "An interceptor"),
    "gradients": Kind("changes the gradients of a step", ("ds_gradients",), True, "Gradients"),
    "observer": Kind(
        "watches a run; may ask it to stop or to save",
        OBSERVERS,
        True,
        "An observer, and asking all ranks to stop or save",
    ),
    "accelerator": Kind("a type of device", ("ds_accelerators",), False, "An accelerator"),
    "transform": Kind("changes the model before training", ("ds_transforms",), True, "A transform"),
    "state-store": Kind(
        "where offloaded states are kept",
        ("ds_state_stores",),
        False,
        "A state store",
        needs=("ds-state-stores",),
    ),
    "runner": Kind("runs the micro-batches of a step", ("ds_runner",), True, "A runner"),
    "loader": Kind("turns a dataset into batches", ("ds_loader",), True, "A loader"),
    "precision": Kind("dtypes, loss scaling, layers", ("ds_precision",), True, "A precision mode"),
    "kernel": Kind("serves a named operation", ("ds_kernels",), False, "A kernel"),
    "collectives": Kind("serves all-reduce and others", ("ds_collectives",), False, "A provider of collectives"),
    "launcher": Kind(
        "starts processes for dscore run",
        ("ds_launchers",),
        False,
        "A launcher",
        needs=("ds-cli",),
    ),
}
"""By the name that ``--kind`` takes; in the order of docs/plugins.md."""
