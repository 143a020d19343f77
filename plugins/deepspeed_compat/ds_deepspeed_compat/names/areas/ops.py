"""``deepspeed.ops``: kernels, how they are built, and the transformer layer."""

from __future__ import annotations

from collections.abc import Mapping

from ds_deepspeed_compat.names.entry import Rows, differs, missing

_BUILDER = differs(
    "ds_deepspeed_compat.services.op_builder",
    "`dscore ops build` builds; load() gives the optimizer's kernel",
)
_SPARSE = missing(
    "the section sparse_attention serves transformers models, SparseSelfAttention others"
)
_GDS = missing("files are read into host memory; use `AsyncIOBuilder`")

NAMES: Mapping[str, Rows] = {
    "deepspeed.ops": {
        "__compatible_ops__": "ds_deepspeed_compat.services.op_builder:compatible_ops",
        "DeepSpeedTransformerLayer DeepSpeedTransformerConfig": "ds_ops_cuda.transformer",
    },
    "deepspeed.ops.transformer deepspeed.ops.transformer.transformer": {
        "DeepSpeedTransformerLayer DeepSpeedTransformerConfig": "ds_ops_cuda.transformer",
    },
    "deepspeed.ops.transformer.inference": {
        "DeepSpeedTransformerInference DeepSpeedInferenceConfig DeepSpeedMoEInference": missing(
            "init_inference with replace_with_kernel_inject runs the whole model as one program of "
            "kernels"
        ),
    },
    "deepspeed.ops.op_builder deepspeed.ops.op_builder.all_ops": {
        "ALL_OPS": "ds_deepspeed_compat.services.op_builder",
    },
    "deepspeed.ops.op_builder deepspeed.ops.op_builder.builder": {"OpBuilder": _BUILDER},
    "deepspeed.ops.op_builder": {
        "CPUAdamBuilder FusedAdamBuilder CPUAdagradBuilder CPULionBuilder FusedLionBuilder "
        "FusedLambBuilder": _BUILDER,
        "AsyncIOBuilder": "ds_nvme.handle",
        "GDSBuilder": _GDS,
        "SparseAttnBuilder": missing("ds_sparse_attention needs no separate operation"),
        "QuantizerBuilder TransformerBuilder InferenceBuilder StochasticTransformerBuilder "
        "RandomLTDBuilder "
        "EvoformerAttnBuilder FPQuantizerBuilder UtilsBuilder CCLCommBuilder "
        "ShareMemCommBuilder": missing(
            "kernels are those of `dscore ops list`; none is built by name"
        ),
    },
    "deepspeed.ops.aio": {"AsyncIOBuilder": "ds_nvme.handle"},
    "deepspeed.ops.gds": {"GDSBuilder": _GDS},
    "deepspeed.ops.sparse_attention": {
        "SparseSelfAttention SparsityConfig DenseSparsityConfig FixedSparsityConfig "
        "VariableSparsityConfig "
        "BigBirdSparsityConfig BSLongformerSparsityConfig": "ds_sparse_attention.deepspeed_names",
        "BertSparseSelfAttention SparseAttentionUtils LocalSlidingWindowSparsityConfig MatMul "
        "Softmax": _SPARSE,
    },
    "deepspeed.ops.random_ltd": {
        "GatherTokens ScatterTokens": missing(
            "tokens are gathered by torch; use convert_to_random_ltd"
        )
    },
    "deepspeed.ops.fp_quantizer": {
        "FP_Quantize Quantizer": missing("use section weight_quantization")
    },
    "deepspeed.ops.deepspeed4science": {
        "DS4Sci_EvoformerAttention": missing("use torch's scaled_dot_product_attention with a bias")
    },
}
