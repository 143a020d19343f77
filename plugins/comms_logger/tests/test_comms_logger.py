"""The comms log: what it counts, its bandwidths, its table, and that it is not there when it is
off.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ds_comms_logger import CommsLog, configure, installed_log, log_summary
from ds_comms_logger.log import bandwidths
from ds_testing import run_ranks

from ds_core import comm
from ds_core.comm.interceptor import reset
from ds_core.errors import ConfigError


def logged_run(section: dict[str, Any]) -> list[tuple[str, str, int, int]]:
    size = comm.world_size()
    configure(section)
    try:
        for _ in range(3):
            comm.all_reduce(torch.ones(10))
        work = comm.all_reduce(torch.ones(20), async_op=True)
        assert work is not None
        if (log := installed_log()) is not None and log.ops is None:
            assert work.is_completed()  # synchronised
        work.wait()
        comm.all_gather_into_tensor(torch.empty(5 * size), torch.ones(5))
        comm.reduce_scatter_tensor(torch.empty(7), torch.ones(7 * size), dist.ReduceOp.AVG)
        comm.all_to_all_single(torch.empty(size), torch.ones(size))
        comm.barrier()
        got = torch.empty(3)
        right = (comm.rank() + 1) % size
        left = (comm.rank() - 1) % size
        works = [comm.isend(torch.ones(3), right), comm.irecv(got, left)]
        for message in works:
            message.wait()
            message.wait()
        assert got.sum() == 3
        rows = log_summary()
        assert all(
            row.total_ms > 0 and row.average_ms == pytest.approx(row.total_ms / row.count)
            for row in rows
        )
        assert all(row.straggler_ms is None for row in rows)
        return [(row.op, row.site, row.bytes, row.count) for row in rows]
    finally:
        reset()


def test_every_operation_is_counted_by_size() -> None:
    for rows in run_ranks(2, logged_run, {"enabled": True}):
        assert rows == [
            ("all_gather_into_tensor", "", 40, 1),
            ("all_reduce", "", 40, 3),
            ("all_reduce", "", 80, 1),
            ("all_to_all_single", "", 8, 1),
            ("barrier", "", 0, 1),
            ("irecv", "", 12, 1),
            ("isend", "", 12, 1),
            ("reduce_scatter_tensor", "", 56, 1),
        ]


def test_only_the_named_operations() -> None:
    section = {"enabled": True, "prof_all": False, "prof_ops": ["all_to_all_single"]}
    assert run_ranks(2, logged_run, section) == [[("all_to_all_single", "", 8, 1)]] * 2


def test_off_records_nothing() -> None:
    assert run_ranks(2, logged_run, {"enabled": False}) == [[], []]


def test_one_rank_has_nothing_to_log() -> None:
    configure({"enabled": True})
    try:
        comm.all_reduce(torch.ones(3))
        assert log_summary() == []
    finally:
        reset()


def test_debug_tells_call_sites_apart() -> None:
    rows = run_ranks(2, logged_run, {"enabled": True, "debug": True})[0]
    sites = [site for op, site, _, _ in rows if op == "all_reduce"]
    assert len(set(sites)) == 2
    assert all(
        site.startswith("test_comms_logger.py:") and site.endswith(" in logged_run")
        for site in sites
    )
    assert all(
        site.startswith("test_comms_logger.py:")
        for op, site, _, _ in rows
        if op in ("isend", "irecv")
    )


def stragglers() -> list[Any]:
    configure({"enabled": True})
    try:
        log = installed_log()
        assert log is not None
        log.record("all_reduce", "", 8, 2, 0.25 if comm.rank() else 0.75)
        if comm.rank() == 0:
            log.record("send", "", 8, 2, 0.5)
        first = [(row.op, row.straggler_ms) for row in log_summary(show_straggler=True)]
        second = [(row.op, row.straggler_ms) for row in log_summary(show_straggler=True)]
        assert first == second  # looking adds nothing to what is looked at
        return first
    finally:
        reset()


def test_stragglers_are_the_spread_over_the_ranks() -> None:
    on_0, on_1 = run_ranks(2, stragglers)
    assert on_0 == [("all_reduce", pytest.approx(500.0)), ("send", pytest.approx(0.0))]
    assert on_1 == [("all_reduce", pytest.approx(500.0))]


def test_bandwidths() -> None:
    assert bandwidths("all_reduce", 1_000_000_000, 4, 0.5) == (2.0, 3.0)  # 2 (n - 1) / n
    for op in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        assert bandwidths(op, 1_000_000_000, 4, 0.5) == (2.0, 1.5)  # (n - 1) / n
    for op in ("broadcast", "reduce", "send", "recv"):
        assert bandwidths(op, 1_000_000_000, 4, 0.5) == (2.0, 2.0)
    assert bandwidths("barrier", 0, 4, 0.5) == (0.0, 0.0)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    configure({"enabled": True})
    try:
        log = installed_log()
        assert log is not None
        log.record("all_reduce", "", 4096, 2, 0.5)
        (row,) = log_summary()
        assert (row.op, row.bytes, row.count, row.total_ms, row.average_ms) == (
            "all_reduce",
            4096,
            1,
            500.0,
            500.0,
        )
        head, line = capsys.readouterr().out.splitlines()
        assert head.split()[:3] == ["op", "bytes", "count"]  # no site column without debug
        assert line.split()[:4] == ["all_reduce", "4096", "1", "500.000"]
        log_summary(show_straggler=True)
        assert capsys.readouterr().out.splitlines()[0].endswith("straggler ms")
        log.clear()
        assert log_summary() == []
    finally:
        reset()
    assert installed_log() is None


def test_verbose_logs_each_call(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ds_core.comm"):
        CommsLog(verbose=True).record("broadcast", "train.py:3 in main", 2_000_000, 2, 0.001)
        CommsLog().record("broadcast", "", 2_000_000, 2, 0.001)
    (message,) = caplog.messages
    expected = (
        "broadcast at train.py:3 in main: 2000000 bytes, 1.000 ms, algbw 2.000 GB/s, busbw "
        "2.000 "
        "GB/s"
    )
    assert message == expected


def test_an_unknown_operation_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"comms_logger.prof_ops: 'all_reduse' is no operation; .*'all_reduce'"
    ):
        configure({"enabled": True, "prof_all": False, "prof_ops": ["all_reduse"]})
    assert installed_log() is None


def test_configuring_again_keeps_what_was_recorded() -> None:
    try:
        configure({"enabled": True})
        log = installed_log()
        assert log is not None
        log.record("send", "", 1, 2, 0.1)
        configure({"enabled": True, "verbose": True})
        assert [row.op for row in log_summary()] == ["send"]
        configure({"enabled": False})
        assert log_summary() == []
    finally:
        reset()


def test_prof_ops_takes_the_names_of_functions() -> None:
    try:
        log = configure(
            {"enabled": True, "prof_all": False, "prof_ops": ["all_gather", "all_reduce"]}
        )
        assert log is not None and log.ops == {"all_gather_into_tensor", "all_reduce"}
    finally:
        reset()
