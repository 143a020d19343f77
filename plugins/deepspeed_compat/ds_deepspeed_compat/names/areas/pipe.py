"""``deepspeed.pipe`` and the modules of ``deepspeed.runtime.pipe``."""

from __future__ import annotations

from collections.abc import Mapping

from ds_deepspeed_compat.names.entry import Rows

NAMES: Mapping[str, Rows] = {
    "deepspeed.pipe": {"PipelineModule LayerSpec TiedLayerSpec ProcessTopology": "ds_pipeline"},
    "deepspeed.runtime.pipe": {
        "PipelineModule LayerSpec TiedLayerSpec ProcessTopology": "ds_pipeline"
    },
    "deepspeed.runtime.pipe.module": {
        "PipelineModule LayerSpec TiedLayerSpec": "ds_pipeline",
        "PipelineError": "ds_core.errors:UsageError",
    },
    "deepspeed.runtime.pipe.engine": {"PipelineEngine": "ds_deepspeed_compat.engines.engine"},
    "deepspeed.runtime.pipe.topology": {
        "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology "
        "PipelineParallelGrid": "ds_pipeline",
    },
    "deepspeed.runtime.pipe.schedule": {
        "PipeSchedule InferenceSchedule TrainSchedule DataParallelSchedule PipeInstruction "
        "BufferOpInstruction "
        "OptimizerStep ReduceGrads ReduceTiedGrads LoadMicroBatch ForwardPass BackwardPass "
        "SendActivation "
        "RecvActivation SendGrad RecvGrad": "ds_pipeline.schedules.schedule",
    },
}
