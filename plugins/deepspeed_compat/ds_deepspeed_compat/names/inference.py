"""Inference, tensor parallelism, sequence parallelism, compression: what is not built yet."""

from __future__ import annotations

from collections.abc import Mapping

from ds_deepspeed_compat.names.entry import Rows, missing
from ds_deepspeed_compat.names.top import INFERENCE, TENSOR_PARALLEL

_INFERENCE = missing(INFERENCE)
_TENSOR = missing(TENSOR_PARALLEL)
_SEQUENCE = missing("sequence parallelism is not built")
_COMPRESSION = missing("compression is not built")

NAMES: Mapping[str, Rows] = {
    "deepspeed.inference": {"InferenceEngine DeepSpeedInferenceConfig HFBertLayerPolicy": _INFERENCE},
    "deepspeed.inference.engine": {"InferenceEngine": _INFERENCE},
    "deepspeed.inference.config": {
        "DeepSpeedInferenceConfig DeepSpeedTPConfig DeepSpeedMoEConfig QuantizationConfig WeightQuantConfig "
        "ActivationQuantConfig QKVQuantConfig BaseQuantConfig InferenceCheckpointConfig MoETypeEnum QuantTypeEnum": (
            _INFERENCE
        ),
        "DtypeEnum": "ds_deepspeed_compat.enums",
    },
    "deepspeed.module_inject": {
        "replace_transformer_layer revert_transformer_layer ReplaceWithTensorSlicing GroupQuantizer generic_injection "
        "HFBertLayerPolicy DSPolicy Normalize EmbeddingLayer": _INFERENCE,
        "LinearAllreduce LinearLayer set_autotp_mode AutoTPConfig AutoTPPresets TPLayerSpec PartitionType": _TENSOR,
    },
    "deepspeed.module_inject.layers": {"LinearAllreduce LinearLayer set_autotp_mode": _TENSOR},
    "deepspeed.module_inject.auto_tp": {"AutoTP": _TENSOR},
    "deepspeed.module_inject.autotp_config": {
        "AutoTPConfig AutoTPPresets TPLayerSpec PartitionType merge_autotp_configs": _TENSOR,
    },
    "deepspeed.module_inject.replace_policy": {"HFBertLayerPolicy": _INFERENCE},
    "deepspeed.runtime.tensor_parallel": {"TPConfig TPTrainingConfig get_tensor_parallel_config": _TENSOR},
    "deepspeed.runtime.tensor_parallel.config": {"TPConfig TPTrainingConfig": _TENSOR},
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter TiledMLP TiledFusedLogitsLoss SequenceTiledCompute": _SEQUENCE,
    },
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": {
        "initialize_sequence_parallel get_sequence_parallel_group get_sequence_parallel_world_size "
        "get_sequence_parallel_rank": _SEQUENCE,
    },
    "deepspeed.sequence.layer": {"DistributedAttention": _SEQUENCE},
    "deepspeed.sequence.fpdt_layer": {"FPDT_Attention FPDT_FFN FPDT_LogitsLoss FPDT_InputConstruct": _SEQUENCE},
    "deepspeed.sequence.cross_entropy": {"vocab_sequence_parallel_cross_entropy": _SEQUENCE},
    "deepspeed.compile.passes.sp_compile": {"prepare_autosp_inputs": _SEQUENCE},
    "deepspeed.compression": {"init_compression redundancy_clean student_initialization": _COMPRESSION},
    "deepspeed.compression.compress": {"init_compression redundancy_clean student_initialization": _COMPRESSION},
    "deepspeed.linear": {
        "OptimizedLinear LoRAConfig QuantizationConfig Init": missing("quantised linears are not built")
    },
    "deepspeed.model_implementations": {"DeepSpeedTransformerInference": _INFERENCE},
}
