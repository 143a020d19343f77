"""Every section of the documents, with the distribution that owns it (torch-free, pydantic-free).

This is what lets a config that names a missing plugin be answered with what to install, from names alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["OWNERS", "SWITCHES", "is_off"]

OWNERS: Mapping[str, str] = {
    "zero_optimization": "ds-zero",
    "aio": "ds-offload",
    "activation_checkpointing": "ds-activation-checkpointing",
    "pipeline": "ds-pipeline",
    "expert_parallel": "ds-moe",
    "tensor_parallel": "ds-tensor-parallel",
    "compile": "ds-compile",
    "sparse_attention": "ds-fused-ops",
    "tensorboard": "ds-monitor-tensorboard",
    "wandb": "ds-monitor-wandb",
    "comet": "ds-monitor-comet",
    "csv_monitor": "ds-monitor-csv",
    "flops_profiler": "ds-flops-profiler",
    "autotuning": "ds-autotuning",
    "nebula": "ds-nebula",
    "datastates_ckpt": "ds-datastates",
    "elasticity": "ds-elasticity",
    "data_efficiency": "ds-data-efficiency",
    "curriculum_learning": "ds-data-efficiency",
    "compression_training": "ds-compression",
    "weight_quantization": "ds-compression",
    "hybrid_engine": "ds-inference",
    "inference": "ds-inference",
    "progressive_layer_drop": "ds-compression",
    "eigenvalue": "ds-compression",
}
"""Documented section -> the distribution that serves it, now or later; `ds_core.catalogue` has those that exist."""

SWITCHES: Mapping[str, str] = {"zero_optimization": "stage", "tensor_parallel": "autotp_size", "compile": "deepcompile"}
"""The key that turns a section on, where it is not ``enabled``."""


def is_off(name: str, value: Any) -> bool:
    """Whether a documented section asks for nothing, in so many words.

    Off: null, false, ``{}``, a switch that is false or 0, or nothing but false and null. A switch that is
    *absent* does not count: a misspelt one (``"stgae": 3``) must not train with stage 0 in silence.
    """
    if value is None or value is False or value in ({}, []):
        return True
    if not isinstance(value, dict):
        return False
    switch = value.get(SWITCHES.get(name, "enabled"))
    if switch is not None:
        numeric = name in SWITCHES and name != "compile"
        return (type(switch) is int and switch == 0) if numeric else switch is False
    return all(v is None or v is False for v in value.values())
