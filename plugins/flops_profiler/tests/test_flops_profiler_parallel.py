"""The section ``flops_profiler`` where weights, stages and experts are spread over two ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ds_moe import MoE
from ds_pipeline import PipelineModule
from ds_testing import run_ranks
from ds_zero import ZeroParamStatus
from torch import Tensor, nn

import ds_core

sys.path.insert(0, str(Path(__file__).parents[2] / "moe" / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

from ds_testing.truth import start
from profiled import Net, lines

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def profiled(model: nn.Module, file: str, **config: Any) -> Any:
    section = {"enabled": True, "output_file": file}
    return start(model, optimizer=SGD, flops_profiler=section, **config)


def at_stage_3(file: str) -> bool:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine = profiled(
        Net(),
        file,
        train_micro_batch_size_per_gpu=2,
        zero_optimization=zero,
        bf16={"enabled": True},
    )
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)))
        engine.step()
    return any(p.ds_status is ZeroParamStatus.AVAILABLE for p in engine.module.parameters())


def test_sharded_weights_count_whole(tmp_path: Path) -> None:
    assert run_ranks(2, at_stage_3, str(tmp_path / "profile.txt")) == [False, False]
    text = (tmp_path / "profile.txt").read_text()
    found = lines(text)
    assert (found["parameters of the model"], found["parameters stored on this rank"]) == (
        "96",
        "48",
    )
    assert found["forward FLOPs per rank"] == str(2 * 2 * 96)
    assert found["forward FLOPs of all ranks"] == str(2 * 2 * 2 * 96)
    # not for the batch
    assert found["backward FLOPs per rank, measured"] == str(2 * 2 * (32 + 32 + 64))
    assert (
        "(first) Linear(in_features=8, out_features=8, bias=False): 64 params 66.67%, 128 MACs "
        "66.67%" in text
    )


def in_two_stages(file: str, schedule: str) -> None:
    layers = [nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)]
    model = PipelineModule(layers, num_stages=2, loss_fn=F.mse_loss, partition_method="uniform")
    batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    engine = profiled(model, file, pipeline={"stages": 2, "schedule": schedule}, **batch)
    for _ in range(2):
        engine.train_batch(iter([(torch.ones(2, 8), torch.zeros(2, 4))] * 3))


def test_stages_of_a_pipeline_are_told_apart_and_added_up(tmp_path: Path) -> None:
    for schedule in ("1f1b", "zero_bubble"):
        file = tmp_path / f"{schedule}.txt"
        run_ranks(2, in_two_stages, str(file), schedule)
        found = lines(file.read_text())
        assert found["parameters of the model"] == "96"
        assert found["parameters of this rank's part of the model"] == "64"
        assert found["forward FLOPs per rank"] == str(2 * 2 * 64)
        assert found["forward FLOPs of all ranks"] == str(2 * 2 * 96)
        # no gradient of the batch
        assert found["backward FLOPs per rank, measured"] == str(2 * 2 * 64)
        ranks = [
            " ".join(line.split())
            for line in file.read_text().splitlines()
            if line.startswith("  rank")
        ]
        assert [r.partition(" params")[0].rpartition(" ")[2] for r in ranks] == ["64", "32"]
        assert [", 256 FLOPs" in r or ", 128 FLOPs" in r for r in ranks] == [True, True]


class MoENet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        expert = nn.Sequential(
            nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False)
        )
        self.moe = MoE(
            8,
            expert,
            num_experts=2,
            ep_size=2,
            k=1,
            min_capacity=0,
            use_rts=False,
            drop_tokens=False,
        )
        with torch.no_grad():
            self.moe.gate.wg.weight.copy_(torch.eye(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        y, aux, _ = self.moe(x)
        return y.square().mean() + 0 * aux


def with_experts(file: str) -> None:
    engine = profiled(MoENet(), file, train_micro_batch_size_per_gpu=6)
    # five tokens for the first expert, on both ranks
    x = F.one_hot(torch.tensor([0, 0, 0, 0, 0, 1]), 8).float()
    for _ in range(2):
        engine.backward(engine(x))
        engine.step()


def test_experts_count_the_tokens_that_they_get(tmp_path: Path) -> None:
    run_ranks(2, with_experts, str(tmp_path / "profile.txt"))
    text = (tmp_path / "profile.txt").read_text()
    found = lines(text)
    ranks = [line for line in text.splitlines() if line.startswith("  rank")]
    assert found["parameters of the model"] == str(2 * 256 + 16)
    assert found["parameters of this rank's part of the model"] == str(256 + 16)
    gate = 6 * 16
    expert = 256
    assert found["forward MACs per rank"] == f"{round((gate + 10 * expert) / 1000, 2)} KMACs"
    assert len(ranks) == 2


def test_blocks_that_autoep_has_taken_over_count_as_before() -> None:
    from autoep_models import OWN_PATTERNS, Own, ids, settings
    from ds_flops_profiler import FlopsProfiler

    def counts(model: Any) -> tuple[int, int]:
        profiler = FlopsProfiler(model)
        batch = ids(0, 0)
        profiler.start_profile()
        model(input_ids=batch, labels=batch)
        profiler.stop_profile()
        assert profiler.counter.unknown == set()
        return profiler.get_total_flops(), profiler.get_total_macs()

    before = counts(Own(False).float())
    engine, *_ = ds_core.initialize(model=Own(False).float(), config=settings(1, 0, **OWN_PATTERNS))
    assert counts(engine) == before and before[1] > 0
    engine.destroy()
