from ds_pipeline.layers.module import PipelineModule as PipelineModule
from ds_pipeline.layers.specs import LayerSpec as LayerSpec
from ds_pipeline.layers.specs import TiedLayerSpec as TiedLayerSpec
from ds_pipeline.layers.topology import PipeDataParallelTopology as PipeDataParallelTopology
from ds_pipeline.layers.topology import PipelineParallelGrid as PipelineParallelGrid
from ds_pipeline.layers.topology import (
    PipeModelDataParallelTopology as PipeModelDataParallelTopology,
)
from ds_pipeline.layers.topology import ProcessTopology as ProcessTopology
