"""Layouts that divide the model, its sequences or its experts; precisions; and what a recorder
leaves.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ds_moe  # noqa: F401  what the runs need, beside what dscore-verify declares
import ds_pipeline  # noqa: F401
import ds_sequence_parallel  # noqa: F401
import ds_zero  # noqa: F401
import pytest
from ds_testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

import verified_runs
from verified_runs import verify

SLOW = pytest.mark.slow
ZERO_1 = {"zero_optimization": {"stage": 1}}


@pytest.mark.parametrize(
    ("world", "config"),
    [
        pytest.param(2, {}),
        pytest.param(4, ZERO_1, marks=SLOW),
        pytest.param(2, {"pipeline": {"schedule": "zero_bubble"}}, marks=SLOW),
        pytest.param(2, {"pipeline": {"chunks": 2, "schedule": "interleaved"}}, marks=SLOW),
        pytest.param(2, {"pipeline": {"activation_checkpoint_interval": 1}}, marks=SLOW),
        pytest.param(2, {"bf16": {"enabled": True}}, marks=SLOW),
    ],
)
def test_stages_are_aligned_by_name(tmp_path: Path, world: int, config: dict[str, Any]) -> None:
    """Two stages against one process: layers, tied weights, dropout, any schedule."""
    report = verify(run_ranks, tmp_path, config, world=world, script=verified_runs.train_stages)
    assert report.first is None, (report.first, report.cause)
    forwards = {row.name: row.rank % 2 for row in report.rows if row.kind == "forward"}
    assert {"layers.1, output 0", "layers.4, output 0", "the model, output 0"} <= set(forwards)
    gradients = {row.name for row in report.rows if row.kind == "gradient"}
    assert {"tied.tok.weight", "layers.1.up.weight", "layers.4.up.weight"} <= gradients
    assert not report.skipped


def test_autocast_of_a_reference_uses_the_weights_of_its_step(tmp_path: Path) -> None:
    """All of a replay runs inside of one forward, whose autocast kept the weights of step 0."""
    config = {**ZERO_1, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    report = verify(run_ranks, tmp_path, config)
    forwards = [row for row in report.rows if row.kind == "forward"]
    assert {row.step for row in forwards} == {0, 1}
    assert max(row.ratio for row in forwards) == 0.0


@SLOW
def test_a_fault_in_a_stage_is_named(tmp_path: Path) -> None:
    config = {
        **ZERO_1,
        "plugins": {"load": ["fault=faults"]},
        "fault": {"kind": "not_reduced", "name": "layers.3.up.weight"},
    }
    report = verify(run_ranks, tmp_path, config, world=4, script=verified_runs.train_stages)
    assert report.first is not None
    assert (report.first.kind, report.first.name) == ("gradient", "layers.3.up.weight")
    assert "a reduction" in report.cause


def test_sequences_that_ranks_divide(tmp_path: Path) -> None:
    """A micro-batch's own gradient is the mean of its ranks'; parts of activations are told."""
    config = {**ZERO_1, "sequence_parallel": {"size": 2, "inputs": {"tokens": 1, "labels": 1}}}
    report = verify(run_ranks, tmp_path, config, script=verified_runs.train_divided)
    assert report.first is None, (report.first, report.cause)
    kinds = {row.kind for row in report.rows}
    assert kinds >= {"forward", "local gradient", "gradient", "norm", "weight"}
    assert "forward attention, output 0" in report.skipped


@SLOW
def test_another_layout_is_the_reference(tmp_path: Path) -> None:
    """ZeRO-3 on four ranks against ZeRO-1 on two."""
    config = {"zero_optimization": {"stage": 3}}
    report = verify(run_ranks, tmp_path, config, world=4, against=ZERO_1, reference_world=2)
    assert report.first is None, (report.first, report.cause)
    assert {row.rank for row in report.rows} == {0, 1, 2, 3}


@SLOW
def test_experts_that_ranks_divide(tmp_path: Path) -> None:
    report = verify(run_ranks, tmp_path, ZERO_1, script=verified_runs.train_experts)
    assert report.first is None, (report.first, report.cause)
    for rank in (0, 1):
        rows = {row.name for row in report.rows if row.kind == "gradient" and row.rank == rank}
        assert any("experts" in name for name in rows)


@SLOW
@pytest.mark.parametrize("script", ["run_script", "train_stages"])
def test_skipped_steps_of_fp16(tmp_path: Path, script: str) -> None:
    """A step that overflows is skipped in both, and the next has a smaller scale in both."""
    fp16 = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 2}
    config = {"fp16": fp16, **ZERO_1}
    report = verify(run_ranks, tmp_path, config, steps=6, script=getattr(verified_runs, script))
    assert report.first is None, (report.first, report.cause)
    made = {row.step for row in report.rows if row.kind == "gradient"}
    assert 0 not in made and made, "the first step overflows, and a later one does not"


def test_a_destroyed_engine_leaves_no_hook(tmp_path: Path) -> None:
    assert run_ranks(1, verified_runs.hooks_left, str(tmp_path / "record")) == [(True, 0)]


@pytest.mark.parametrize("fault", [False, pytest.param(True, marks=SLOW)])
def test_two_engines_are_compared(fault: bool) -> None:
    """On the ranks of one program, which have their weights and states back afterwards."""
    answers = run_ranks(
        2, verified_runs.compare_engines, {"zero_optimization": {"stage": 2}}, fault
    )
    named = "local gradient blocks.1.up.weight" if fault else "equal"
    for first, moved, hooks in answers:
        assert first == named
        assert moved and not any(moved)
        assert not hooks
