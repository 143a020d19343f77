"""Clean rows of the matrix under dscore-verify, and those that once raised an alarm, or stopped it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import matrix
import verified

CLEAN = {
    "counted dropout in parts, computed again": "random=dropout tp=tp recompute=blocks stage=z3",
    "counted dropout in parts of sequences": "random=dropout sp=ring",
    "replays of a step": "replay=replayed gas=4 random=dropout stage=z2",
    "experts of a later stage": "pp=interleaved ep=ep random=dropout",
    "a loss that is a module": "pp=1f1b stage=z1 clip=clip",
    "autocast in a pipeline": "pp=1f1b tp=tp precision=autocast optimizer=Muon",
    "bases that rounding turns": "stage=z3 precision=fp16 optimizer=SOAP wires=hpZ clip=clip",
    "states on disk": "offload=nvme stage=z2 optimizer=SOAP",
}


@pytest.mark.fast_cases("replays of a step", "experts of a later stage")
@pytest.mark.parametrize("name", list(CLEAN))
def test_a_clean_run_raises_no_alarm(name: str) -> None:
    result = verified.judged(matrix.row_of(CLEAN[name], verified.VALUES))
    assert result["kind"] == "equal", result


def test_pipelines_that_divide_sequences_are_refused() -> None:
    result = verified.judged(matrix.row_of("pp=1f1b sp=ring", verified.VALUES))
    assert result["kind"] == "refused", result
    assert "pipeline" in result["said"] and "sequence_parallel.size" in result["said"]


@pytest.mark.slow
def test_the_rows_are_as_many_as_asked_and_all_differ() -> None:
    rows = verified.chosen(90)
    assert len({matrix.title(row) for row in rows}) == 90
