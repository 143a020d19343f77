"""Checkpoints: their tools and what is left of their file names."""

from __future__ import annotations

from collections.abc import Mapping

from ds_deepspeed_compat.names.entry import Rows, differs, missing

_FILES = missing("a checkpoint is a manifest and safetensors files (docs/checkpoint-format.md); ds_checkpoint reads it")
_FP32 = differs("ds_checkpoint", "reads checkpoints of ds_core; writes safetensors, never a pickle")
_UNIVERSAL = missing("every checkpoint loads at any layout; `dscore import` reads DeepSpeed's")

NAMES: Mapping[str, Rows] = {
    "deepspeed.utils.zero_to_fp32": {
        "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint "
        "convert_zero_checkpoint_to_fp32_state_dict": _FP32,
        "get_model_state_file get_optim_files get_model_state_files parse_model_states parse_optim_states": _FILES,
    },
    "deepspeed.checkpoint.utils": {
        "clone_tensors_for_torch_save": "ds_checkpoint",
        "get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank get_layer_ckpt_name_for_rank": _FILES,
    },
    "deepspeed.checkpoint": {
        "DeepSpeedCheckpoint ZeROCheckpoint get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank "
        "get_layer_ckpt_name_for_rank reshape_meg_2d_parallel model_3d_desc get_model_3d_descriptor": _FILES,
        "enable_universal_checkpoint SubparamShape": _UNIVERSAL,
    },
    "deepspeed.checkpoint.deepspeed_checkpoint": {"DeepSpeedCheckpoint": _FILES},
    "deepspeed.checkpoint.universal_checkpoint": {"enable_universal_checkpoint SubparamShape": _UNIVERSAL},
    "deepspeed.checkpoint.ds_to_universal": {"main": _UNIVERSAL},
    "deepspeed.runtime.checkpoint_engine.checkpoint_engine": {"CheckpointEngine": missing("the hook ds_checkpointer")},
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine": {
        "TorchCheckpointEngine": missing("the hook ds_checkpointer"),
    },
    "deepspeed.runtime.state_dict_factory": {"SDLoaderFactory": missing("`dscore import` reads such files")},
}
