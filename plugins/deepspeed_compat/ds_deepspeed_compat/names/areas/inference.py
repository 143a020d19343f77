"""Inference, compression, tensor and sequence parallelism."""

from __future__ import annotations

from collections.abc import Mapping

from ds_deepspeed_compat.names.areas.top import INFERENCE_CONFIG, INJECTION, LEGACY_TENSOR_PARALLEL
from ds_deepspeed_compat.names.entry import Rows, differs, missing

_INJECTION = missing(INJECTION)
_POLICY = differs(
    "ds_inference.layer_policies",
    "a value of injection_policy; the family says what is in its layers",
)
_RAGGED = differs(
    "ds_deepspeed_compat.configs.ragged_config", "checked; the engine that serves is `dscore serve`"
)
_SERVING = missing(
    "`dscore serve` serves many requests at a time, and ds_inference.serve from Python"
)
_TENSOR = missing(
    "set tensor_parallel.autotp_size and partition_config in the config: initialize divides the "
    "layers"
)
_SIZES = "made with its sizes, as nn.Linear is; initialize divides it"
_ROW = differs("ds_tensor_parallel:RowParallelLinear", _SIZES)
_COLUMN = differs("ds_tensor_parallel:ColumnParallelLinear", _SIZES)
_RULES = differs(
    "ds_tensor_parallel.planning.autotp_config",
    "a value of tensor_parallel.partition_config, or the config of tp_model_init",
)
_PRESETS = differs(
    "ds_tensor_parallel.planning.autotp_config",
    "bloom, llama, qwen2; for others an error: set tensor_parallel.preset_model",
)
_NUMBERS = differs(
    "ds_inference.weights.optimized_linear", "whole numbers of 8 or 4 bits, on any device"
)
_LINEAR_INIT = differs(
    "ds_inference.weights.optimized_linear",
    "layers are changed when the block ends, weights loaded by then",
)
_COMPRESSION = differs("ds_compression", "layers keep their classes and names")
_CLEAN = differs("ds_compression.deepspeed_names", "layers keep their classes and names")

NAMES: Mapping[str, Rows] = {
    "deepspeed.inference": {
        "InferenceEngine": "ds_inference",
        "DeepSpeedInferenceConfig": INFERENCE_CONFIG,
        "HFBertLayerPolicy": _POLICY,
    },
    "deepspeed.inference deepspeed.inference.v2 deepspeed.inference.v2.config_v2": {
        "RaggedInferenceEngineConfig DeepSpeedTPConfig": _RAGGED,
    },
    "deepspeed.inference.v2.config_v2": {"QuantizationConfig": _RAGGED},
    "deepspeed.inference.v2.ragged deepspeed.inference.v2.ragged.manager_configs": {
        "DSStateManagerConfig MemoryConfig AllocationMode": _RAGGED,
    },
    "deepspeed.inference.v2.engine_v2 deepspeed.inference.v2": {"InferenceEngineV2": _SERVING},
    "deepspeed.inference.v2.engine_factory deepspeed.inference.v2 deepspeed.inference": {
        "build_hf_engine build_engine_from_ds_checkpoint": _SERVING
    },
    "deepspeed.inference.engine": {"InferenceEngine": "ds_inference"},
    "deepspeed.inference.config": {
        "DeepSpeedInferenceConfig": INFERENCE_CONFIG,
        "DeepSpeedTPConfig DeepSpeedMoEConfig QuantizationConfig WeightQuantConfig "
        "ActivationQuantConfig "
        "QKVQuantConfig BaseQuantConfig InferenceCheckpointConfig MoETypeEnum "
        "QuantTypeEnum": "ds_inference.config",
        "DtypeEnum": "ds_deepspeed_compat.utils.enums",
    },
    "deepspeed.module_inject": {
        "replace_transformer_layer revert_transformer_layer ReplaceWithTensorSlicing "
        "GroupQuantizer generic_injection "
        "DSPolicy Normalize EmbeddingLayer": _INJECTION,
        "HFBertLayerPolicy": _POLICY,
        "LinearAllreduce": _ROW,
        "LinearLayer": _COLUMN,
        "set_autotp_mode": LEGACY_TENSOR_PARALLEL,
        "AutoTPConfig": _RULES,
        "AutoTPPresets": _PRESETS,
        "TPLayerSpec PartitionType merge_autotp_configs": "ds_tensor_parallel.planning.autotp_config",
    },
    "deepspeed.module_inject.layers": {
        "LinearAllreduce": _ROW,
        "LinearLayer": _COLUMN,
        "set_autotp_mode": LEGACY_TENSOR_PARALLEL,
        "GatherReplacedLayerParams": "ds_tensor_parallel.deepspeed_names",
    },
    "deepspeed.module_inject.auto_tp": {"AutoTP": _TENSOR},
    "deepspeed.module_inject.autotp_config": {
        "AutoTPConfig": _RULES,
        "AutoTPPresets": _PRESETS,
        "TPLayerSpec PartitionType merge_autotp_configs": "ds_tensor_parallel.planning.autotp_config",
    },
    "deepspeed.module_inject.replace_policy deepspeed.module_inject.containers": {
        "HFBertLayerPolicy HFGPT2LayerPolicy BLOOMLayerPolicy HFGPTNEOLayerPolicy "
        "GPTNEOXLayerPolicy HFOPTLayerPolicy "
        "HFDistilBertLayerPolicy LLAMALayerPolicy": _POLICY,
        "HFGPTJLayerPolicy MegatronLayerPolicy HFCLIPLayerPolicy UNetPolicy VAEPolicy "
        "LLAMA2LayerPolicy "
        "InternLMLayerPolicy": _INJECTION,
    },
    "deepspeed.module_inject.replace_policy": {"replace_policies": _POLICY},
    "deepspeed.runtime.tensor_parallel": {
        "TPConfig TPTrainingConfig get_tensor_parallel_config": _TENSOR
    },
    "deepspeed.runtime.tensor_parallel.config": {"TPConfig TPTrainingConfig": _TENSOR},
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter": "ds_sequence_parallel.deepspeed_names",
        "TiledMLP TiledFusedLogitsLoss": "ds_sequence_parallel",
        "SequenceTiledCompute "
        "sequence_tiled_compute": "ds_sequence_parallel.tiles.sequence_tiled_compute",
    },
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": {
        "initialize_sequence_parallel": differs(
            "ds_sequence_parallel.deepspeed_names:SequenceUnit",
            "returns the mpu for initialize, which has the groups",
        ),
        **{
            f"get_sequence_parallel_{what}": differs(
                f"ds_deepspeed_compat.utils.groups:_get_sequence_parallel_{what}",
                "answered from the mesh of the latest live engine; before initialize an error",
            )
            for what in ("group", "world_size", "rank")
        },
    },
    "deepspeed.sequence.layer": {
        "DistributedAttention single_all_to_all "
        "_SeqAllToAll": "ds_sequence_parallel.deepspeed_names",
    },
    "deepspeed.sequence.fpdt_layer": {
        "FPDT_Attention FPDT_FFN FPDT_LogitsLoss FPDT_InputConstruct": "ds_sequence_parallel.attention.fpdt"
    },
    "deepspeed.sequence.cross_entropy": {
        "vocab_sequence_parallel_cross_entropy": "ds_sequence_parallel.deepspeed_names"
    },
    "deepspeed.compile.passes.sp_compile": {
        "prepare_autosp_inputs": differs(
            "ds_sequence_parallel.deepspeed_names", "ZeRO 0 to 3; pooling and masks too"
        )
    },
    "deepspeed.compression": {
        "init_compression": _COMPRESSION,
        "redundancy_clean": _CLEAN,
        "student_initialization": "ds_compression",
    },
    "deepspeed.compression.compress": {
        "init_compression": _COMPRESSION,
        "redundancy_clean": _CLEAN,
        "student_initialization": "ds_compression",
    },
    "deepspeed.compression.helper": {
        "recursive_getattr recursive_setattr convert_conv1d_to_linear module_replacement": (
            "ds_deepspeed_compat.utils.module_paths"
        ),
    },
    "deepspeed.linear": {
        "OptimizedLinear LoRAConfig init_lora": "ds_inference.weights.optimized_linear",
        "QuantizationConfig": _NUMBERS,
        "Init": _LINEAR_INIT,
    },
    "deepspeed.linear.config": {
        "LoRAConfig": "ds_inference.weights.optimized_linear",
        "QuantizationConfig": _NUMBERS,
    },
    "deepspeed.linear.context_manager": {
        "init_lora": "ds_inference.weights.optimized_linear",
        "Init": _LINEAR_INIT,
    },
    "deepspeed.linear.optimized_linear": {
        "OptimizedLinear LoRAOptimizedLinear": "ds_inference.weights.optimized_linear"
    },
    "deepspeed.linear.quantization": {
        "QuantizedLinear": "ds_inference.weights.optimized_linear",
        "QuantizedParameter": missing("numbers and scales are buffers of QuantizedLinear"),
    },
    "deepspeed.model_implementations": {"DeepSpeedTransformerInference": _INJECTION},
}
