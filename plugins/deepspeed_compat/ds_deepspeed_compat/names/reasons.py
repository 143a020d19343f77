"""Why names of DeepSpeed are not there, where the table has no row of their own (standard library
only).
"""

from __future__ import annotations

from collections.abc import Mapping

_SERVING = (
    "`dscore serve` and ds_inference serve many requests at a time; the parts of their "
    "engine have "
    "other names"
)
_KERNELS = "kernels are those of `dscore ops list`; none is built or called by DeepSpeed's names"
_EP = "the section expert_parallel (dscore-moe) plans and moves experts by itself"
_COMPILED = (
    "compilation and its passes are dscore-compile's: engine.compile(schedule=...) and "
    "register_compile_pass"
)
_NVME = "dscore-nvme moves tensors to disk by itself, and `dscore bench nvme` measures a disk"
_INSIDE = "internal to DeepSpeed's stage: dscore-zero is built otherwise, and its public names are offered"
_SECTION = "a key of the config switches the feature on; there is no object to make"

REASONS: Mapping[str, str] = {
    "deepspeed": "internal to DeepSpeed",
    "deepspeed.accelerator": "accelerators are packages; get_accelerator() gives the one in use",
    "deepspeed.autotuning": "no class tunes: `dscore tune` and `dscore run --autotuning` do, with "
    "dscore-autotuning",
    "deepspeed.checkpoint": "every checkpoint loads at any layout; `dscore checkpoint` imports, "
    "exports and reads",
    "deepspeed.comm": "backends are plugins (the hook ds_collectives); the collectives themselves "
    "are offered",
    "deepspeed.compile": _COMPILED,
    "deepspeed.compression": "the section compression_training and init_compression choose layers "
    "and methods",
    "deepspeed.datastates": "checkpoints are written in the background by dscore-checkpoint "
    "(checkpoint.async_save)",
    "deepspeed.elasticity": "`dscore run --nnodes MIN:MAX` is the agent of an elastic run",
    "deepspeed.env_report": "`ds_report` and `dscore doctor` print the report",
    "deepspeed.inference": _SERVING,
    "deepspeed.inference.quantization": "the section weight_quantization of dscore-inference",
    "deepspeed.io": "PyFileWriter, MockFileWriter and FastFileWriter are what programs use of it",
    "deepspeed.launcher": "`dscore run` starts processes; the launchers are separate packages",
    "deepspeed.linear": "OptimizedLinear, LoRAConfig and Init are what programs use of it",
    "deepspeed.model_implementations": "init_inference with replace_with_kernel_inject knows "
    "families by itself",
    "deepspeed.module_inject": "init_inference and tensor_parallel divide models by themselves",
    "deepspeed.module_inject.auto_ep": _EP,
    "deepspeed.moe": "MoE and TopKGate of dscore-moe hold what these did",
    "deepspeed.moe.ep_": _EP,
    "deepspeed.monitor": "monitors are plugins, and their sections switch them on",
    "deepspeed.nvme": _NVME,
    "deepspeed.ops": _KERNELS,
    "deepspeed.ops.adam.zenflow": "the section zero_optimization.zenflow, which works with any "
    "Adam",
    "deepspeed.ops.sparse_attention": "the section sparse_attention, or SparseSelfAttention",
    "deepspeed.pipe": "PipelineModule, LayerSpec and the topologies are offered",
    "deepspeed.profiling": "FlopsProfiler and get_model_profile tell what these counted",
    "deepspeed.runtime": "internal to DeepSpeed's engine; ds_core's is built otherwise",
    "deepspeed.runtime.activation_checkpointing": "the section activation_checkpointing, and "
    "checkpointing.checkpoint",
    "deepspeed.runtime.checkpoint_engine": "the section checkpoint; the hook ds_checkpointer "
    "replaces what saves",
    "deepspeed.runtime.data_pipeline": "the section data_efficiency (dscore-data-sampling)",
    "deepspeed.runtime.domino": "use section tensor_parallel, on any model",
    "deepspeed.runtime.fp16": "sections fp16 and bf16 of the config",
    "deepspeed.runtime.lr_schedules": "write the schedule into the config",
    "deepspeed.runtime.model_checkpointing": _SECTION,
    "deepspeed.runtime.rollout": "the section hybrid_engine gives an engine generate",
    "deepspeed.runtime.superoffload": _SECTION,
    "deepspeed.runtime.swap_tensor": _NVME,
    "deepspeed.runtime.tensor_parallel": "set tensor_parallel.autotp_size in the config: "
    "initialize divides the layers",
    "deepspeed.runtime.zenflow": _SECTION,
    "deepspeed.runtime.zero": _INSIDE,
    "deepspeed.sequence": "the section sequence_parallel (dscore-sequence-parallel) divides attention "
    "and losses by itself",
    "deepspeed.utils": "a DeepSpeed helper",
    "deepspeed.utils.tensor_fragment": "safe_get_full_fp32_param and its kin of dscore-access",
    "deepspeed.utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint and its kin are "
    "offered",
}
"""The beginning of a module's path -> what there is instead."""


def reason(path: str) -> str:
    """What there is instead of a name of the module `path`: of the longest beginning that fits."""
    return REASONS[max((begin for begin in REASONS if path.startswith(begin)), key=len)]
