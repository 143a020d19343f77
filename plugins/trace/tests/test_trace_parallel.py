"""Traces of runs under ZeRO-3 and in a pipeline, with planted faults."""

from __future__ import annotations

import sys
from pathlib import Path

import ds_pipeline  # noqa: F401  what the runs need, beside what dscore-trace declares
import ds_zero  # noqa: F401
import pytest
from ds_command_kit.app import make_app
from ds_testing import run_ranks
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))

import traced_runs
from ds_trace.all_ranks import compare, read_run
from traced_runs import row, section


def test_a_rank_that_sleeps_and_a_big_collective_are_named(tmp_path: Path) -> None:
    """ZeRO-3: gathers have the names of weights, the late rank is named with its phase; losses are
    the same.
    """
    traced = run_ranks(2, traced_runs.data_parallel, section(tmp_path / "run"), 3, 1)
    assert traced == run_ranks(2, traced_runs.data_parallel, {}, 3, -1)
    found = compare(read_run(tmp_path / "run"))
    first, second = found.ranks
    assert (first.world, first.steps, first.device) == (2, 2, "cpu")
    assert found.straggler is not None
    assert (found.straggler.rank, found.straggler.phase) == (1, "forward")
    asleep = traced_runs.SLOW * 1e3
    assert found.waited[0] > asleep / 2 > found.waited[1], "the other waits for it"
    assert second.idle / second.steps > asleep / 2 > first.idle / first.steps, (
        "a rank that sleeps is idle"
    )
    assert row(found, "all_gather_into_tensor", "weights of 'up.").calls == pytest.approx(1)
    assert row(found, "reduce_scatter_tensor", "gradients of 'down.")
    assert (
        row(found, "all_reduce", "planted").bytes
        == 4 * traced_runs.PLANTED
        == max(r.bytes for r in found.rows)
    )
    answer = CliRunner().invoke(make_app(), ["trace", str(tmp_path / "run")])
    assert (
        answer.exit_code == 0
        and "straggler: rank 1." in answer.output
        and "planted" in answer.output
    )


def test_what_a_pipeline_waits_for(tmp_path: Path) -> None:
    """The second stage waits for activations of the slow first one, which is to blame though no
    collective says so.
    """
    run_ranks(2, traced_runs.pipeline, section(tmp_path, wait=0))
    found = compare(read_run(tmp_path))
    assert found.rows[0].title == "recv from rank 0"
    assert found.rows[0].worst == 1
    assert found.straggler is not None and found.straggler.rank == 0
    assert found.ranks[1].stalled > found.ranks[1].total / 2
