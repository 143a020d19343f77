"""DeepSpeed's spelling of the log: ``deepspeed.comm.comms_logger`` reads and switches what the
section installs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_comms_logger import deepspeed_names as names
from ds_comms_logger import installed_log
from ds_testing import run_ranks

from ds_core import comm
from ds_core.comm.interceptor import reset
from ds_core.errors import ConfigError, UsageError


def calls() -> None:
    for _ in range(3):
        comm.all_reduce(torch.ones(10))
    comm.all_reduce(torch.ones(20))
    comm.broadcast(torch.ones(4), 0)


def as_a_program_uses_it() -> dict[str, Any]:
    logger = names.comms_logger
    try:
        names.configure(prof_all=False, prof_ops=["all_reduce"])
        assert not logger.enabled and installed_log() is None
        names.configure(enabled=True)
        assert not logger.prof_all
        calls()
        only = names.get_logged_comm_ops()
        logger.start_profiling_comms()
        logger.comms_dict = {}
        assert not names.has_comm_data()
        calls()
        totals = logger.comms_dict
        counts = [
            (op, size, entry[0]) for op, sizes in totals.items() for size, entry in sizes.items()
        ]
        count, latencies, _, busbw = totals["all_reduce"][40]
        row = next(r for r in installed_log().rows() if (r.op, r.bytes) == ("all_reduce", 40))  # type: ignore[union-attr]
        assert len(latencies) == count and sum(latencies) == pytest.approx(row.total_ms)
        assert busbw[0] == pytest.approx(8 * row.busbw)
        stats = names.log_summary(show_straggler=True, return_dict=True)
        assert stats is not None and names.log_summary() is None
        behind = stats["straggler_analysis"]["all_reduce"][40]
        assert behind["total_comm_lat_ms"] + behind["total_straggler_ms"] == pytest.approx(
            row.total_ms
        )
        assert behind["total_straggler_ms"] >= 0
        total = names.get_comm_operation_count()
        names.reset_log()
        assert names.get_comm_operation_count() == 0
        logger.enabled = False
        assert installed_log() is None
        return {
            "only": only,
            "counts": counts,
            "total": total,
            "metadata": stats["metadata"]["world_size"],
        }
    finally:
        reset()


def test_a_program_of_deepspeed_reads_and_switches_the_log() -> None:
    for seen in run_ranks(2, as_a_program_uses_it):
        assert seen["only"] == ["all_reduce"]
        assert seen["counts"] == [
            ("all_reduce", 40, 3),
            ("all_reduce", 80, 1),
            ("broadcast", 16, 1),
        ]
        assert seen["total"] == 7  # the two barriers of the summaries too
        assert seen["metadata"] == 2


def test_what_cannot_be_put_into_effect_is_an_error() -> None:
    try:
        with pytest.raises(UsageError, match="by \\{\\}"):
            names.comms_logger.comms_dict = {"all_reduce": {1: [1, [1.0], [1.0], [1.0]]}}
        with pytest.raises(ConfigError, match="all_reduce"):
            names.configure(enabled=True, prof_all=False, prof_ops=["all_reduse"])
        assert installed_log() is None
    finally:
        reset()
