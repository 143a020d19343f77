"""``dscore curriculum`` and the charts of ``dscore plan``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from ds_command_kit.app import make_app
from ds_testing import ChartConformance, CommandConformance
from typer.testing import CliRunner

from ds_core.errors import UsageError

LINEAR = {
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 8},
}
LENGTHS = {"curriculum_learning": {"enabled": True, **LINEAR}}


def efficiency(**metrics: Any) -> dict[str, Any]:
    curriculum = {"enabled": True, "curriculum_metrics": metrics}
    return {
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {"enabled": True, "curriculum_learning": curriculum},
        }
    }


class TestCommands(CommandConformance):
    plugin = "ds_data_sampling.plugin"


class TestChartOfLengths(ChartConformance):
    config = LENGTHS


class TestChartOfSamples(ChartConformance):
    config = efficiency(seqlen={"clustering_type": "single_cluster", **LINEAR})


def dscore(*words: Any) -> str:
    done = CliRunner().invoke(make_app(), ["curriculum", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_draw(tmp_path: Path) -> None:
    for name in ("samples", "values"):
        np.save(tmp_path / f"{name}.npy", np.arange(64) + (name == "values"))
    paths = {
        f"index_to_{k}_path": str(tmp_path / f)
        for k, f in (("sample", "samples"), ("metric", "values"))
    }
    both = efficiency(
        seqlen={**paths, "difficulty_type": "value", "clustering_type": "schedule_based", **LINEAR},
        own=LINEAR
        | {"clustering_type": "single_cluster", "schedule_type": "custom", "schedule_config": {}},
        lost={
            **LINEAR,
            "difficulty_type": "percentile",
            "clustering_type": "schedule_based",
            "max_difficulty": 50,
        }
        | {"index_to_sample_path": str(tmp_path / "nowhere")},
    )
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"train_batch_size": "auto", **both, **LENGTHS}))
    said = dscore("draw", file, "--svg", tmp_path / "drawn.svg")
    rows = [line.split() for line in said.splitlines()]
    steps = next(row for row in rows if row[:1] == ["step"])
    difficulties = next(row for row in rows if row[:1] == ["difficulty"])
    shares = next(row for row in rows if row[:1] == ["samples"])
    assert (
        (steps[1], steps[-1]) == ("1", "101")
        and difficulties[1] == "8"
        and difficulties[-1] == "64"
    )
    assert [f"{int(d) / 64:.1%}" for d in difficulties[1:]] == shares[1:]
    for text in (
        "curriculum_learning: fixed_linear, 8 to 64",
        "a function that the program gives",
        "nowhere: there is",
    ):
        assert text in said
    root = ElementTree.fromstring((tmp_path / "drawn.svg").read_text())
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 3  # all but the custom one
    assert "  step       1\n  difficulty 8\n  length of sequences" in dscore(
        "draw", file, "--steps", 1
    )
    file.write_text(json.dumps({"train_batch_size": 1}))
    with pytest.raises(UsageError, match="has no curriculum"):
        from ds_data_sampling.command import draw

        draw(file)


DATA = """
def texts():
    return [list(range(n)) for n in (3, 1, 2)]

class Broken:
    pass

def cubed(sample):
    return len(sample) ** 3
"""


def test_analyze(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "curriculum_data.py").write_text(DATA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    metrics = ("-m", "seqlen", "-m", "vocabularyrarity", "-m", "cubed=curriculum_data:cubed")
    said = dscore("analyze", "curriculum_data:texts", "-o", "one", *metrics)
    assert "3 samples from 1 to 3, half of them up to 2" in said and "sum over 3 samples" in said
    for name in ("seqlen", "vocabulary"):
        for worker in (0, 1):
            words = ("-m", name, "--workers", 2, "--worker", worker)
            assert f"worker {worker} of 2" in dscore(
                "analyze", "curriculum_data:texts", "-o", "two", *words
            )
        dscore(
            "analyze", "curriculum_data:texts", "-o", "two", "-m", name, "--workers", 2, "--combine"
        )
    for name in ("seqlen/seqlen_sample_to_metric.npy", "vocabulary/vocabulary_metric_value.npy"):
        assert Path("one", name).read_bytes() == Path("two", name).read_bytes()
    assert np.load("one/cubed/cubed_sample_to_metric.npy").tolist() == [27, 1, 8]
    from ds_data_sampling import command

    with pytest.raises(UsageError, match="--workers needs --worker"):
        command.analyze("curriculum_data:texts", Path("x"), ["seqlen"], workers=2)
    with pytest.raises(UsageError, match="is a Broken; a dataset"):
        command.analyze("curriculum_data:Broken", Path("x"), ["seqlen"])
