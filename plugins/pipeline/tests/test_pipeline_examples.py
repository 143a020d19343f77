"""The examples run as their documentation says, and ``dscore pipeline draw`` draws."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from ds_command_kit.app import make_app
from ds_pipeline.command import app
from ds_pipeline.schedules.planned import ZeroBubbleSchedule
from ds_pipeline.schedules.timeline import as_text
from ds_pipeline.schedules.validate import check
from typer.testing import CliRunner

EXAMPLES = Path(__file__).parents[3] / "examples" / "pipeline"


def run(folder: Path, script: str, *words: str, nproc: int = 2) -> str:
    command = [
        sys.executable,
        "-m",
        "ds_cli",
        "run",
        "--nproc",
        str(nproc),
        str(EXAMPLES / script),
        *words,
    ]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=one_thread,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_alexnet_trains_in_two_stages(tmp_path: Path) -> None:
    told = run(tmp_path, "alexnet.py", "--steps", "3", "--shrink", "16")
    found = re.search(r"step 3: loss ([\d.]+)\n", told)
    assert found is not None, told
    assert 2.2 < float(found[1]) < 2.4  # ln 10 is 2.303
    assert "% right" in told


@pytest.mark.slow
def test_alexnet_learns(tmp_path: Path) -> None:
    found = re.search(r"([\d.]+) % right", run(tmp_path, "alexnet.py"))
    assert found is not None
    assert float(found[1]) > 70  # by chance 10; 79 to 82, as kernels round


def gpt(folder: Path, steps: int, stages: int) -> tuple[str, float]:
    words = [
        "--width",
        "32",
        "--run",
        str(folder / "run"),
        "--steps",
        str(steps),
        "--stages",
        str(stages),
    ]
    told = run(folder, "gpt.py", *words, nproc=stages)
    found = re.search(rf"step {steps}: loss ([\d.]+)", told)
    assert found is not None, told
    return told, float(found[1])


@pytest.mark.slow
def test_gpt_trains_in_two_stages(tmp_path: Path) -> None:
    assert 5.3 < gpt(tmp_path, 2, 2)[1] < 5.7  # ln 256 is 5.55


@pytest.mark.slow
def test_gpt_goes_on_in_one_process(tmp_path: Path) -> None:
    _, first = gpt(tmp_path, 2, 2)
    told, last = gpt(tmp_path, 8, 1)
    assert "resumed from step 2" in told
    assert last < first


def draw(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["draw", *words])
    return done.exit_code, done.output


def test_schedules_are_drawn_as_text() -> None:
    code, told = draw("zero_bubble", "--stages", "2", "--micro-batches", "3")
    assert code == 0
    lines = told.splitlines()
    assert [line.rstrip() for line in lines[:2]] == [
        "stage 0  F0 F1 ...I0 F2 W0 I1 W1 I2 W2",
        "stage 1  ...F0 I0 F1 I1 F2 W0 I2 W1 W2",
    ]
    assert (
        "makespan 10 forwards, bubble 10.0 %, speed-up 1.80 of 2, micro-batches kept per stage: "
        "3, 3" in lines
    )
    assert draw("inference", "-s", "2", "-m", "2")[1].startswith(
        "stage 0  F0 F1 ...\nstage 1  ...F0 F1 \n"
    )


def test_schedules_are_drawn_as_svg(tmp_path: Path) -> None:
    code, told = draw(
        "interleaved", "-s", "2", "-m", "4", "-c", "2", "--svg", str(tmp_path / "a.svg")
    )
    assert code == 0, told
    tree = ElementTree.parse(tmp_path / "a.svg")
    kind = "{http://www.w3.org/2000/svg}"
    texts = [t.text for t in tree.iter(f"{kind}text")]
    assert texts[0] == "interleaved: 2 stages, 2 chunks, 4 micro-batches"
    assert len([t for t in texts if t in "0123"]) == 2 * 2 * 2 * 4, (
        "a forward and a backward per stage and chunk"
    )


def test_a_schedule_that_is_wrong_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    code, told = draw("own_schedule:Forgetful", "-s", "2", "-m", "2")
    assert code == 1
    assert "no backward of micro-batch 0" in told or told == ""
    assert draw("gpipe")[0] == 1


def plan(folder: Path, *words: str, **section: object) -> tuple[int, str, str]:
    config = {"gradient_accumulation_steps": 4, "bf16": {"enabled": True}, "pipeline": section}
    (folder / "config.json").write_text(json.dumps(config))
    words = (
        "plan",
        "--world",
        "2",
        "--params",
        "1M",
        "--config",
        str(folder / "config.json"),
        *words,
    )
    done = CliRunner().invoke(make_app(), words)
    return done.exit_code, done.stdout, done.stderr


def test_dscore_plan_shows_the_configs_schedule(tmp_path: Path) -> None:
    code, told, where = plan(
        tmp_path, "--svg", str(tmp_path / "drawn"), stages=2, schedule="zero_bubble"
    )
    assert code == 0, where
    proof = check(lambda stage: ZeroBubbleSchedule(4, 2, stage))
    assert f"pipeline, zero_bubble: 2 stages, 4 micro-batches\n{as_text(proof)}" in told
    assert (tmp_path / "drawn" / "pipeline.svg").read_text().startswith("<svg")
    assert str(tmp_path / "drawn" / "pipeline.svg") in where.replace("\n", "")
    charts = json.loads(plan(tmp_path, "--json", stages=2, chunks=3)[1])["charts"]
    assert [c["title"] for c in charts] == ["pipeline, auto: 2 stages, 3 chunks, 4 micro-batches"]
    assert "the PipelineModule decides the number" in plan(tmp_path)[1]
    code, _, why = plan(tmp_path, "--svg", str(tmp_path / "drawn"))
    assert code == 2
    assert "no plugin draws anything" in why.replace("\n", " ")


def test_dscore_plan_refuses_a_wrong_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    code, _, why = plan(tmp_path, stages=2, schedule="own_schedule:Forgetful")
    assert code == 1
    assert "Forgetful is wrong: stage 0: no backward" in " ".join(why.split())
