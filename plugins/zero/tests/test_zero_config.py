"""The section and the declaration: every documented key, default, alias and old spelling."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any, ClassVar

import pytest
import torch
from ds_testing import PluginConformance, run_ranks
from ds_zero.config import LEAF_CLASSES, ZeroConfig
from pydantic import ValidationError
from torch import nn

import ds_core
from ds_core.config import build_config

DEFAULTS: dict[str, Any] = {
    "stage": 0,
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 500_000_000,
    "use_multi_rank_bucket_allreduce": True,
    "allgather_partitions": True,
    "allgather_bucket_size": 500_000_000,
    "overlap_comm": None,
    "load_from_fp32_weights": True,
    "elastic_checkpoint": False,
    "offload_param": None,
    "offload_optimizer": None,
    "zenflow": None,
    "sub_group_size": 1_000_000_000,
    "cpu_offload": None,
    "cpu_offload_param": None,
    "cpu_offload_use_pin_memory": None,
    "prefetch_bucket_size": 50_000_000,
    "param_persistence_threshold": 100_000,
    "model_persistence_threshold": sys.maxsize,
    "max_live_parameters": 1_000_000_000,
    "max_reuse_distance": 1_000_000_000,
    "gather_16bit_weights_on_model_save": None,
    "module_granularity_threshold": 0,
    "use_all_reduce_for_fetch_params": False,
    "allgather_sequential": False,
    "ignore_unused_parameters": True,
    "legacy_stage1": False,
    "round_robin_gradients": False,
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "zeropp_loco_param": None,
    "mics_shard_size": -1,
    "mics_hierarchical_params_gather": False,
    "memory_efficient_linear": True,
    "pipeline_loading_checkpoint": False,
    "override_module_apply": True,
    "log_trace_cache_warnings": False,
    "enable_sanity_checks": False,
    "save_muon_momentum_buffer_in_memory": False,
    "leaf_module": {"classes": list(LEAF_CLASSES), "names": [], "name_suffixes": []},
}


class TestPlugin(PluginConformance):
    entry_point = "ds_zero.plugin"
    section = "zero_optimization"
    good_config: ClassVar[Any] = {"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": True}
    bad_configs: ClassVar[Any] = [
        {"stage": 4},
        {"stage": True},
        {"stage": 1.5},
        {"stgae": 1},
        {"grad_hooks": True},
        {"reduce_bucket_size": 0},
        {"reduce_bucket_size": 10**30},
        {"zero_hpz_partition_size": 0},
        {"offload_optimizer": {"device": "cpu", "buffer_count": 0}},
        {"offload_param": {"device": "cpu", "buffer_size": 0}},
        {"allgather_bucket_size": 0},
        {"sub_group_size": 0},
        {"prefetch_bucket_size": 0.5},
        {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2},
        {"max_live_parameters": -1},
        {"leaf_module": {"names": 3}},
        {"leaf_module": {"class": "x"}},
        {"aio": {}},
        {"offload_optimizer": {"ratio": 1.5}},
        {"offload_optimizer": {"device": 3}},
        {"offload_param": {"ratio": 0.5}},
        {"cpu_offload": 1},
        {"zero_hpz_partition_size": -1},
        {"mics_shard_size": 0},
    ]


def test_defaults_are_the_documented_ones_and_no_key_is_missing() -> None:
    assert ZeroConfig().model_dump() == DEFAULTS


@pytest.mark.parametrize(
    "name",
    [
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
        "module_granularity_threshold",
    ],
)
def test_the_long_names_of_stage_3(name: str) -> None:
    for spelling in (name, f"stage3_{name}"):
        assert getattr(ZeroConfig.model_validate({spelling: 7.0}), name) == 7


def notes(section: Any) -> list[str]:
    """The notes on a section, as `dscore config check` prints them; nothing else warns."""
    models: Any = {"zero_optimization": (ZeroConfig, "dscore-zero")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [str(note) for note in build_config({"zero_optimization": section}, models).notes]


def test_old_spellings() -> None:
    assert ZeroConfig.model_validate(
        {"stage3_gather_fp16_weights_on_model_save": True}
    ).gather_16bit_weights_on_model_save
    assert ZeroConfig.model_validate(True).stage == 1
    assert ZeroConfig.model_validate(False).stage == 0
    config = ZeroConfig.model_validate({"offload_param": {"device": "none"}, "cpu_offload": False})
    assert config.offload_optimizer is None
    config = ZeroConfig.model_validate({"cpu_offload": True, "cpu_offload_param": True})
    assert config.offload_optimizer is not None
    assert config.offload_param is not None
    assert (config.offload_optimizer.device, config.offload_param.device) == ("cpu", "cpu")
    config = ZeroConfig.model_validate(
        {"cpu_offload_use_pin_memory": True, "offload_param": {"device": "cpu"}}
    )
    assert config.offload_param is not None
    assert not config.offload_param.pin_memory
    with pytest.raises(
        ValidationError, match="cpu_offload is the old name of offload_optimizer, and both are set"
    ):
        ZeroConfig.model_validate({"cpu_offload": True, "offload_optimizer": {"device": "cpu"}})


Z = "zero_optimization"
NOTED: list[tuple[Any, list[str]]] = [
    (
        {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "ratio": 0.5},
            "stage3_max_live_parameters": 5,
        },
        [],
    ),
    (
        {
            "stage": 3,
            "round_robin_gradients": False,
            "memory_efficient_linear": True,
            "elastic_checkpoint": False,
        },
        [],
    ),
    ({"stage": 0, "stage3_max_live_parameters": 5}, []),
    (True, [f'{Z}: true and false are deprecated: read as {{"stage": 1}}']),
    ({"stage": 1, "cpu_offload": True}, [f"{Z}.cpu_offload: is deprecated"]),
    ({"stage": 3, "cpu_offload_param": False}, [f"{Z}.cpu_offload_param: is deprecated"]),
    (
        {"stage": 1, "cpu_offload_use_pin_memory": True},
        [f"{Z}.cpu_offload_use_pin_memory: has no effect"],
    ),
    (
        {"stage": 1, "allgather_size": 7},
        [f"{Z}.allgather_size: is deprecated and was read as 'allgather_bucket_size'"],
    ),
    ({"stage": 2, "round_robin_gradients": True}, [f"{Z}.round_robin_gradients: has no effect"]),
    (
        {"stage": 3, "memory_efficient_linear": False},
        [f"{Z}.memory_efficient_linear: has no effect"],
    ),
    ({"stage": 1, "legacy_stage1": True}, [f"{Z}.legacy_stage1: has no effect"]),
    ({"stage": 3, "elastic_checkpoint": True}, [f"{Z}.elastic_checkpoint: has no effect"]),
    (
        {"stage": 3, "pipeline_loading_checkpoint": True},
        [f"{Z}.pipeline_loading_checkpoint: has no effect"],
    ),
    ({"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}, []),
    (
        {"stage": 2, "stage3_max_live_parameters": 5, "leaf_module": {}},
        [f"{Z}: stage3_max_live_parameters, leaf_module have no effect at stage 2"],
    ),
    (
        {"stage": 2, "offload_param": {"device": "cpu"}},
        [f"{Z}: offload_param has no effect at stage 2"],
    ),
    (
        {"stage": 0, "offload_param": {"device": "cpu"}},
        [f"{Z}: offload_param has no effect at stage 0"],
    ),
    ({"stage": 1, "offload_param": {"device": "none"}}, []),
    (
        {"stage": 3, "offload_optimizer": {"ratio": 0.5}},
        [f"{Z}.offload_optimizer.ratio: has no effect with device"],
    ),
    (
        {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "/x"}},
        [f"{Z}.offload_param.nvme_path: has no effect with device 'cpu'"],
    ),
]


@pytest.mark.parametrize(("section", "told"), NOTED)
def test_what_has_no_effect_and_what_has_another_name_is_noted(
    section: Any, told: list[str]
) -> None:
    found = notes(section)
    assert len(found) == len(told)
    assert all(note.startswith(start) for note, start in zip(found, told, strict=True))


def test_the_notes_are_one_warning_of_rank_0() -> None:
    (first, second) = run_ranks(2, logged)
    assert second == []
    (warning,) = first
    assert "zero_optimization.round_robin_gradients: has no effect: " in warning
    assert "bfloat16: is deprecated and was read as 'bf16'" in warning


def logged() -> list[str]:
    """What `initialize` logs of a config with two notes."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_core").addHandler(handler)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam"},
        "bfloat16": {"enabled": False},
        "zero_optimization": {"stage": 1, "round_robin_gradients": True},
    }
    ds_core.initialize(model=nn.Linear(2, 2), config=config)[0].destroy()
    return [text for text in heard if "has no effect" in text]


def test_one_leaf_may_stand_without_a_list_and_doubles_go() -> None:
    leaf = ZeroConfig.model_validate(
        {"leaf_module": {"names": "a.b", "name_suffixes": ["x", "y", "x"]}}
    ).leaf_module
    assert leaf.names == ["a.b"]
    assert leaf.name_suffixes == ["x", "y"]


class TestAllowUntested(PluginConformance):
    entry_point = "ds_zero.plugin"
    section = "zero_allow_untested_optimizer"
    good_config = True
    bad_configs = [1, "yes", None]


class TestForceOwn(PluginConformance):
    entry_point = "ds_zero.plugin"
    section = "zero_force_ds_cpu_optimizer"
    good_config = False
    bad_configs = [0, "no", None]


def check_optimizers() -> dict[str, str]:
    """What ZeRO says to optimizers that nobody has declared, or that need whole tensors."""
    import ds_core
    from ds_core.errors import UsageError

    told = {}
    for allowed in (False, True):
        try:
            engine, *_ = ds_core.initialize(
                model=nn.Linear(3, 3),
                optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
                config={
                    "train_batch_size": 1,
                    "zero_optimization": {"stage": 1},
                    "zero_allow_untested_optimizer": allowed,
                },
            )
            engine.destroy()
            told[str(allowed)] = ""
        except UsageError as error:
            told[str(allowed)] = str(error)
    return told


def test_undeclared_optimizers_need_permission() -> None:
    (told,) = run_ranks(1, check_optimizers)
    assert "zero_allow_untested_optimizer" in told["False"]
    assert told["True"] == ""


def test_stage_0_leaves_the_partitioner_to_others() -> None:
    from types import SimpleNamespace

    from ds_zero.plugin import ds_partitioner

    for section in (None, ZeroConfig()):
        ctx: Any = SimpleNamespace(
            module=None, config=SimpleNamespace(section={"zero_optimization": section}.get)
        )
        assert ds_partitioner(ctx) is None
