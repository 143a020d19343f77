"""Distributed training whose every feature is a pip package. ``import ds_core`` loads no torch (PEP 562)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core._version import __version__
from ds_core.lazy import names_on_first_use

if TYPE_CHECKING:
    from ds_core.accelerator import get_accelerator, set_accelerator
    from ds_core.assemble import initialize
    from ds_core.comm import init_distributed
    from ds_core.compose import compose
    from ds_core.config import Section
    from ds_core.data import DistributedLoader, RepeatingLoader
    from ds_core.engine import Engine
    from ds_core.hookspecs import hookimpl
    from ds_core.partition import Partitioner
    from ds_core.precision import (
        get_default_autocast_lower_precision_modules,
        init_autocast_params,
        is_autocast_initialized,
    )
    from ds_core.process import reset
    from ds_core.replicated import Replicated
    from ds_core.runner import Runner, Sequential


__all__ = [
    "__version__",
    "DistributedLoader",
    "Engine",
    "Partitioner",
    "RepeatingLoader",
    "Replicated",
    "Runner",
    "Section",
    "Sequential",
    "compose",
    "get_accelerator",
    "get_default_autocast_lower_precision_modules",
    "hookimpl",
    "init_autocast_params",
    "init_distributed",
    "initialize",
    "is_autocast_initialized",
    "reset",
    "set_accelerator",
]

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "accelerator": "get_accelerator set_accelerator",
        "assemble": "initialize",
        "comm": "init_distributed",
        "compose": "compose",
        "config": "Section",
        "data": "DistributedLoader RepeatingLoader",
        "engine": "Engine",
        "hookspecs": "hookimpl hookspecs",
        "partition": "Partitioner",
        "precision": "get_default_autocast_lower_precision_modules init_autocast_params is_autocast_initialized",
        "process": "reset",
        "replicated": "Replicated",
        "runner": "Runner Sequential",
    },
)
