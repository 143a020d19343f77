"""Schedules: the documented order to the letter, and proofs for any size."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ds_pipeline.schedules.planned import InterleavedSchedule, ZeroBubbleSchedule
from ds_pipeline.schedules.schedule import (
    BackwardPass,
    DataParallelSchedule,
    ForwardPass,
    InferenceSchedule,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    ReduceGrads,
    SendGrad,
    TrainSchedule,
)
from ds_pipeline.schedules.validate import ScheduleError, check
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from own_schedule import GPipe

SHORT = {
    "LoadMicroBatch": "L",
    "ForwardPass": "F",
    "BackwardPass": "B",
    "SendActivation": "SA",
    "RecvActivation": "RA",
    "SendGrad": "SG",
    "RecvGrad": "RG",
}


def text(schedule: PipeSchedule) -> list[str]:
    """The golden tables' notation: one string per step."""
    rows = []
    for step in schedule:
        words = [f"{SHORT[c.name]}{c.buffer_id}" for c in step if c.name in SHORT]
        names = [c.name for c in step if c.name not in SHORT]
        if names:
            assert names == ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
            words.append("R")
        rows.append(" ".join(words))
    return rows


GOLDEN = {
    (4, 2): [
        [
            "L0 F0",
            "SA0",
            "L1 F1",
            "RG0 SA1 B0",
            "L0 F0",
            "RG1 SA0 B1",
            "L1 F1",
            "RG0 SA1 B0",
            "",
            "RG1 B1 R",
        ],
        [
            "",
            "RA0 L0 F0",
            "B0",
            "SG0 RA1 L1 F1",
            "B1",
            "SG1 RA0 L0 F0",
            "B0",
            "SG0 RA1 L1 F1",
            "B1",
            "SG1 R",
        ],
    ],
    (2, 3): [
        ["L0 F0", "SA0", "L1 F1", "SA1", "", "RG0 B0", "", "RG1 B1 R"],
        ["", "RA0 F0", "SA0", "RA1 F1", "RG0 SA1 B0", "SG0", "RG1 B1", "SG1 R"],
        ["", "", "RA0 L0 F0", "B0", "SG0 RA1 L1 F1", "B1", "SG1", "R"],
    ],
}


@pytest.mark.parametrize("size", list(GOLDEN))
def test_1f1b_is_as_documented(size: tuple[int, int]) -> None:
    for stage, rows in enumerate(GOLDEN[size]):
        assert text(TrainSchedule(*size, stage)) == rows


@pytest.mark.parametrize(("size", "buffers"), [((6, 4), [4, 3, 2, 2]), ((8, 3), [3, 2, 2])])
def test_buffers_are_as_documented(size: tuple[int, int], buffers: list[int]) -> None:
    assert [TrainSchedule(*size, s).num_pipe_buffers() for s in range(size[1])] == buffers


def test_inference_is_as_documented() -> None:
    assert text(InferenceSchedule(3, 2, 0)) == ["L0 F0", "L1 SA0 F1", "L0 SA1 F0", "SA0"]
    assert text(InferenceSchedule(3, 2, 1)) == ["", "L0 RA0 F0", "L1 RA1 F1", "L0 RA0 F0"]


def test_data_parallel_is_as_documented() -> None:
    steps = list(DataParallelSchedule(2, 1, 0))
    assert steps[0] == [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
    assert steps[1] == [*steps[0], ReduceGrads(), OptimizerStep()]
    assert check(lambda s: DataParallelSchedule(3, 1, s)).bubble == 0


def test_instructions_compare_by_name_and_arguments() -> None:
    assert ForwardPass(1) == ForwardPass(1) != ForwardPass(2) != BackwardPass(2)
    assert ForwardPass(1) != "ForwardPass"
    assert repr(SendGrad(3)) == "SendGrad(buffer_id=3)"
    assert PipeInstruction(a=1).a == 1  # type: ignore[attr-defined]
    assert len({ForwardPass(1), ForwardPass(1), ForwardPass(2)}) == 2


micro = st.integers(1, 14)
stages = st.integers(1, 6)
chunks = st.integers(1, 4)


@given(micro, stages, st.booleans())
def test_1f1b_is_proven(m: int, s: int, waiting: bool) -> None:
    proof = check(lambda i: TrainSchedule(m, s, i), waiting=waiting, backward=1.0)
    assert proof.activations == tuple(min(s - i, m) for i in range(s))
    assert proof.makespan == 2 * (m + s - 1)
    assert proof.bubble == pytest.approx((s - 1) / (m + s - 1))


@given(micro, stages, st.booleans())
def test_inference_is_proven(m: int, s: int, waiting: bool) -> None:
    assert (
        check(lambda i: InferenceSchedule(m, s, i), train=False, waiting=waiting).makespan
        == m + s - 1
    )


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(micro, stages, chunks)
def test_interleaved_is_proven(m: int, s: int, c: int) -> None:
    proof = check(lambda i: InterleavedSchedule(m, s, i, c))
    if m % s == 0:
        assert proof.makespan == 3 * c * m + 3 * (s - 1)
    most = 3 * (c * -(-m // s) * s + s - 1)
    assert proof.makespan <= most, "never more than the next multiple of the stages would take"
    assert all(
        a <= 2 * (s - i - 1) + (c - 1) * s + 1 for i, a in enumerate(proof.activations) if c > 1
    )


@settings(deadline=None)
@given(micro, stages)
def test_zero_bubble_is_proven(m: int, s: int) -> None:
    proof = check(lambda i: ZeroBubbleSchedule(m, s, i))
    plain = check(lambda i: TrainSchedule(m, s, i))
    assert proof.makespan <= plain.makespan
    assert all(a <= s + 1 for a in proof.activations)
    if m >= s:
        assert proof.makespan == 3 * m + s - 1, "Qi et al. 2023, table 2: (S - 1)(F + B - W) idle"


def test_the_issues_ideals() -> None:
    assert check(lambda i: TrainSchedule(8, 2, i)).speedup == pytest.approx(16 / 9)
    assert check(lambda i: ZeroBubbleSchedule(8, 2, i)).speedup > 1.9


# -- schedules that are wrong ----------------------------------------------------------------------


class Broken(TrainSchedule):
    """1F1B with one instruction changed."""

    def __init__(self, *sizes: int, change: str) -> None:
        super().__init__(*sizes)
        self.change = change

    def steps(self) -> Iterator[list[PipeInstruction]]:
        changed = False
        for step in super().steps():
            for i, what in enumerate(step):
                if not changed and what.name == self.change and self.stage_id == 1:
                    changed = True
                    step = step[:i] + step[i + 1 :]
            yield step


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("ForwardPass", "stage 1, "),
        ("BackwardPass", "stage 1"),
        ("SendActivation", "deadlock|never|what comes"),
        ("SendGrad", "deadlock|what comes|a gradient of"),
        ("RecvActivation", "stage 1"),
        ("RecvGrad", "stage 1"),
        ("OptimizerStep", "stage 1 ends with"),
        ("ReduceTiedGrads", "stage 1 ends with"),
    ],
)
def test_what_is_left_out_is_noticed(change: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        check(lambda i: Broken(5, 3, i, change=change))


@given(micro, stages)
def test_a_schedule_of_ones_own(m: int, s: int) -> None:
    proof = check(lambda i: GPipe(m, s, i))
    assert proof.activations == (m,) * s


@pytest.mark.parametrize("sizes", [(0, 2, 0), (2, 0, 0), (2, 2, 2), (2, 2, -1)])
def test_sizes_that_make_no_sense(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="no schedule"):
        TrainSchedule(*sizes)
