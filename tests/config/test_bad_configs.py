"""Every bad config is refused, and the error names the full path of the key that is wrong."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from refused_configs import nest, refused

from ds_core.catalogue import documented
from ds_core.config import build_config, read_config

Case = tuple[Any, str]

POSITIVE = [
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "data_parallel_size",
    "vocabulary_size",
    "fp16.loss_scale_window",
    "fp16.hysteresis",
]
BOOLEANS = [
    "managed_gradient_accumulation",
    "dataloader_drop_last",
    "prescale_gradients",
    "fp16.enabled",
    "fp16.auto_cast",
    "fp16.consecutive_hysteresis",
    "bf16.enabled",
    "bf16.immediate_grad_update",
    "bf16.check_grad_overflow",
    "torch_autocast.enabled",
    "disable_allgather",
]
OBJECTS = ["fp16", "bf16", "torch_autocast", "data_types", "optimizer"]
OBJECTS += ["optimizer.params", "scheduler", "scheduler.params", "kernels"]
WORDS: dict[str, list[Any]] = {
    "torch_autocast.dtype": ["fp32", "int8", 16],
    "data_types.grad_accum_dtype": ["fp8", 32],
    "data_types.param_dtype": ["double", True],
    "data_types.buffer_dtype": ["bf17"],
    "communication_data_type": ["int8", 16],
    "gradient_allreduce_op": ["max", True],
    "log_level": ["warn", "loud", 10],
    "optimizer.type": [3, "", ["Adam"], None],
    "scheduler.type": [False, "", None],
    "fp16.initial_scale_power": [400, 128, -1],
}
NOT_OFFERED = {
    "amp": {"enabled": True},
    "graph_harvesting": True,
}
MISSPELT = {
    "train_batchsize": "train_batch_size",
    "train_micro_batch_size_per_gpus": "train_micro_batch_size_per_gpu",
    "gradient_acumulation_steps": "gradient_accumulation_steps",
    "gradient_cliping": "gradient_clipping",
    "fp_16": "fp16",
    "bfloat_16": "bfloat16",
    "optimiser": "optimizer",
    "schedular": "scheduler",
    "zero_optimisation": "zero_optimization",
    "csv_monitors": "csv_monitor",
    "tensor_board": "tensorboard",
    "activation_checkpoint": "activation_checkpointing",
    "plugin": "plugins",
    "fakes": "fake",
    "fp16.enable": "fp16.enabled",
    "fp16.loss_scales": "fp16.loss_scale",
    "fp16.initial_scale_pow": "fp16.initial_scale_power",
    "bf16.enabeld": "bf16.enabled",
    "torch_autocast.dtypes": "torch_autocast.dtype",
    "data_types.grad_acum_dtype": "data_types.grad_accum_dtype",
    "optimizer.param": "optimizer.params",
    "scheduler.types": "scheduler.type",
    "plugins.requires": "plugins.require",
    "plugins.prefers": "plugins.prefer",
    "fake.enabld": "fake.enabled",
    "fake.ratios": "fake.ratio",
    "fake.groups.a.pattern": "fake.groups.a.patterns",
    "fake.sub.dims": "fake.sub.dim",
    "plain.sizes": "plain.size",
}
WITHOUT_PLUGIN: dict[str, Any] = {
    "zero_optimization": {"stage": 1},
    "activation_checkpointing": {"partition_activations": True},
    "pipeline": {"stages": 2},
    "expert_parallel": {"enabled": True},
    "tensor_parallel": {"autotp_size": 2},
    "compile": {"deepcompile": True},
    "sparse_attention": {"mode": "fixed"},
    "tensorboard": {"enabled": True},
    "csv_monitor": {"enabled": True},
    "nebula": {"enabled": True},
    "datastates_ckpt": {"host_cache_size": 2},
    "elasticity": {"enabled": True},
    "data_efficiency": {"enabled": True},
    "curriculum_learning": {"enabled": True},
    "compression_training": {"layer_reduction": {"enabled": True}},
    "weight_quantization": {"num_bits": 8},
    "hybrid_engine": {"enabled": True},
    "progressive_layer_drop": {"enabled": True},
    "eigenvalue": {"enabled": True},
}
SINGLE: list[tuple[Any, str]] = [
    # out of range
    ({"gradient_clipping": -0.5}, "gradient_clipping"),
    ({"gradient_clipping": "1.0"}, "gradient_clipping"),
    ({"gradient_clipping": True}, "gradient_clipping"),
    ({"gradient_clipping": None}, "gradient_clipping"),
    ({"gradient_predivide_factor": 0}, "gradient_predivide_factor"),
    ({"gradient_predivide_factor": "two"}, "gradient_predivide_factor"),
    ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale"),
    ({"fp16": {"loss_scale": True}}, "fp16.loss_scale"),
    ({"fp16": {"loss_scale": "dynamic"}}, "fp16.loss_scale"),
    ({"fp16": {"initial_scale_power": -1}}, "fp16.initial_scale_power"),
    ({"fp16": {"initial_scale_power": 5000}}, "fp16.initial_scale_power"),
    ({"fp16": {"initial_scale_power": True}}, "fp16.initial_scale_power"),
    ({"fp16": {"initial_scale_power": 2.5}}, "fp16.initial_scale_power"),
    ({"fp16": {"min_loss_scale": 0}}, "fp16.min_loss_scale"),
    ({"fp16": {"min_loss_scale": False}}, "fp16.min_loss_scale"),
    ({"train_batch_size": 10**400, "gradient_clipping": 10**400}, "gradient_clipping"),
    # exclusive sections
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16.enabled"),
    ({"fp16": {"enabled": True}, "bfloat16": {"enabled": True}}, "bfloat16.enabled"),
    ({"fp16": {"enabled": True}, "amp": {"enabled": True}}, "amp"),
    ({"bf16": {"enabled": True}, "amp": {"enabled": True}}, "amp"),
    ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype"),
    ({"data_types": {"param_dtype": "fp32"}, "fp16": {"enabled": True}}, "data_types.param_dtype"),
    ({"data_types": {"param_dtype": "fp16"}, "bf16": {"enabled": True}}, "data_types.param_dtype"),
    # keys in the wrong place
    ({"bf16": {"loss_scale": 0}}, "bf16.loss_scale"),
    ({"bf16": {"initial_scale_power": 16}}, "bf16.initial_scale_power"),
    ({"bf16": {"loss_scale_window": 100}}, "bf16.loss_scale_window"),
    ({"bf16": {"hysteresis": 2}}, "bf16.hysteresis"),
    ({"bf16": {"min_loss_scale": 1}}, "bf16.min_loss_scale"),
    ({"bf16": {"consecutive_hysteresis": True}}, "bf16.consecutive_hysteresis"),
    ({"loss_scale": 128}, "loss_scale"),
    ({"fp16": {"gradient_clipping": 1.0}}, "fp16.gradient_clipping"),
    ({"optimizer": {"lr": 0.1}}, "optimizer.lr"),
    ({"fake": {"train_batch_size": 1}}, "fake.train_batch_size"),
    ({"fake": {"aio": {}}}, "fake.aio"),
    ({"prefer": {}}, "prefer"),
    ({"qwertyuiop": 1}, "qwertyuiop"),
    # old spellings
    ({"bfloat16": {"enabled": True}, "bf16": {"enabled": True}}, "bfloat16"),
    ({"bfloat16": {"enabled": 1}}, "bfloat16.enabled"),
    ({"bfloat16": {"enabld": True}}, "bfloat16.enabld"),
    ({"fp16": {"clip": 1.0}, "gradient_clipping": 1.0}, "fp16.clip"),
    ({"fp16": {"clip": "1"}}, "fp16.clip"),
    ({"fp16": {"clip": -1}}, "fp16.clip"),
    ({"fp16": {"clip": True}}, "fp16.clip"),
    ({"fake": {"bucket": 1, "stage3_bucket_size": 2}}, "fake.bucket"),
    ({"fake": {"bucket": 1, "bucket_size": 2}}, "fake.bucket"),
    ({"fake": {"bucket": "1"}}, "fake.bucket"),
    ({"optimizer": {}}, "optimizer.type"),
    ({"scheduler": {"params": {"total_num_steps": 10}}}, "scheduler.type"),
    ({"amp": {"enabled": False, "opt_levle": "O1"}}, "amp.opt_levle"),
    # "auto" that nobody filled in
    ({"train_batch_size": "auto"}, "train_batch_size"),
    ({"gradient_accumulation_steps": "auto"}, "gradient_accumulation_steps"),
    ({"gradient_clipping": "auto"}, "gradient_clipping"),
    ({"fp16": {"enabled": "auto"}}, "fp16.enabled"),
    ({"bf16": "auto"}, "bf16"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr"),
    (
        {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, "auto"]}}},
        "optimizer.params.betas[1]",
    ),
    ({"optimizer": {"type": "auto"}}, "optimizer.type"),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
        "scheduler.params.warmup_num_steps",
    ),
    ({"communication_data_type": "auto"}, "communication_data_type"),
    ({"fake": {"ratio": "auto"}}, "fake.ratio"),
    ({"fake": {"output_path": "auto"}}, "fake.output_path"),
    ({"fake": {"rules": [{"dim": "auto"}]}}, "fake.rules[0].dim"),
    ({"fake": "auto"}, "fake"),
    ({"plain": {"name": "auto"}}, "plain.name"),
    ({"level": "auto"}, "level"),
    # NaN and Infinity
    ({"gradient_clipping": float("nan")}, "gradient_clipping"),
    ({"gradient_clipping": float("inf")}, "gradient_clipping"),
    ({"steps_per_print": float("-inf")}, "steps_per_print"),
    ({"steps_per_print": float("nan")}, "steps_per_print"),
    ({"timers": {"steps_per_print": float("inf")}}, "timers.steps_per_print"),
    ({"fp16": {"loss_scale": float("-inf")}}, "fp16.loss_scale"),
    ({"optimizer": {"type": "Adam", "params": {"lr": float("nan")}}}, "optimizer.params.lr"),
    (
        {"optimizer": {"type": "Adam", "params": {"betas": [0.9, float("inf")]}}},
        "optimizer.params.betas[1]",
    ),
    ({"fake": {"ratio": float("nan")}}, "fake.ratio"),
    ({"fake": {"rules": [{}, {"dim": float("inf")}]}}, "fake.rules[1].dim"),
    # lists and objects of the wrong things
    (
        {"torch_autocast": {"lower_precision_safe_modules": "Linear"}},
        "torch_autocast.lower_precision_safe_modules",
    ),
    (
        {"torch_autocast": {"lower_precision_safe_modules": [1]}},
        "torch_autocast.lower_precision_safe_modules[0]",
    ),
    ({"kernels": {"adam": 3}}, "kernels.adam"),
    ({"kernels": {"adam": ""}}, "kernels.adam"),
    ({"kernels": {"adam": None}}, "kernels.adam"),
    ({"plugins": {"require": "dscore-zero"}}, "plugins.require"),
    ({"plugins": {"disable": [1]}}, "plugins.disable[0]"),
    ({"plugins": {"load": {"a": "b"}}}, "plugins.load"),
    ({"plugins": {"prefer": ["a"]}}, "plugins.prefer"),
    ({"plugins": {"prefer": {"aio": 1}}}, "plugins.prefer.aio"),
    ({"plugins": [1]}, "plugins.load[0]"),
    ({"plugins": "ds_zero"}, "plugins"),
    # keys and values that JSON does not have
    ({"fp16": {1: True}}, "fp16.1"),
    ({None: 1}, "None"),
    ({"fake": {"rules": [{("a",): 1}]}}, "fake.rules[0].('a',)"),
    ({"optimizer": {"params": {"lr": 1j}}}, "optimizer.params.lr"),
    ({"optimizer": {"params": {"lr": object()}}}, "optimizer.params.lr"),
    ({"optimizer": {"params": {"lr": b"1"}}}, "optimizer.params.lr"),
    ({"kernels": {"adam": {1, 2}}}, "kernels.adam"),
    # a plugin's section
    ({"fake": None}, "fake"),
    ({"fake": []}, "fake"),
    ({"fake": True}, "fake"),
    ({"fake": {"stage3_bucket_size": -1}}, "fake.stage3_bucket_size"),
    ({"fake": {"bucket_size": -1}}, "fake.bucket_size"),
    ({"fake": {"stage3_bucket_size": True}}, "fake.stage3_bucket_size"),
    ({"fake": {"stage3_bucket_size": 1.5}}, "fake.stage3_bucket_size"),
    ({"fake": {"ratio": 1.5}}, "fake.ratio"),
    ({"fake": {"ratio": "half"}}, "fake.ratio"),
    ({"fake": {"strategy": "stpe"}}, "fake.strategy"),
    ({"fake": {"rules": {}}}, "fake.rules"),
    ({"fake": {"rules": [3]}}, "fake.rules[0]"),
    ({"fake": {"rules": [{"dim": 1}, {"dim": -1}]}}, "fake.rules[1].dim"),
    ({"fake": {"rules": [{"patterns": [1]}]}}, "fake.rules[0].patterns[0]"),
    ({"fake": {"rules": [{"pattern": []}]}}, "fake.rules[0].pattern"),
    ({"fake": {"groups": {"a": {"dim": "1"}}}}, "fake.groups.a.dim"),
    ({"fake": {"groups": {"a": 3}}}, "fake.groups.a"),
    ({"fake": {"betas": [0.9]}}, "fake.betas"),
    ({"fake": {"betas": [0.9, "x"]}}, "fake.betas[1]"),
    ({"fake": {"betas": 0.9}}, "fake.betas"),
    ({"fake": {"sub": 3}}, "fake.sub"),
    ({"fake": {"sub": {"dim": True}}}, "fake.sub.dim"),
    ({"fake": {"bucket_size": 10**30}}, "fake.bucket_size"),
    ({"fake": {"bucket_size": 1e30}}, "fake.bucket_size"),
    ({"train_batch_size": 2**63}, "train_batch_size"),
    ({"fake": {"api_key": 5}}, "fake.api_key"),
    ({"fake": {"api_keys": "x"}}, "fake.api_keys"),
    ({"plain": {"size": "many"}}, "plain.size"),
    ({"plain": {"size": 1.5}}, "plain.size"),
    ({"plain": {"name": 3}}, "plain.name"),
    ({"plain": 3}, "plain"),
    ({"level": "high"}, "level"),
    ({"level": {}}, "level"),
    # switched off in no uncertain terms, or not
    ({"zero_optimization": {"stgae": 3}}, "zero_optimization"),
    ({"zero_optimization": {"stage": "0"}}, "zero_optimization"),
    ({"zero_optimization": {"stage": False}}, "zero_optimization"),
    ({"zero_optimization": True}, "zero_optimization"),
    ({"wandb": {"enabled": "false"}}, "wandb"),
    ({"wandb": {"project": "x"}}, "wandb"),
]


def cases() -> Iterator[Case]:
    value: Any
    for path in POSITIVE:
        for value in (0, -1, True, "8", 1.5, [8]):
            yield nest(path, value), path
    for path in BOOLEANS:
        for value in (1, "true", None, []):
            yield nest(path, value), path
    for path in OBJECTS:
        for value in ([1], 3, "x"):
            yield nest(path, value), path
    for path, values in WORDS.items():
        for value in values:
            yield nest(path, value), path
    for path, value in NOT_OFFERED.items():
        yield nest(path, value), path
    for path in MISSPELT:
        yield nest(path, {"enabled": True}), path
    for name, section in WITHOUT_PLUGIN.items():
        yield {name: section}, name
    yield from SINGLE


CASES = list(cases())


def test_there_are_enough_and_all_differ() -> None:
    assert len(CASES) >= 222
    assert len({repr(c) for c in CASES}) >= len(CASES) - 1  # the repr of object() may repeat


@pytest.mark.parametrize(
    ("config", "path"), CASES, ids=[f"{i}-{p}" for i, (_, p) in enumerate(CASES)]
)
def test_the_key_is_named(config: dict[str, Any], path: str) -> None:
    error = refused(config)
    assert path in [p.path for p in error.problems]
    text = str(error)
    assert path in text
    for jargon in ("pydantic", "https://", "Input should", "extra_forbidden", "type=", "NoneType"):
        assert jargon not in text


def test_leftover_autos_are_one_problem() -> None:
    keys = [
        "train_batch_size",
        "gradient_clipping",
        "fp16.enabled",
        "optimizer.params.lr",
        "fake.rules[0].dim",
    ]
    config = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-8}},
        "vocabulary_size": "often",
        "fake": {"rules": [{"dim": "auto", "mode": "auto"}], "strategy": "auto"},
    }
    autos, other = refused(config).problems
    assert autos.path.split(", ") == keys
    assert "was not filled in" in autos.message
    assert other.path == "vocabulary_size"


@pytest.mark.parametrize("text", ['{"steps_per_print": Infinity}', '{"steps_per_print": 1e999}'])
def test_infinitely_many_steps_per_print_mean_never(text: str) -> None:
    read = read_config(base64.urlsafe_b64encode(text.encode()).decode())
    for source in (read, read_config({"steps_per_print": float("inf")})):
        assert source.raw == {"steps_per_print": None}


@pytest.mark.parametrize(("path", "meant"), MISSPELT.items())
def test_the_nearest_key_and_its_owner_are_named(path: str, meant: str) -> None:
    (problem,) = (p for p in refused(nest(path, 1)).problems if p.path == path)
    assert repr(meant) in problem.fix
    owners = {
        "fake": "ds-fake 1.2.0",
        "plain": "ds-plain 0.1.0",
        "zero_optimization": "dscore-zero",
    }
    owners |= {"csv_monitor": "dscore-monitor-csv", "tensorboard": "dscore-monitor-tensorboard"}
    owners |= {"activation_checkpointing": "dscore-activation-checkpointing"}
    assert owners.get(meant.split(".")[0], "dscore-train") in problem.fix


@pytest.mark.parametrize(("path", "value"), NOT_OFFERED.items())
def test_what_is_not_offered_says_so(path: str, value: Any) -> None:
    assert "is documented but not offered" in str(refused(nest(path, value)))


@pytest.mark.parametrize("name", WITHOUT_PLUGIN)
def test_a_missing_plugin_is_named(name: str) -> None:
    (problem,) = refused({name: WITHOUT_PLUGIN[name]}).problems
    owners = {
        "csv_monitor": "dscore-monitor-csv",
        "tensorboard": "dscore-monitor-tensorboard",
        "zero_optimization": "dscore-zero",
        "expert_parallel": "dscore-moe",
        "hybrid_engine": "dscore-inference",
        "weight_quantization": "dscore-inference",
        "data_efficiency": "dscore-data-sampling",
        "curriculum_learning": "dscore-data-sampling",
        "compression_training": "dscore-compression",
        "eigenvalue": "dscore-compression",
    }
    named_alike = (
        "activation_checkpointing compile elasticity pipeline progressive_layer_drop"
        " sparse_attention tensor_parallel"
    )
    owners |= {each: f"dscore-{each.replace('_', '-')}" for each in named_alike.split()}
    built = {key: f"pip install -c dist/constraints.txt {dist}`" for key, dist in owners.items()}
    assert built.get(name, "documented but not offered: ") in str(problem)


@pytest.mark.parametrize("name", WITHOUT_PLUGIN)
def test_an_empty_section_needs_no_plugin(name: str) -> None:
    for off in ({}, {"enabled": False}) if "enabled" in documented()[name]["keys"] else ({}, None):
        assert build_config({name: off}, {}).section(name) is None


def test_switches_with_other_names() -> None:
    for section in (
        {"zero_optimization": {"stage": 0, "reduce_bucket_size": 5e8}},
        {"tensor_parallel": {"autotp_size": 0}},
        {"compile": {"deepcompile": False, "double_buffer": True}},
        {"zero_optimization": False},
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
    ):
        assert build_config(section, {}).sections == {}
