"""The analysis of a dataset: what is measured, by how many workers, what is written, and who reads
it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ds_data_sampling.curricula.analysis import analyze, combine, measure, measures_of
from ds_data_sampling.curricula.config import Curriculum
from ds_data_sampling.curricula.curriculum import ByDifficulty
from ds_data_sampling.curricula.index import read_index
from ds_data_sampling.curricula.metrics import Measure, named, seqlen
from ds_testing.pytest_plugin import Ranks

from ds_core.errors import UsageError


class Texts:
    """Samples as tokenizers give them; the length of sample i is known."""

    def __init__(self, size: int = 37) -> None:
        generator = torch.Generator().manual_seed(5)
        self.lengths = torch.randint(1, 300, (size,), generator=generator).tolist()
        self.samples = [
            {"input_ids": torch.randint(0, 50, (n,), generator=generator).tolist()}
            for n in self.lengths
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def half(sample: Any) -> float:
    return len(sample["input_ids"]) / 2


def test_lengths(tmp_path: Path) -> None:
    data = Texts()
    facts = analyze(data, ["seqlen"], tmp_path)["seqlen"]
    folder = tmp_path / "seqlen"
    assert np.load(folder / "seqlen_sample_to_metric.npy").tolist() == data.lengths
    index = read_index(
        str(folder / "seqlen_index_to_sample"), str(folder / "seqlen_index_to_metric"), len(data)
    )
    assert sorted(index.samples.tolist()) == list(range(len(data)))
    assert [data.lengths[i] for i in index.samples] == sorted(data.lengths)
    assert all(
        index.up_to_value(n) == sum(m <= n for m in data.lengths) for n in (0, 1, 77, 150, 299, 400)
    )
    assert (index.samples.dtype, index.values.dtype) == (np.uint8, np.uint16)  # type: ignore[union-attr]
    assert facts == json.loads((folder / "seqlen.json").read_text())
    assert facts["samples"] == 37 and facts["mean"] == pytest.approx(sum(data.lengths) / 37)
    assert (
        facts["percentiles"]["100"] == max(data.lengths)
        and facts["percentiles"]["50"] == sorted(data.lengths)[18]
    )
    assert sorted(file.name for file in folder.iterdir()) == [
        "seqlen.json",
        "seqlen_index_to_metric.npy",
        "seqlen_index_to_sample.npy",
        "seqlen_sample_to_metric.npy",
    ]


def test_rarity(tmp_path: Path) -> None:
    data = Texts()
    analyze(data, ["vocabularyrarity"], tmp_path, batch_size=5)
    counts = Counter(token for sample in data.samples for token in sample["input_ids"])
    found = np.load(tmp_path / "vocabulary" / "vocabulary_metric_value.npy")
    assert found.tolist() == [counts[token] for token in range(max(counts) + 1)]
    total = sum(counts.values())
    expected = [
        sum(-math.log(counts[t] / total) for t in sample["input_ids"]) for sample in data.samples
    ]
    values = np.load(tmp_path / "vocabularyrarity" / "vocabularyrarity_sample_to_metric.npy")
    assert values.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("workers", [2, 5, 40])
def test_any_number_of_workers_writes_the_same(tmp_path: Path, workers: int) -> None:
    data = Texts()
    names = ["seqlen", "vocabulary", f"half={__name__}:half"]
    measures = [*measures_of(names[:2], tmp_path), Measure("half", half)]
    analyze(data, measures, tmp_path / "one", batch_size=1000)
    for worker in reversed(range(workers)):
        measure(data, measures, tmp_path / "many", worker=worker, workers=workers, batch_size=3)
    combine(tmp_path / "many", measures, len(data), workers=workers)
    assert files(tmp_path / "many") == files(tmp_path / "one")


def on_ranks(folder: Path) -> dict[str, Any]:
    return analyze(Texts(), ["seqlen", "vocabularyrarity"], folder, batch_size=4)


def test_ranks_share_the_work(tmp_path: Path, ranks: Ranks) -> None:
    expected = on_ranks(tmp_path / "one")
    assert ranks(2, on_ranks, tmp_path / "two") == [expected, expected]
    assert files(tmp_path / "two") == files(tmp_path / "one")


@pytest.mark.slow
def test_processes_load_and_measure(tmp_path: Path) -> None:
    analyze(Texts(), ["seqlen"], tmp_path / "own")
    analyze(Texts(), ["seqlen"], tmp_path / "two", batch_size=4, processes=2)
    assert files(tmp_path / "two") == files(tmp_path / "own")


def test_metrics_of_batches(tmp_path: Path) -> None:
    data = torch.arange(20).view(10, 2)
    measures = [
        Measure("first", lambda batch: batch[:, 0], batched=True, dtype="int64"),
        Measure("total", lambda batch: batch.sum(0), "sum", batched=True),
        Measure("as_bf16", lambda row: row.sum().bfloat16()),
        Measure("is_even", lambda row: row[1] % 2 == 0),
    ]
    analyze(data, measures, tmp_path, batch_size=3)

    def read(name: str, kind: str = "sample_to_metric") -> list[float]:
        found: list[float] = np.load(tmp_path / name / f"{name}_{kind}.npy").tolist()
        return found

    assert read("first") == list(range(0, 20, 2)) and read("total", "metric_value") == [90, 100]
    assert read("as_bf16") == [4 * i + 1 for i in range(10)] and read("is_even") == [0] * 10


@pytest.mark.parametrize(
    ("sample", "length"),
    [
        ({"input_ids": [3, 4, 5]}, 3),
        ({"input_ids": torch.arange(6), "attention_mask": torch.tensor([1, 1, 1, 1, 0, 0])}, 4),
        ({"text": "abcd"}, 4),
        ((torch.arange(5), 1), 5),
        (np.arange(2), 2),
    ],
)
def test_what_a_length_is(sample: Any, length: int) -> None:
    assert seqlen(sample) == length


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    data = [1.0, 2.0, float("nan"), 4.0]

    def said(match: str, *measures: Measure, **options: Any) -> None:
        with pytest.raises(UsageError, match=match):
            measure(data, measures, tmp_path, **options)

    said("x of sample 2 is nan", Measure("x", lambda v: v), batch_size=2)
    said("x is float64, and int64 was announced", Measure("x", lambda v: 2 * v, dtype="int64"))
    said("x must be one number per sample, not one of 3", Measure("x", lambda v: [v, v, v]))
    said("must be a number, not str", Measure("x", str))
    said("gave 1 values for a batch of 4 samples", Measure("x", lambda v: v[:1], batched=True))
    said("worker is 2; with 2 workers it is one of 0 to 1", worker=2, workers=2)
    with pytest.raises(UsageError, match="measure and combine the metric vocabulary first"):
        measures_of(["vocabularyrarity"], tmp_path)
    measure(data[:2], [Measure("x", lambda v: v)], tmp_path, worker=0, workers=2)
    with pytest.raises(UsageError, match="worker 1 of 2 has not measured x"):
        combine(tmp_path, [Measure("x", lambda v: v)], 2, workers=2)
    measure(data[:2], [Measure("x", lambda v: v)], tmp_path, worker=1, workers=2)
    with pytest.raises(UsageError, match="measured of 2 samples, and the dataset has 3"):
        combine(tmp_path, [Measure("x", lambda v: v)], 3, workers=2)
    for text, match in (
        ("lenght", "no metric is called 'lenght'; there are seqlen, vocabulary, vocabularyrarity"),
        ("a b=math:sqrt", "'a b' cannot be the name"),
        ("x=math:pi", "math:pi is a float; a function of a sample is needed"),
    ):
        with pytest.raises(UsageError, match=match):
            named(text)
    with pytest.raises(UsageError, match="must be integers from 0"):
        analyze([[1, -1]], ["vocabulary"], tmp_path)


def test_a_curriculum_reads_the_files(tmp_path: Path) -> None:
    data = Texts()
    analyze(data, ["seqlen"], tmp_path)
    metric = {
        "index_to_sample_path": str(tmp_path / "seqlen" / "seqlen_index_to_sample"),
        "index_to_metric_path": str(tmp_path / "seqlen" / "seqlen_index_to_metric"),
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": 100,
        "max_difficulty": 300,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [100, 300], "max_step": [2]},
    }
    order = ByDifficulty(
        Curriculum.model_validate({"enabled": True, "curriculum_metrics": {"s": metric}}), 37, 0
    )
    first, second, third = (order.take(9, step) for step in range(3))
    assert max(data.lengths[i] for i in first + second) <= 100 < max(data.lengths[i] for i in third)
