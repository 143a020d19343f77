"""Pipeline parallelism for ds_core. Names load on first use, so that importing the package brings in no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_pipeline.module import LayerSpec, PipelineModule, TiedLayerSpec
    from ds_pipeline.topology import (
        PipeDataParallelTopology,
        PipelineParallelGrid,
        PipeModelDataParallelTopology,
        ProcessTopology,
    )

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "PipelineParallelGrid",
    "ProcessTopology",
    "TiedLayerSpec",
]

_HOME = {"LayerSpec": "module", "PipelineModule": "module", "TiedLayerSpec": "module"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'topology')}"), name)
    globals()[name] = value
    return value
