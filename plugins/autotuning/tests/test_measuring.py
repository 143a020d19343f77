"""What a trial writes down: times, memory, the model's profile; and how it ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_autotuning.plugin import MEASURING
from ds_autotuning.records import Profile, Result, Status
from ds_autotuning.trials.measuring import is_out_of_memory
from ds_testing.processes import clean_environment
from ds_testing.pytest_plugin import Ranks
from torch import nn

import ds_core

ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}


class Net(nn.Module):
    """Blocks, and an output that is tied to the input."""

    def __init__(self, width: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        blocks = (
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(layers)
        )
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = h + block(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())


def trial(
    folder: str, steps: int, stage: int = 0, resumed: int = 0, section: Any = None
) -> list[str]:
    """Train until the trial wants to end; returns what happened, step by step."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": ADAM,
        "zero_optimization": {"stage": stage},
        "autotuning": {"enabled": True, "metric_path": f"{folder}/result.json", **(section or {})},
    }
    engine, *_ = ds_core.initialize(model=Net(), config=config)
    # as load_checkpoint does
    engine.global_steps = resumed
    engine.global_samples = 100 * resumed
    said: list[str] = []
    measuring = engine.ctx.stash[MEASURING]
    measuring._end = lambda: said.append("end")
    for step in range(steps):
        for _ in range(2):
            engine.backward(engine(torch.randint(0, 16, (2, 5))))
            engine.step()
        if said and said[-1] == "end":
            said.append(f"after step {step + 1}")
            break
    return said


@pytest.mark.parametrize(("size", "stage"), [(1, 0), (2, 0), (2, 3)])
def test_a_trial_writes_its_result_and_ends(
    ranks: Ranks, tmp_path: Path, size: int, stage: int
) -> None:
    done = ranks(size, trial, str(tmp_path), 20, stage)
    assert done == [["end", "after step 5"]] * size
    result = Result.from_json(json.loads((tmp_path / "result.json").read_text()))
    assert result.status is Status.DONE and len(result.seconds) == 3
    assert result.latency == sorted(result.seconds)[1]
    assert result.throughput == pytest.approx(2 * 2 * size / result.latency)
    assert (
        result.flops is None
        and result.peak_device == result.peak_host
        and result.peak_device > 10**7
    )
    assert not (tmp_path / "profile.json").exists()


def test_the_first_step_can_be_timed_and_steps_of_a_resumed_run_count_anew(
    ranks: Ranks, tmp_path: Path
) -> None:
    (said,) = ranks(
        1, trial, str(tmp_path), 20, 0, 7, {"start_profile_step": 1, "end_profile_step": 2}
    )
    assert said == ["end", "after step 2"]
    result = Result.from_json(json.loads((tmp_path / "result.json").read_text()))
    assert len(result.seconds) == 2 and result.latency is not None
    assert result.throughput == pytest.approx(4 / result.latency)


def test_flops_are_those_of_a_whole_step_of_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks(2, trial, str(tmp_path), 20, 1, 0, {"metric": "flops"})
    assert said == [["end", "after step 6"]] * 2  # one more, in which operations are counted
    result = Result.from_json(json.loads((tmp_path / "result.json").read_text()))
    assert result.flops is not None and result.latency is not None
    # Forward once, backward twice: of 3 layers of 8 x 8 and a head of 8 x 16, for 2 micro-batches
    # of 10 tokens.
    assert result.flops * result.latency == pytest.approx(3 * 2 * (3 * 8 * 8 + 8 * 16) * 20)


def test_a_profile_run_describes_the_model_as_the_script_made_it(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(2, trial, str(tmp_path), 20, 3, 0, {"model_info": {"profile": True}})
    profile = Profile.from_json(json.loads((tmp_path / "profile.json").read_text()))
    own = sum(p.numel() for p in Net().parameters())
    assert (profile.parameters, profile.trainable) == (own, own)
    assert [row.path for row in profile.modules] == [name for name, _ in Net().named_modules()]
    head = next(row for row in profile.modules if row.path == "head")
    assert head.parameters[0].shared == "embed.weight" and head.parameters[0].shape == (16, 8)
    facts = profile.facts
    assert (facts["world"], facts["device"], facts["sequence_length"], facts["layers"]) == (
        2,
        "cpu",
        5,
        3,
    )
    assert 0 < facts["recomputed_part"] < 1
    assert facts["hidden_size"] == 8 and not facts["pipeline"] and not facts["transformers"]
    assert facts["device_memory"] > 0 and facts["config"]["optimizer"] == ADAM
    assert facts["peaks"]["2"]["device"] > 0 and profile.seconds[2] > 0


def fails(folder: str) -> None:
    """An exception that nothing catches."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": ADAM,
        "autotuning": {"enabled": True, "metric_path": f"{folder}/result.json"},
        "plugins": {"prefer": {"my_token": "hunter2hunter2"}},
    }
    engine, *_ = ds_core.initialize(model=Net(), config=config)
    engine.ctx.stash[MEASURING].failed(RuntimeError("wrong: hunter2hunter2\nmore"))


def test_why_it_failed_is_written_without_secrets(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, fails, str(tmp_path))
    result = Result.from_json(json.loads((tmp_path / "result.json").read_text()))
    assert result.status is Status.CRASHED and result.reason.startswith(
        "rank 0: RuntimeError: wrong: "
    )
    assert "hunter2" not in result.reason and "more" not in result.reason


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate "
                "memory: you"
            ),
            True,
        ),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("shapes do not fit"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


SCRIPT = """
import sys, torch, ds_core
model = torch.nn.Linear(4, 4)
engine, *_ = ds_core.initialize(model=model, config=sys.argv[1])
try:
    while True:  # it never asks engine.should_stop
        if len(sys.argv) > 2 and engine.global_steps == 2:
            raise torch.OutOfMemoryError("no more")
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
finally:
    open("saved", "w")  # a checkpoint, say
"""


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_a_script_that_never_ends_is_ended(tmp_path: Path, fails: bool) -> None:
    import subprocess

    (tmp_path / "script.py").write_text(SCRIPT)
    section = {"enabled": True, "metric_path": str(tmp_path / "result.json")}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAM, "autotuning": section}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [
        str(Path(sys.executable).with_name("dscore")),
        "run",
        "--nproc",
        "2",
        "script.py",
        "config.json",
    ]
    done = subprocess.run(
        [*command, *(["oom"] if fails else [])],
        cwd=tmp_path,
        env=clean_environment(),
        timeout=200,
        check=False,
    )
    result = Result.from_json(json.loads((tmp_path / "result.json").read_text()))
    if fails:
        assert (
            done.returncode != 0
            and result.status is Status.OUT_OF_MEMORY
            and "no more" in result.reason
        )
    else:
        assert done.returncode == 0 and result.status is Status.DONE
        assert not (tmp_path / "saved").exists()
