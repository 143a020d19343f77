"""The settings in which `test_plan_held_and_sent` plans and trains one small model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from ds_plan import Offload
from torch import Tensor, nn

D = 32
WORDS = 101


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 3 * D + 1)
        self.down = nn.Linear(3 * D + 1, D)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """Uneven shapes; tied: the head is the embedding."""

    def __init__(self, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(D, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight
        if frozen:
            self.blocks[1].requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).float().square().mean()
        return loss


@dataclass(frozen=True)
class Case:
    stage: int
    mode: str = "fp32"
    gas: int = 1
    section: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    options: dict[str, bool] = field(default_factory=dict)
    offload: Offload = Offload.NONE

    @property
    def config(self) -> dict[str, Any]:
        modes = {
            "fp32": {},
            "bf16": {"bf16": {"enabled": True}},
            "fp16": {"fp16": {"enabled": True, "loss_scale": 1}},
        }
        keys = {
            Offload.NONE: (),
            Offload.OPTIMIZER: ("optimizer",),
            Offload.ALL: ("optimizer", "param"),
        }[self.offload]
        places = {f"offload_{key}": {"device": "cpu"} for key in keys}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.gas,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {
                "stage": self.stage,
                "param_persistence_threshold": 40,
                **places,
                **self.section,
            },
            **modes[self.mode],
            **self.extra,
        }


ZENFLOW = {"zenflow": {"topk_ratio": 0.25, "update_interval": 1}}
OFFLOADED = ((1, Offload.OPTIMIZER), (2, Offload.OPTIMIZER), (3, Offload.ALL))
CASES = [
    *(Case(stage, mode, gas) for stage in (0, 1, 2, 3) for mode, gas in (("fp32", 1), ("bf16", 3))),
    Case(1, "fp16", options={"tied": True, "frozen": True}),
    Case(3, "fp16", 1, {"max_reuse_distance": 0}, options={"tied": True, "frozen": True}),
    *(Case(s, "bf16", 2, {"reduce_bucket_size": 5000, "overlap_comm": True}) for s in (1, 3)),
    *(
        Case(s, "bf16", 2, {"contiguous_gradients": False, "allgather_bucket_size": 4000})
        for s in (2, 3)
    ),
    *(Case(s, "bf16", 2, extra={"data_types": {"grad_accum_dtype": "fp32"}}) for s in (0, 1, 3)),
    *(Case(s, "bf16", extra={"communication_data_type": "fp32"}) for s in (0, 2)),
    *(
        Case(s, "fp32", extra={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
        for s in (2, 3)
    ),
    Case(2, section={"reduce_scatter": False, "allgather_partitions": False}),
    Case(2, section={"reduce_scatter": False, "use_multi_rank_bucket_allreduce": False}),
    Case(3, section={"max_reuse_distance": 7000, "prefetch_bucket_size": 3500}),
    Case(3, section={"max_live_parameters": 7000}),
    Case(3, section={"allgather_sequential": True, "use_all_reduce_for_fetch_params": True}),
    Case(3, section={"leaf_module": {"classes": "Block"}, "param_persistence_threshold": 0}),
    *(Case(s, "bf16", gas, offload=Offload.OPTIMIZER) for s, gas in ((1, 1), (1, 3), (2, 3))),
    Case(1, gas=3, section={"contiguous_gradients": False}, offload=Offload.OPTIMIZER),
    Case(2, "bf16", extra={"data_types": {"grad_accum_dtype": "bf16"}}, offload=Offload.OPTIMIZER),
    Case(3, "bf16", 3, {"max_reuse_distance": 0}, options={"frozen": True}, offload=Offload.ALL),
    Case(3, offload=Offload.ALL),
    Case(3, "bf16", 2, {"zero_quantized_weights": True, "max_reuse_distance": 0}),
    Case(3, "fp32", 2, {"zero_quantized_gradients": True}, options={"frozen": True}),
    *(Case(s, "bf16", 2, ZENFLOW, offload=o) for s, o in OFFLOADED),
]
FEW = CASES[:8]  # each stage with its defaults
BLOCKS = {"hpZ": {"zero_hpz_partition_size": 2}, "MiCS": {"mics_shard_size": 2}}
CASES += [Case(3, "bf16", 2, {**section, "max_reuse_distance": 0}) for section in BLOCKS.values()]
CASES.append(
    Case(3, "fp32", 1, BLOCKS["hpZ"], {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
)
CASES.append(
    Case(3, "fp32", 1, {**BLOCKS["hpZ"], "max_reuse_distance": 0}, options={"frozen": True})
)
CASES.append(Case(3, "bf16", 3, BLOCKS["MiCS"], options={"tied": True}, offload=Offload.OPTIMIZER))
QUANTISED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
CASES.append(Case(3, "bf16", 2, {**BLOCKS["hpZ"], **QUANTISED, "max_reuse_distance": 0}))
