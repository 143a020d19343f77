"""The features of the composition matrix: for each value, the config that asks for it, the words by
which a refusal names it, and what its runs are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ds_testing.kits.matrix.covering import Row

RANKS = 4
"""Ranks of a run, at most; of pairs no more are needed."""


@dataclass(frozen=True)
class Value:
    """One value of a feature."""

    # Keys of the config, merged with those of the other values of a row.
    config: Mapping[str, Any] = field(default_factory=dict)
    # One of these stands in the message that refuses this value, beside or instead of a key.
    words: tuple[str, ...] = ()
    # Ranks that work on one sample.
    ranks: int = 1
    # The run is compared with the engine in one process, which has this value too, as plain torch
    # has not what it does.
    with_engine: bool = False
    # How far weights may be from the reference, as a part of the way that they went; 0: rounding.
    within: float = 0.0
    # The same in less than fp64, where what it does makes small differences large.
    unsteady: float = 0.0
    # Why, for the table.
    note: str = ""


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def optimizer(kind: str, **params: Any) -> Value:
    settings = {"type": kind, "params": {"lr": 0.02, **params}}
    return Value({"optimizer": settings}, words=("optimizer", kind))


ADAM = {"eps": 0.1, "weight_decay": 0.1}
"""The eps keeps small what rounding does to small gradients."""
CPU = {"device": "cpu"}
LTD = {
    "enabled": True,
    "total_layer_num": 2,
    "random_ltd_layer_num": 1,
    "random_ltd_layer_id": [1],
    "model_mask_name": None,
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 4,
        "max_value": 8,
        "schedule_config": {"require_steps": 4, "seq_per_step": 2},
    },
}
CURRICULUM = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 4,
    "max_difficulty": 8,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 4},
}
QUANTISED = {
    "weight_quantization": {
        "shared_parameters": {"enabled": True, "schedule_offset": 0},
        "different_groups": {
            "all": {
                "params": {"start_bits": 8, "target_bits": 4, "quantization_period": 1},
                "modules": ["mlp"],
            }
        },
    }
}

FEATURES: Mapping[str, Mapping[str, Value]] = {
    "stage": {f"z{stage}": Value(zero(stage=stage), words=("stage",)) for stage in range(4)},
    "offload": {
        "none": Value(),
        "optimizer": Value(zero(offload_optimizer=CPU), words=("offload_optimizer",)),
        "param": Value(zero(offload_optimizer=CPU, offload_param=CPU), words=("offload_param",)),
        "nvme": Value(
            zero(offload_optimizer={"device": "nvme", "nvme_path": "{folder}"}),
            words=("offload_optimizer", "nvme"),
        ),
        "super": Value(
            zero(offload_optimizer={**CPU, "super_offload": True}), words=("super_offload",)
        ),
        "zenflow": Value(
            zero(
                offload_optimizer=CPU,
                zenflow={
                    "topk_ratio": 0.5,
                    "select_strategy": "step",
                    "select_interval": 2,
                    "update_interval": 2,
                    "overlap_step": False,
                },
            ),
            words=("zenflow", "ZenFlow"),
            with_engine=True,
        ),
    },
    "tp": {
        "none": Value(),
        "tp": Value(
            {"tensor_parallel": {"autotp_size": 2}},
            words=("tensor_parallel", "autotp_size"),
            ranks=2,
        ),
    },
    "sp": {
        "none": Value(),
        "ulysses": Value(
            {"sequence_parallel": {"size": 2, "mode": "ulysses"}},
            words=("sequence_parallel",),
            ranks=2,
        ),
        "ring": Value(
            {"sequence_parallel": {"size": 2, "mode": "ring"}},
            words=("sequence_parallel",),
            ranks=2,
        ),
        "tiled": Value({"sequence_parallel": {"tiled_mlp": {"shards": 2}}}, words=("tiled_mlp",)),
    },
    "ep": {
        "none": Value(),
        "experts": Value(words=("MoE", "experts", "ds_moe")),
        "ep": Value(words=("MoE", "ep_size", "ds_moe", "expert")),
    },
    "pp": {
        "none": Value(),
        **{
            how: Value(
                {"pipeline": {"schedule": how, "chunks": chunks}},
                words=("pipeline", "Pipeline", "stages"),
                ranks=2,
            )
            for how, chunks in (("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2))
        },
    },
    "optimizer": {
        "AdamW": optimizer("AdamW", **ADAM),
        "SGD": optimizer("SGD", momentum=0.5),
        "Lion": optimizer("Lion", lr=0.002),
        "Adagrad": optimizer("Adagrad", eps=0.1),
        "Muon": optimizer("Muon", weight_decay=0.1),
        "Lamb": optimizer("Lamb", **ADAM),
        "AdamMini": optimizer("AdamMini", **ADAM),
        "ScheduleFreeAdamW": optimizer("ScheduleFreeAdamW", warmup_steps=2, **ADAM),
        "NorMuon": optimizer("Muon", weight_decay=0.1, variant="normuon"),
        "SOAP": optimizer("SOAP", precondition_frequency=2, **ADAM),
        "Shampoo": optimizer("Shampoo", precondition_frequency=2, damping=1e-4, weight_decay=0.1),
        "Dion": optimizer("Dion", weight_decay=0.1),
        "GaLore": optimizer("GaLore", rank=3, update_proj_gap=2, weight_decay=0.1),
        "AdamW8bit": replace(
            optimizer("AdamW8bit", min_8bit_size=0, **ADAM),
            within=0.05,
            note="moments have 8 bits, in blocks that ranks may share",
        ),
        # Its warm-up: what it compresses then has no truth in one process.
        "OneBitAdam": optimizer("OneBitAdam", freeze_step=100, **ADAM),
    },
    "precision": {
        "fp64": Value(),
        "bf16": Value({"bf16": {"enabled": True}}, words=("bf16",)),
        "fp16": Value({"fp16": {"enabled": True, "initial_scale_power": 6}}, words=("fp16",)),
        "autocast": Value(
            {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, words=("torch_autocast",)
        ),
    },
    "clip": {
        "none": Value({"gradient_clipping": 0.0}),
        "clip": Value({"gradient_clipping": 0.3}, words=("gradient_clipping",)),
    },
    "gas": {
        name: Value(
            {"gradient_accumulation_steps": int(name)}, words=("gradient_accumulation_steps",)
        )
        for name in ("2", "1", "4")
    },
    "trained": {
        "all": Value(),
        "frozen": Value(words=("frozen", "requires_grad")),
        "thawed": Value(words=("frozen", "requires_grad", "unfrozen")),
    },
    "groups": {"one": Value(), "two": Value(words=("group",))},
    "schedule": {
        "none": Value(),
        "warmup": Value(
            {
                "scheduler": {
                    "type": "WarmupDecayLR",
                    "params": {"warmup_num_steps": 2, "total_num_steps": 6, "warmup_max_lr": 0.02},
                }
            },
            words=("scheduler",),
        ),
    },
    "recompute": {
        "none": Value(),
        "blocks": Value(
            {"activation_checkpointing": {"modules": "auto"}}, words=("activation_checkpointing",)
        ),
        "in_parts": Value(
            {"activation_checkpointing": {"modules": "auto", "partition_activations": True}},
            words=("activation_checkpointing", "partition_activations"),
        ),
    },
    "compile": {
        "none": Value(),
        "at_start": Value(
            {"compile": {"at_start": True, "backend": "aot_eager"}}, words=("compile",)
        ),
    },
    "wires": {
        "none": Value(),
        "hpZ": Value(zero(zero_hpz_partition_size=2), words=("zero_hpz_partition_size",)),
        "MiCS": Value(zero(mics_shard_size=2), words=("mics_shard_size",)),
        "qwZ": Value(
            zero(zero_quantized_weights=True),
            words=("zero_quantized_weights",),
            within=0.3,
            note="weights are sent in 8 bits",
        ),
        "qgZ": Value(
            zero(zero_quantized_gradients=True),
            words=("zero_quantized_gradients",),
            within=0.5,
            note="gradients are sent in 4 bits",
        ),
    },
    "comm": {
        "none": Value(),
        "overlap": Value(zero(overlap_comm=True), words=("overlap_comm",)),
        "predivide": Value(
            {"gradient_predivide_factor": 2.0}, words=("gradient_predivide_factor",)
        ),
        "fp32": Value(
            {"communication_data_type": "fp32"},
            words=("communication_data_type",),
            within=1e-5,
            note="gradients are sent in fp32",
        ),
        "prescale": Value({"prescale_gradients": True}, words=("prescale_gradients",)),
        "robin": Value(zero(round_robin_gradients=True), words=("round_robin_gradients",)),
    },
    "moved": {
        "none": Value(),
        "same": Value(words=("checkpoint",)),
        "stage": Value(words=("checkpoint",)),
        "world": Value(words=("checkpoint",)),
    },
    "random": {
        "none": Value(),
        "dropout": Value(
            {"reproducibility": {"samples": "blocks"}},
            words=("reproducibility",),
            with_engine=True,
        ),
    },
    "replay": {"none": Value(), "replayed": Value({"numerics": {"every": 2}}, words=("numerics",))},
    "routing": {
        "none": Value(),
        "layer_drop": Value(
            {"progressive_layer_drop": {"enabled": True, "theta": 0.3, "gamma": 0.5}},
            words=("progressive_layer_drop",),
            with_engine=True,
        ),
        "random_ltd": Value(
            {
                "data_efficiency": {
                    "enabled": True,
                    "data_routing": {"enabled": True, "random_ltd": LTD},
                }
            },
            words=("random_ltd", "data_efficiency"),
            with_engine=True,
        ),
        "curriculum": Value(
            {"curriculum_learning": CURRICULUM}, words=("curriculum_learning",), with_engine=True
        ),
        "quantised": Value(
            {"compression_training": QUANTISED},
            words=("compression_training",),
            with_engine=True,
            unsteady=0.1,
            note="in 16 bits only: values between two of the 16 levels of a weight round up or down",
        ),
    },
}

ALONE = ("tp", "sp", "ep", "pp", "wires", "comm", "moved", "compile", "recompute", "replay")
"""Features that the engine in one process, with which a run is compared, has not."""
NUMERIC = ("stage", "tp", "sp", "ep", "pp", "optimizer", "precision", "clip", "gas", "trained")
"""The numeric core, of which every triple is tried."""

NAMES: Mapping[str, tuple[str, ...]] = {name: tuple(values) for name, values in FEATURES.items()}


def ranks_together(row: Row) -> int:
    """How many ranks work on one sample."""
    return math.prod(FEATURES[name][value].ranks for name, value in row.items())


def possible(row: Row) -> bool:
    """Whether so many ranks are enough, with two that have data of their own where these divide
    something.
    """
    ranks = ranks_together(row)
    experts = row.get("ep") == "ep"
    blocks = row.get("wires", "none") in ("hpZ", "MiCS")
    if experts or row.get("wires", "none") != "none":
        ranks *= 2
    # Blocks of ranks and ranks that divide the experts are of the same ones.
    if experts and blocks and row.get("sp", "none") in ("ulysses", "ring"):
        return False
    return ranks <= RANKS
