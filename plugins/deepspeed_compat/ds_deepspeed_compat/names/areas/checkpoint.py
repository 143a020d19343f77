"""Checkpoints: their tools and what is left of their file names."""

from __future__ import annotations

from collections.abc import Mapping

from ds_deepspeed_compat.names.entry import Rows, differs, missing

_FILES = missing(
    "a checkpoint is a manifest and safetensors files (docs/checkpoint-format.md); ds_checkpoint "
    "reads it"
)
_FP32 = "ds_checkpoint_deepspeed.zero_to_fp32"
_CONVERTED = differs(
    _FP32, "writes safetensors, never a pickle; a warning says so where safe_serialization=False"
)
_UNIVERSAL = missing(
    "every checkpoint loads at any layout; `dscore checkpoint import` reads DeepSpeed's"
)
_ENGINES = differs(
    "ds_deepspeed_compat.services.checkpoint_engines",
    "for files of a program's own; the hook ds_checkpointer makes the engine's",
)
_READ = "ds_checkpoint_deepspeed"
_NAMES = f"{_READ}.reading.folder"
_FOLDER = differs(
    f"{_READ}.ranks.rank_checkpoint",
    "of DeepSpeed folders, read without running code in them; `dscore checkpoint "
    "export-deepspeed` makes such",
)

NAMES: Mapping[str, Rows] = {
    "deepspeed.utils.zero_to_fp32": {
        "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint main": _FP32,
        "convert_zero_checkpoint_to_fp32_state_dict "
        "convert_zero_checkpoint_to_state_dict": _CONVERTED,
        "get_model_state_file get_optim_files get_model_state_files get_checkpoint_files": differs(
            "ds_checkpoint_deepspeed.ranks.state_files",
            "of a ds_core checkpoint: two small files that are made to be read",
        ),
        "parse_model_states parse_optim_states": _FILES,
    },
    "deepspeed.checkpoint.utils": {
        "clone_tensors_for_torch_save": "ds_checkpoint",
        "get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank "
        "get_layer_ckpt_name_for_rank": _NAMES,
    },
    "deepspeed.checkpoint": {
        "get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank "
        "get_layer_ckpt_name_for_rank": _NAMES,
        "DeepSpeedCheckpoint ZeROCheckpoint": _FOLDER,
        "reshape_meg_2d_parallel model_3d_desc get_model_3d_descriptor": f"{_READ}.ranks.rank_maps",
        "merge_state": f"{_READ}.ranks.rank_states",
        "enable_universal_checkpoint SubparamShape": _UNIVERSAL,
    },
    "deepspeed.checkpoint.deepspeed_checkpoint": {"DeepSpeedCheckpoint": _FOLDER},
    "deepspeed.checkpoint.zero_checkpoint": {"ZeROCheckpoint": _FOLDER},
    "deepspeed.checkpoint.reshape_3d_utils": {
        "flatten_dp_dimension get_model_3d_descriptor get_model_3d_descriptor_from_metadata "
        "model_3d_desc "
        "unflatten_dp_dimension": f"{_READ}.ranks.rank_maps",
    },
    "deepspeed.checkpoint.reshape_meg_2d": {
        "get_mpu_ranks meg_2d_parallel_map reshape_meg_2d_parallel": f"{_READ}.ranks.rank_maps",
        "reshape": missing("it only printed; get_mpu_ranks gives the groups"),
    },
    "deepspeed.checkpoint.reshape_utils": {
        "basic_folder_validation get_files get_files_with_prefix get_zero_files merge_state "
        "merge_state_dict "
        "merge_state_list partition_data sort_zero_files validate_files": f"{_READ}.ranks.rank_states",
    },
    "deepspeed.checkpoint.universal_checkpoint": {
        "enable_universal_checkpoint SubparamShape": _UNIVERSAL
    },
    "deepspeed.checkpoint.ds_to_universal": {
        "main": differs(
            "ds_checkpoint_deepspeed.ds_to_universal",
            "takes the command line; converts ds_core's too",
        )
    },
    "deepspeed.runtime.checkpoint_engine deepspeed.runtime.checkpoint_engine.checkpoint_engine": {
        "CheckpointEngine CheckpointCommitInfo": _ENGINES,
    },
    "deepspeed.runtime.checkpoint_engine "
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine": {
        "TorchCheckpointEngine": differs(
            "ds_deepspeed_compat.services.checkpoint_engines",
            "load takes tensors and plain values, to the host unless told",
        ),
    },
    "deepspeed.runtime.state_dict_factory": {
        "SDLoaderFactory SDLoaderBase MegatronSDLoader": differs(
            "ds_checkpoint_deepspeed.ranks.state_dict_loaders",
            "read without running code in the files; quantize=True is an error: "
            "init_inference(quant=...)",
        )
    },
}
