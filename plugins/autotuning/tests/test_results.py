"""What is left of a search: the winner, why it won, and a page that stands on its own."""

from __future__ import annotations

import json
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from ds_autotuning.config import Autotuning
from ds_autotuning.picture import picture
from ds_autotuning.records import Forecast, Profile, Result, Row, Status
from ds_autotuning.report import summary, write_results
from ds_autotuning.search.why import best_of, keys_of

STAGE = "zero_optimization.stage"
MICRO = "train_micro_batch_size_per_gpu"


def row(number: int, stage: int, micro: int, value: float | None, **more: Any) -> Row:
    status = more.get("status", Status.CRASHED if value is None else Status.DONE)
    latency = None if value is None else 1 / value
    result = Result(status, more.get("reason", ""), value, latency, None, (), 3 * 2**30, 2**30)
    return Row(
        number,
        f"z{stage}_mb{micro}",
        {STAGE: stage, MICRO: micro},
        result,
        Forecast(2.5 * 2**30, 0),
    )


ROWS = [
    row(1, 0, 4, 100.0),
    row(2, 0, 8, 150.0),
    row(3, 1, 4, 90.0),
    row(4, 1, 8, 200.0),
    row(5, 3, 4, None, status=Status.OUT_OF_MEMORY, reason="rank 1: <b>no</b> memory"),
    # not run, so without a number
    row(0, 3, 8, None, status=Status.DOES_NOT_FIT, reason="needs 90 GiB"),
]


def test_the_best_is_the_highest_or_for_latency_the_lowest() -> None:
    assert best_of(ROWS, "throughput") is ROWS[3]
    assert best_of(ROWS, "latency") is ROWS[3]  # 1 / 200 s is the least
    assert best_of(ROWS, "flops") is None and best_of(ROWS[4:], "throughput") is None
    assert best_of([row(0, 0, 1, float("nan")), row(1, 0, 2, 1.0)], "throughput") == row(
        1, 0, 2, 1.0
    )
    assert best_of([row(0, 0, 1, 5.0), row(1, 0, 2, 5.0)], "throughput") == row(0, 0, 1, 5.0)


@pytest.mark.parametrize("metric", ["throughput", "latency"])
def test_why_it_won_is_told_key_by_key_the_most_decisive_first(metric: str) -> None:
    found = keys_of(ROWS, ROWS[3], metric)
    assert [(key.name, key.value) for key in found] == [(MICRO, "8"), (STAGE, "1")]
    assert [(o.value, o.part) for o in found[0].others] == [("4", pytest.approx(0.5))]
    (zero, three) = found[1].others
    assert (zero.value, zero.part) == ("0", pytest.approx(0.75))
    assert three.part is None and three.note == "1 out of memory, 1 does not fit, not run"
    assert keys_of(ROWS[3:4], ROWS[3], metric) == []


def test_the_summary_has_every_trial_the_best_first() -> None:
    text = summary(ROWS, ROWS[3], Autotuning())
    head, *lines = text.splitlines()
    assert head.startswith("best: z1_mb8, 200 samples/s; 6 settings: 4 done, 1 out of memory")
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("trial")) + 1 :]
    assert [line.split()[0] for line in table] == ["4", "2", "1", "3", "-", "5"]
    assert f"{MICRO} = 8 (instead of it, 4: 50 % of the best)" in text
    assert table[0].split()[1:5] == ["200", "0.005", "3", "2.5"]
    assert "no setting came to an end; 1 settings: 1 crashed" in summary(
        [row(0, 0, 1, None)], None, Autotuning()
    )
    assert "none was tried" in summary([], None, Autotuning())


class Page(HTMLParser):
    """What a page holds. It fails where a tag is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_files(tmp_path: Path) -> None:
    profile = Profile(
        1000, 900, activation_bytes_per_sample=2.0**21, facts={"world": 2, "device": "cpu"}
    )
    command = ["dscore", "run", "train it.py", "--deepspeed_config", "ds_config_optimal.json"]
    write_results(
        tmp_path, ROWS, ROWS[3], {"zero_optimization": {"stage": 1}}, command, Autotuning(), profile
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "cmd_optimal.txt",
        "ds_config_optimal.json",
        "index.html",
        "summary.txt",
    ]
    assert shlex.split((tmp_path / "cmd_optimal.txt").read_text()) == command
    assert json.loads((tmp_path / "ds_config_optimal.json").read_text()) == {
        "zero_optimization": {"stage": 1}
    }
    text = (tmp_path / "index.html").read_text()
    page = Page(text)
    assert "script" not in page.tags and page.links == []
    # trials and the legend of stages
    assert page.tags.count("circle") == 4 + 3 and page.tags.count("path") == 2
    assert "<b>no</b>" not in text and "&lt;b&gt;no&lt;/b&gt;" in text
    assert "1,000" in text and "2 MiB" in text
    svg = text[text.index("<svg") : text.index("</svg>") + 6]
    ElementTree.fromstring(svg)


SECRETS = {
    "comet.api_key": "comet9f8e7d6c5b4a",
    "mine.hf_token": "hf_abcdefgh",
    "mine.url": "https://me:pass99word@host/x",
}


def test_secrets_are_in_the_config_alone_and_others_may_not_read_it(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "zero_optimization": {"stage": 1},
        "comet": {},
        "mine": {"max_tokens": 7},
    }
    for key, value in SECRETS.items():
        section, _, name = key.partition(".")
        config[section][name] = value
    told = row(7, 2, 8, None, reason="rank 0: RuntimeError: no login with hf_abcdefgh")
    command = ["dscore", "run", "train.py", "--token", "hf_abcdefgh"]
    write_results(tmp_path, [*ROWS, told], ROWS[3], config, command, Autotuning())
    for name in ("index.html", "summary.txt", "cmd_optimal.txt"):
        text = (tmp_path / name).read_text()
        assert not [s for s in ("comet9f8e7d6c5b4a", "hf_abcdefgh", "pass99word") if s in text], (
            name
        )
    summary_text = (tmp_path / "summary.txt").read_text()
    assert summary_text.endswith("as the config did: comet.api_key, mine.hf_token, mine.url\n")
    best = tmp_path / "ds_config_optimal.json"
    assert json.loads(best.read_text()) == config and best.stat().st_mode & 0o077 == 0


def test_a_search_without_a_winner_has_a_page_but_no_config(tmp_path: Path) -> None:
    for rows in ([], ROWS[4:]):
        write_results(tmp_path, rows, None, {}, [], Autotuning(metric="latency"))
        Page((tmp_path / "index.html").read_text())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index.html", "summary.txt"]


def test_the_picture_is_to_scale() -> None:
    drawn = picture(ROWS, ROWS[3], "throughput")
    heights = {m.text.split(":")[0]: drawn.bottom - m.y for m in drawn.marks}
    assert heights["z1_mb8"] == pytest.approx(2 * heights["z0_mb4"], abs=0.2)
    assert heights["z3_mb4"] == 0 and [m.shape for m in drawn.marks].count("cross") == 2
    assert [m.best for m in drawn.marks] == [False, False, False, True, False, False]
    assert drawn.by == STAGE and drawn.groups == ("0", "1", "3")
    assert all(drawn.left <= m.x <= drawn.right for m in drawn.marks)
    # The best so far: 100, 150, 200; a corner for each, and the end.
    points = [tuple(map(float, p.split(","))) for p in drawn.line.split()]
    levels = [round(drawn.bottom - y, 1) for _, y in points]
    assert levels == sorted(levels) and len(set(levels)) == 3
