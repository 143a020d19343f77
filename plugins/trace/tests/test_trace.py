"""Traces of runs with planted faults, and what ``dscore trace`` says of them."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from ds_command_kit.app import make_app
from ds_testing import InterceptorConformance, PluginConformance
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))

from ds_trace.all_ranks import compare, read_run
from ds_trace.names import Named, parse_comm, shown_ranks
from ds_trace.reading import read_trace
from ds_trace.spans import merge, overlap, without
from traced_runs import row, section

from ds_core.errors import UsageError


class TestPlugin(PluginConformance):
    entry_point = "ds_trace.plugin"
    section = "torch_profiler"
    good_config: ClassVar[Any] = {
        "enabled": True,
        "folder": "there",
        "wait": 0,
        "record": 1,
        "ranks": [0],
    }
    bad_configs: ClassVar[Any] = [
        {"record": 0},
        {"warmup": 0},
        {"ranks": []},
        {"ranks": [-1]},
        {"steps": 3},
    ]


class TestInterceptor(InterceptorConformance):
    config: ClassVar[Any] = {"torch_profiler": {"enabled": True, "wait": 100}}


# -- real runs -------------------------------------------------------------------------------------


def make_steps(engine: Any, steps: int) -> None:
    import torch

    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 3)).square().mean())
        engine.step()


@pytest.mark.usefixtures("clean_ds")
def test_a_run_that_ends_early_keeps_what_was_recorded(tmp_path: Path) -> None:
    import torch

    import ds_core

    given = {
        "train_micro_batch_size_per_gpu": 2,
        "torch_profiler": section(tmp_path, wait=0, record=50, shapes=True),
    }
    engine, *_ = ds_core.initialize(
        model=torch.nn.Linear(3, 1), config={**given, "optimizer": {"type": "SGD"}}
    )
    make_steps(engine, 3)
    assert list(tmp_path.iterdir()) == []
    engine.destroy()
    (rank,) = read_run(tmp_path)
    assert (rank.steps, rank.world) == (2, 1)
    answer = CliRunner().invoke(make_app(), ["trace", str(tmp_path), "--json"])
    said = json.loads(answer.output)
    assert said["straggler"] is None and said["collectives"] == []
    parts = said["ranks"][0]
    assert parts["compute"] + parts["collectives"] + parts["idle"] == pytest.approx(parts["step"])


# -- traces of GPUs --------------------------------------------------------------------------------

NAME = "all_reduce | gradients of 'a' | 1024 B | ranks 0-1 | 0#{}"


def gpu_trace(folder: Path, rank: int, late: float, offset: float) -> None:
    """As torch writes it with CUDA: the program is far ahead of the device, and clocks of ranks
    differ by `offset`.

    Per step of 100 us: kernels 0-40 (and `late` more), the collective from there to the same end on
    all ranks, 10 of it beside a kernel; then a kernel of 10 that nothing names.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "ts": 0, "pid": 0, "args": {"name": "python"}}
    ]

    def add(cat: str, name: str, begin: float, end: float, tid: int = 7) -> None:
        event = {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": 0,
            "tid": tid,
            "ts": begin + offset,
            "dur": end - begin,
        }
        events.append(event)

    for step in range(2):
        at = 100.0 * step
        add("user_annotation", f"ProfilerStep#{step}", at, at + 100, 1)
        add("user_annotation", "phase: forward", at, at + 2, 1)
        add("user_annotation", f"comm: {NAME.format(step)}", at + 2, at + 3, 1)
        add("cpu_op", "aten::mm", at, at + 1, 1)
        add("gpu_user_annotation", "phase: forward", at, at + 40 + late)
        add("kernel", "gemm", at, at + 40 + late)
        add("gpu_user_annotation", f"comm: {NAME.format(step)}", at + 40 + late, at + 80, 20)
        add("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", at + 40 + late, at + 80, 20)
        add("gpu_memcpy", "Memcpy DtoD", at + 70, at + 80)
        add("kernel", "ncclDevKernel_Broadcast(args)", at + 80, at + 85, 20)
    document = {
        "schemaVersion": 1,
        "ds_core": {"rank": rank, "world": 2, "device": "cuda"},
        "traceEvents": events,
    }
    with gzip.open(folder / f"rank{rank}.json.gz", "wt") as file:
        json.dump({**document, "traceName": "x"}, file)


def test_on_a_gpu_kernels_count(tmp_path: Path) -> None:
    """What the device does, not what the program does; and the late rank is found though clocks
    differ by an hour.
    """
    gpu_trace(tmp_path, 0, 0, 0)
    gpu_trace(tmp_path, 1, 25, 3.6e9)
    found = compare(read_run(tmp_path))
    first, second = found.ranks
    assert first.device == "cuda" and first.total == pytest.approx(0.2)
    assert [first.compute, second.compute] == pytest.approx([0.1, 0.15])
    assert [first.stalled, second.stalled] == pytest.approx([0.07, 0.02])
    assert first.idle == pytest.approx(0.03)
    assert [first.phases["forward"], second.phases["forward"]] == pytest.approx([0.08, 0.13])
    named = row(found, "all_reduce", "gradients of 'a'")
    assert named.cost == pytest.approx((0.03 + 0.005) / 2)
    assert named.waiting == pytest.approx(0.015 / 2), (
        "15 us are the collective's own: what the last rank spends in it"
    )
    assert row(found, "ncclDevKernel_Broadcast").cost == pytest.approx(0.005)
    assert found.straggler is not None
    assert (found.straggler.rank, found.straggler.phase) == (1, "forward")
    assert found.straggler.longer == pytest.approx(0.025)


# -- files and arithmetic --------------------------------------------------------------------------


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no trace here; files are called rank0.json.gz"):
        read_run(tmp_path)
    file = tmp_path / "rank0.json"
    for text in (
        "",
        "[]",
        '{"traceEvents": [{"a": 1}',
        '{"traceEvents": [1, 2',
        '{"a": ' + "[" * 100_000,
    ):
        file.write_text(text)
        with pytest.raises(
            UsageError, match="rank0.json: not a trace of torch.profiler, or cut off"
        ):
            read_run(tmp_path)
    file.write_text('{"traceEvents": [], "traceName": "x"}')
    with pytest.raises(UsageError, match="was not written by the section torch_profiler"):
        read_run(tmp_path)
    file.unlink()
    gpu_trace(tmp_path, 0, 0, 0)
    whole = (tmp_path / "rank0.json.gz").read_bytes()
    (tmp_path / "rank0.json.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="cut off"):
        read_run(tmp_path)
    gpu_trace(tmp_path, 0, 0, 0)
    (tmp_path / "rank1.json").write_text(
        '{"ds_core": {"rank": 1, "world": 8}, "traceEvents": [{"ph": "X", "cat": '
        '"user_annotation", '
        '"name": "ProfilerStep#1", "ts": 1, "dur": 1}], "traceName": ""}'
    )
    with pytest.raises(
        UsageError, match=r"rank1.json is of 1 steps on 8 ranks, rank0.json.gz of 2 on 2; remove"
    ):
        read_run(tmp_path)


def test_hostile_traces_end_soon_and_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = '{"ph": "X", "cat": "cpu_op", "name": "a", "ts": %s, "dur": 1}'
    steps = '{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 1, "dur": 1}'
    odd = ", ".join(event % ts for ts in ('"x"', "null", "[]", "1" * 400))
    whole = (
        f'{{"ds_core": {{"rank": 0, "world": 1}}, "traceEvents": [{odd}, {steps}], '
        '"traceName": '
        '""}'
    )
    (tmp_path / "rank0.json").write_text(whole)
    assert len(read_run(tmp_path)) == 1
    (tmp_path / "rank0.json").write_text(" " * 5_000_000)
    with pytest.raises(UsageError, match="cut off"):
        read_run(tmp_path)
    monkeypatch.setattr("ds_trace.reading.LONGEST", 1 << 20)
    (tmp_path / "rank0.json").write_text('{"a": "' + "b" * 5_000_000)
    with pytest.raises(UsageError, match="a value of more than 1 MiB"):
        read_run(tmp_path)
    (tmp_path / "rank0.json").unlink()
    os.mkfifo(tmp_path / "rank0.json")
    with pytest.raises(UsageError):
        read_run(tmp_path)


def test_a_trace_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the length of a piece: in the middle of a string, a number, an escape."""
    events = [{"name": 'a "quoted"\n| é', "ts": 12.25, "n": -3}, {}, {"x": [1, {"y": None}]}]
    file = tmp_path / "rank0.json"
    file.write_text(json.dumps({"schemaVersion": 12, "traceEvents": events, "end": "z"}, indent=1))
    for piece in (1, 2, 3, 7, 50, 4096):
        monkeypatch.setattr("ds_trace.reading.PIECE", piece)
        head: dict[str, Any] = {}
        assert list(read_trace(file, head.__setitem__)) == events
        assert head == {"schemaVersion": 12, "end": "z"}


def test_names_are_read_as_they_were_written() -> None:
    for named in (
        Named("all_reduce", "gradients of 'a'", 12, "0-3,6", "0#7"),
        Named("recv", "", 0, "0-1", "2-0-1#1", 0),
    ):
        assert parse_comm(str(named)) == named
    assert parse_comm("all_reduce | x") is None
    assert shown_ranks([3, 0, 1, 6]) == "0-1,3,6"
    assert str(Named("all_reduce", "a | b\nc", 0, "0", "0#1")).startswith("all_reduce | a / b c | ")


def test_arithmetic_of_spans() -> None:
    spans = merge([(5, 6), (0, 2), (1, 3), (9, 9)])
    assert spans == [(0, 3), (5, 6)]
    assert without(spans, [(1, 2), (2.5, 5.5)]) == [(0, 1), (2, 2.5), (5.5, 6)]
    assert (overlap((2, 10), spans), overlap((3, 5), spans), overlap((-1, 0.5), spans)) == (
        2,
        0,
        0.5,
    )
