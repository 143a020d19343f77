"""Distributed training whose every feature is a pip package. ``import ds_core`` loads no torch (PEP 562)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ds_core._version import __version__

if TYPE_CHECKING:
    from ds_core.accelerator import get_accelerator, set_accelerator
    from ds_core.assemble import add_config_arguments, initialize
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

_WHERE = {
    "DistributedLoader": "data",
    "Engine": "engine",
    "Partitioner": "partition",
    "RepeatingLoader": "data",
    "Replicated": "replicated",
    "Runner": "runner",
    "Section": "config",
    "Sequential": "runner",
    "add_config_arguments": "assemble",
    "compose": "compose",
    "get_accelerator": "accelerator",
    "get_default_autocast_lower_precision_modules": "precision",
    "hookimpl": "hookspecs",
    "init_autocast_params": "precision",
    "init_distributed": "comm",
    "initialize": "assemble",
    "is_autocast_initialized": "precision",
    "reset": "process",
    "set_accelerator": "accelerator",
}

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
    "add_config_arguments",
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


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ds_core' has no attribute {name!r}")
    module = importlib.import_module(f"ds_core.{_WHERE[name]}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
