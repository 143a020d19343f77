"""``dscore report``: what is read, what is drawn, and that nothing in a run can do anything to the
page.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import struct
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from ds_command_kit.app import make_app
from ds_report.page.page import differences, duration, page, short
from ds_report.page.thin import means, thin
from ds_report.run import Run, find_runs, names_of, read_run
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ds_core.entries import Event

EVIL = "<script>document.title='pwned'</script>\"'&"


Write = Callable[..., Path]


# -- reading ---------------------------------------------------------------------------------------


def test_a_record_as_a_run(tmp_path: Path, write_record: Write) -> None:
    run = read_run(write_record(tmp_path / "a"), "a")
    assert (run.source, run.base, run.standing.state.value, run.total_steps) == (
        "record",
        "step",
        "finished",
        50,
    )
    assert list(run.curves["loss"].y)[:2] == [4.0, 2.0]
    assert run.curves["samples_per_second"].y[5] == pytest.approx(80.0, rel=1e-3)
    assert run.curves["tokens_per_second"].y[5] == 64.0
    assert run.seconds == pytest.approx(2.0, rel=1e-3)
    assert run.phases == pytest.approx(
        {
            "forward": 20,
            "backward": 45,
            "waiting for reductions": 15,
            "step": 10,
            "data and the rest": 10,
        },
        rel=1e-3,
    )
    assert [(row.rank, row.peak) for row in run.ranks] == [(0, 2.0), (1, 3.0)]


def test_monitors_of_ours_are_read(tmp_path: Path, write_record: Write) -> None:
    from ds_monitor_csv.monitor import CSVMonitor
    from ds_monitor_tensorboard.monitor import TensorBoardMonitor

    values = [(8 * i, 1 / i) for i in range(1, 9)]
    for name, monitor in (("csv", CSVMonitor), ("tb", TensorBoardMonitor)):
        writer = monitor(tmp_path / name)
        for x, y in values:
            writer.write_events(
                [Event("Train/Samples/train_loss", y, x), Event("Train/Samples/lr", 0.5, x)]
            )
        writer.close()
        (file,) = (p for p in (tmp_path / name).iterdir() if "lr" not in p.name)
        with file.open("ab") as torn:
            torn.write(b"72,0." if name == "csv" else struct.pack("<Q", 4096) + b"abcd")
        (folder,) = find_runs([tmp_path / name])
        run = read_run(folder, name)
        assert set(run.curves) == {"loss", "lr"}
        assert list(run.curves["loss"].x) == [x for x, _ in values]
        assert list(run.curves["loss"].y) == pytest.approx([y for _, y in values], rel=1e-7)
    page([read_run(p, p.name) for p in find_runs([tmp_path, write_record(tmp_path / "c")])])


@pytest.mark.slow
def test_events_of_torch_are_read(tmp_path: Path) -> None:
    import torch
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    writer.add_scalar("old", 1.5, 3)
    writer.add_scalar("new", 2.5, 4, new_style=True, double_precision=True)
    writer.add_histogram("h", torch.ones(2), 1)
    writer.close()
    run = read_run(tmp_path, "t")
    assert {name: (list(p.x), list(p.y)) for name, p in run.curves.items()} == {
        "old": ([3], [1.5]),
        "new": ([4], [2.5]),
    }


@given(data=st.binary(max_size=200), cut=st.integers(0, 60))
def test_no_file_ends_the_reading(
    data: bytes, cut: int, tmp_path_factory: pytest.TempPathFactory, write_record: Write
) -> None:
    folder = write_record(tmp_path_factory.mktemp("a"), 2, world=1)
    for file in ("rank0.jsonl", "rank0.now"):
        with (folder / file).open("ab") as stream:
            stream.write(data)
    run = read_run(folder, "a")
    assert list(run.curves["loss"].y)[:2] == [4.0, 2.0] or b"step" in data
    (folder / "rank0.jsonl").unlink()
    record = b"\x09" + b"\0" * 8 + b"\x10\x01" + b"\x2a\x0b\x0a\x09\x0a\x02ab\x15\0\0\x80?"
    (folder / "x.tfevents.1").write_bytes(struct.pack("<QI", len(record), 0) + record[:cut] + data)
    read_run(folder, "a")


def test_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    for path, why in (
        (tmp_path / "none", "no such folder"),
        (tmp_path, "holds no run: no record .*--record"),
    ):
        done = CliRunner().invoke(make_app(), ["report", str(path)])
        assert done.exit_code == 2 and re.search(why, done.output.replace("\n", " ")), done.output


# -- drawing ---------------------------------------------------------------------------------------


@given(st.lists(st.floats(), min_size=1, max_size=300), st.integers(1, 20))
def test_thinning_keeps_extremes_and_gaps(values: list[float], buckets: int) -> None:
    kept = thin(values, buckets)
    assert kept == sorted(set(kept)) and len(kept) <= max(
        5 * buckets, len(values) if len(values) <= 4 * buckets else 0
    )
    finite = [v for v in values if math.isfinite(v)]
    left = [values[i] for i in kept if math.isfinite(values[i])]
    assert (min(finite, default=0), max(finite, default=0)) == (
        min(left, default=0),
        max(left, default=0),
    )
    assert any(not math.isfinite(v) for v in values) == any(
        not math.isfinite(values[i]) for i in kept
    )


def test_a_million_points_are_a_small_page(tmp_path: Path) -> None:
    from array import array

    y = array("d", (math.sin(i / 1e4) for i in range(1_000_000)))
    y[123_456] = 50.0
    y[654_321] = -50.0
    kept = [y[i] for i in thin(y)]
    assert (max(kept), min(kept), len(kept) <= 1600) == (50.0, -50.0, True)
    assert len(means(range(len(y)), y)[1]) == 400


def test_words() -> None:
    assert [duration(s) for s in (3.21, 42, 61, 3900, 200_000)] == [
        "3.2 s",
        "42 s",
        "1 min 01 s",
        "1 h 05 min",
        "2 d 07 h",
    ]
    assert [short(v) for v in (0.12345, 12345.6, 124_439_808, math.nan, math.inf)] == [
        "0.1235",
        "12,346",
        "124.4M",
        "",
        "∞",
    ]


@pytest.mark.parametrize(
    "facts",
    [{}, {"versions": 3, "world_size": "x", "parameters": [], "config": 5, "total_steps": "a"}],
)
def test_a_record_that_says_little(tmp_path: Path, facts: dict[str, Any]) -> None:
    rows = [
        {"kind": "start", "format": 1, **facts},
        {"kind": "step", "step": 1, "metrics": {"loss": 1.5}},
    ]
    rows += [
        {"kind": "eval", "step": 1, "metrics": 3},
        {"kind": "step", "step": 2, "metrics": {"loss": "x"}},
    ]
    (tmp_path / "rank0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(tmp_path, "little")
    assert "little" in page([run, run]) and list(run.curves["loss"].y)[0] == 1.5


@pytest.mark.parametrize("time", [1e300, -1e18, 1e13, 10**400])
def test_hostile_numbers_are_shown_or_left_out(tmp_path: Path, time: Any) -> None:
    losses = (1e308, -1e308, 3.0)
    rows = [{"kind": "start", "format": 1, "time": time, "parameters": 10**400, "world_size": 2}]
    rows += [
        {"kind": "step", "step": i, "time": time, "metrics": {"loss": loss}}
        for i, loss in enumerate(losses)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows) + "[" * 100_000
    (tmp_path / "rank0.jsonl").write_text(text)
    (tmp_path / "rank0.now").write_text(json.dumps({"time": time, "seconds": time}))
    os.mkfifo(tmp_path / "rank1.jsonl")
    os.mkfifo(tmp_path / "rank1.now")
    run = read_run(tmp_path, "odd")
    assert "odd" in page([run])
    done = CliRunner().invoke(make_app(), ["top", str(tmp_path), "--once"])
    assert done.exit_code in (0, 1) and (
        done.exception is None or isinstance(done.exception, SystemExit)
    )


def test_configs_are_compared(tmp_path: Path, write_record: Write) -> None:
    one = write_record(tmp_path / "a")
    two = write_record(tmp_path / "b", world=3, zero_optimization={"stage": 3})
    rows = dict(differences([read_run(one, "a"), read_run(two, "b")]))
    assert rows == {"zero_optimization.stage": ["—", "3"], "(world size)": ["2", "3"]}


def test_short_names_that_differ() -> None:
    assert names_of([Path("/x/a/run"), Path("/x/b/run")]) == ["a/run", "b/run"]
    assert names_of([Path("/x/a"), Path("/x/b")]) == ["a", "b"]


# -- the page --------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def evil(folder: Path, write_record: Write) -> Run:
    """A run whose every text tries to break out."""
    return read_run(write_record(folder, name=EVIL, last="failed", **{EVIL: EVIL}), EVIL)


def test_nothing_in_a_run_is_more_than_text_and_nothing_is_fetched(
    tmp_path: Path, write_record: Write
) -> None:
    text = page(
        [evil(tmp_path / "a", write_record), read_run(write_record(tmp_path / "b"), "b")], EVIL
    )
    tags = Tags(text).seen
    assert [a.get("type") for tag, a in tags if tag == "script"] == ["application/json", None]
    assert not {tag for tag, _ in tags} & {
        "link",
        "img",
        "iframe",
        "object",
        "base",
        "form",
        "image",
        "use",
    }
    names = set(itertools.chain.from_iterable(a for _, a in tags))
    assert not names & {"src", "href", "srcset", "action"} and not any(
        n.startswith("on") for n in names
    )
    assert "url(" not in text and "@import" not in text
    assert text.count("pwned") > 5 and "<script>document" not in text
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert {line["name"] for line in data["charts"][0]["lines"]} == {EVIL, "b"}
    policy = next(
        a["content"] for tag, a in tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert (
        policy is not None
        and policy.startswith("default-src 'none'")
        and "'unsafe-inline'" not in policy.split("script-src")[1]
    )


def test_the_command(tmp_path: Path, write_record: Write) -> None:
    a = write_record(tmp_path / "a")
    b = write_record(tmp_path / "b", steps=0)
    done = CliRunner().invoke(make_app(), ["report", str(a)])
    assert done.exit_code == 0, done.output
    text = (a / "report.html").read_text()
    assert "Training run a" in text and "20 of 50" in text
    both = ["report", str(a), str(b), "-o", str(tmp_path / "both.html"), "--title", "x < y"]
    done = CliRunner().invoke(make_app(), both)
    assert done.exit_code == 0, done.output
    assert "<h1>x &lt; y</h1>" in (tmp_path / "both.html").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "both.html"]
    done = CliRunner().invoke(make_app(), ["report", str(a), "-o", str(tmp_path / "no" / "x.html")])
    assert done.exit_code == 2 and "cannot write" in done.output
