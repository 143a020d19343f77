"""Pipeline parallelism for ds_core.

Names load on first use, so that importing the package brings in no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core import names_on_first_use

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

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "module": "LayerSpec PipelineModule TiedLayerSpec",
        "topology": "PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid "
        "ProcessTopology",
    },
)
