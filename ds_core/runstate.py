"""What a resumed run needs besides tensors: counters, loss scaler, hyperparameters, schedule and data position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ds_core.errors import CheckpointError

if TYPE_CHECKING:
    from ds_core.running import RunningEngine

__all__ = ["load_run_state", "run_state"]

COUNTERS = ("micro_steps", "global_steps", "global_samples", "skipped_steps")


def run_state(engine: RunningEngine) -> dict[str, Any]:
    """A fresh dict of plain values (and whatever the schedule's own state holds)."""
    groups = engine.optimizer.param_groups if engine.optimizer is not None else []
    loader = engine.training_dataloader
    return {
        **{counter: getattr(engine, counter) for counter in COUNTERS},
        # A checkpoint holds no half-summed gradients, so a window that is not complete will run again.
        "micro_steps": engine.micro_steps - engine.partitioner.window.micros,
        "scaler": engine.scaler.state_dict() if engine.scaler is not None else None,
        "optimizer_groups": [{k: v for k, v in g.items() if k != "params"} for g in groups],
        "lr_scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
        "data": loader.state_dict() if loader is not None else None,
    }


def load_run_state(engine: RunningEngine, state: Mapping[str, Any], *, optimizer: bool, scheduler: bool) -> None:
    """Put `state` back; raises CheckpointError, with nothing changed, when its optimizer groups do not fit."""
    groups = engine.optimizer.param_groups if engine.optimizer is not None else []
    saved = state["optimizer_groups"]
    if optimizer and groups and len(saved) != len(groups):
        raise CheckpointError(
            f"the checkpoint has {len(saved)} optimizer groups, this run {len(groups)}; "
            "use the same groups, or load_optimizer_states=False"
        )
    for counter in COUNTERS:
        setattr(engine, counter, int(state[counter]))
    if optimizer:
        if engine.scaler is not None and state["scaler"] is not None:
            engine.scaler.load_state_dict(state["scaler"])
        for group, values in zip(groups, saved, strict=False):
            group.update(values)
    if scheduler and engine.lr_scheduler is not None and state["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    if engine.training_dataloader is not None and state["data"] is not None:
        engine.training_dataloader.load_state_dict(state["data"])
