"""DeepSpeed's classes: the same arguments, and the numbers that the rest of this package has."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ds_data_sampling.curricula.index import read_index
from ds_data_sampling.deepspeed.analyzer import DataAnalyzer, DistributedDataAnalyzer
from ds_data_sampling.deepspeed.names import CurriculumScheduler, DeepSpeedDataSampler
from ds_data_sampling.deepspeed.rows import MMapIndexedDataset, MMapIndexedDatasetBuilder
from ds_testing.pytest_plugin import Ranks

from ds_core import comm
from ds_core.errors import UsageError

LINEAR = {
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 8},
}
# bytes that DeepSpeed 0.19.8's builder writes for the rows [3, 1], [2] of numpy.uint16, one
# document
ROWS_INDEX = bytes.fromhex(
    "4d4d494449445800000100000000000000060200000000000000020000000000000002000000010000000000000000000000"
    "040000000000000000000000000000000200000000000000"
)
ROWS_DATA = bytes.fromhex("030001000200")


def test_the_scheduler() -> None:
    scheduler = CurriculumScheduler(
        {**LINEAR, "difficulty_type": "value", "clustering_type": "single_cluster"}
    )
    assert scheduler.get_current_difficulty() == 8
    assert [scheduler.update_difficulty(step) for step in range(1, 7)] == [16, 32, 48, 64, 64, 64]
    assert [scheduler.get_difficulty(step) for step in (1, 9)] == [16, 64]
    other = CurriculumScheduler({**LINEAR, "min_difficulty": 1})
    other.set_state(json.loads(json.dumps(scheduler.get_state())))
    assert other.get_current_difficulty() == 64 and other.get_difficulty(1) == 16
    other.set_current_difficulty(8)
    assert other.update_difficulty(2) == 32
    custom = CurriculumScheduler({**LINEAR, "schedule_type": "custom", "schedule_config": {}})
    custom.set_custom_get_difficulty(lambda step: 10 * step)
    assert [custom.update_difficulty(step) for step in (1, 7, 3)] == [10, 70, 70]
    with pytest.raises(ValueError, match="total_curriculum_step"):
        CurriculumScheduler({**LINEAR, "schedule_config": {}})


def sampler(folder: Path, rank: int, world: int, gas: int, **more: Any) -> DeepSpeedDataSampler:
    metric = {
        **LINEAR,
        "index_to_sample_path": str(folder / "samples.npy"),
        "index_to_metric_path": str(folder / "values.npy"),
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
    }
    curriculum = {"enabled": True, "curriculum_metrics": {"seqlen": metric}}
    config = {"seed": 3, "data_sampling": {"num_epochs": 2, "curriculum_learning": curriculum}}
    return DeepSpeedDataSampler(config, 30, 2, rank, world, gradient_accumulation_steps=gas, **more)


def batches(made: list[DeepSpeedDataSampler], count: int) -> list[int]:
    """The samples of `count` rounds of micro-batches of all ranks, in order."""
    iterators = [iter(each) for each in made]
    return [i for _ in range(count) for iterator in iterators for i in next(iterator)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.save(tmp_path / "samples.npy", np.arange(30)[::-1].copy())
    np.save(tmp_path / "values.npy", np.arange(30) * 2)  # sample i has 2 (29 - i)
    return tmp_path


def test_the_sampler_gives_every_world_size_the_same_steps(folder: Path) -> None:
    alone = batches([sampler(folder, 0, 1, 4)], 28)
    assert len(alone) == 56 and all(2 * (29 - i) <= 16 for i in alone[:8])
    assert batches([sampler(folder, rank, 2, 2) for rank in range(2)], 14) == alone
    assert batches([sampler(folder, rank, 4, 1) for rank in range(4)], 7) == alone
    assert len(sampler(folder, 0, 1, 4)) == 60
    assert len(list(sampler(folder, 0, 1, 4))) == 30
    assert [len(b) for b in sampler(folder, 0, 4, 1)] == [2] * 7  # the last 4 of 60 are not whole
    assert [len(b) for b in sampler(folder, 0, 4, 1, drop_last=False)] == [2] * 7 + [1]


def test_the_sampler_goes_on_at_another_world_size(folder: Path) -> None:
    expected = batches([sampler(folder, 0, 1, 4)], 28)
    first = [sampler(folder, rank, 2, 2) for rank in range(2)]
    assert batches(first, 5) == expected[:20]
    state = first[1].state_dict()
    assert state["curriculum_step"] == 3 and state["current_difficulties"] == {"seqlen": 48}
    # the last batch of a rank is counted when the next one is asked for, as a DataLoader does
    resumed = sampler(folder, 0, 1, 4)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert batches([resumed], 18) == expected[20:]
    with pytest.raises(UsageError, match="is DeepSpeed's"):
        resumed.load_state_dict({"batch": [], "consumed_samples": 0})
    with pytest.raises(UsageError, match="data_parallel_rank is 2 of 2"):
        sampler(folder, 2, 2, 1)


def test_rows_as_deepspeed_writes_them(tmp_path: Path) -> None:
    def write(name: str, rows: list[list[int]], dtype: Any = np.uint16) -> str:
        builder = MMapIndexedDatasetBuilder(f"{tmp_path}/{name}.bin", dtype=dtype)
        builder.add_item(torch.tensor(rows[0]))
        builder.add_items([np.array(row) for row in rows[1:]])
        builder.end_document()
        builder.finalize(f"{tmp_path}/{name}.idx")
        return f"{tmp_path}/{name}"

    path = write("rows", [[3, 1], [2]])
    assert (
        Path(f"{path}.idx").read_bytes() == ROWS_INDEX
        and Path(f"{path}.bin").read_bytes() == ROWS_DATA
    )
    rows = pickle.loads(pickle.dumps(MMapIndexedDataset(path, skip_warmup=True)))  # noqa: S301  our own bytes
    assert [row.tolist() for row in rows] == [[3, 1], [2]] and rows[-1].tolist() == [2]
    assert [row.tolist() for row in rows[:2]] == [[3, 1], [2]]
    assert rows.get(0, offset=1).tolist() == [1] and rows.get(0, length=1).tolist() == [3]
    assert (len(rows), rows.size(0), rows.dtype, rows.sizes.tolist()) == (2, 2, np.uint16, [2, 1])
    assert MMapIndexedDataset.exists(path) and not MMapIndexedDataset.exists(f"{path}2")
    builder = MMapIndexedDatasetBuilder(f"{tmp_path}/both.bin", dtype=torch.int64)
    builder.merge_file_(path)
    builder.merge_file_(write("more", [[70_000]], torch.int32))
    builder.finalize(f"{tmp_path}/both.idx")
    assert [row.tolist() for row in MMapIndexedDataset(f"{tmp_path}/both")] == [
        [3, 1],
        [2],
        [70_000],
    ]
    with pytest.raises(UsageError, match="integer type"):
        MMapIndexedDatasetBuilder(f"{tmp_path}/floats.bin", dtype=torch.float32)


def lengths(batch: torch.Tensor) -> torch.Tensor:
    return (batch != 0).sum(1)


def counts(batch: torch.Tensor) -> torch.Tensor:
    return torch.bincount(batch.flatten(), minlength=4)


DATA = torch.tensor([[1, 2, 3], [1, 0, 0], [2, 2, 0], [3, 0, 0], [1, 1, 1]])
METRICS: dict[str, Any] = {
    "metric_names": ["seqlen", "vocab"],
    "metric_functions": [lengths, counts],
    "metric_types": ["single_value_per_sample", "accumulate_value_over_samples"],
}


def written(folder: Path) -> list[list[int]]:
    index = read_index(
        str(folder / "seqlen/seqlen_index_to_sample"),
        str(folder / "seqlen/seqlen_index_to_metric"),
        5,
    )
    assert index.values is not None
    vocabulary = np.load(folder / "vocab" / "vocab_metric_value.npy")
    return [index.samples.tolist(), index.values.tolist(), vocabulary.tolist()]


EXPECTED = [[1, 3, 2, 0, 4], [1, 1, 2, 3, 3], [5, 5, 3, 2]]


def test_the_analyzer(tmp_path: Path) -> None:
    dtypes = [torch.int64, np.int64]
    for worker in (0, 1):
        DataAnalyzer(
            DATA, 2, worker, save_path=str(tmp_path), metric_dtypes=dtypes, batch_size=2, **METRICS
        ).run_map()
    DataAnalyzer(DATA, 2, 0, save_path=str(tmp_path), metric_dtypes=dtypes, **METRICS).run_reduce()
    assert written(tmp_path) == EXPECTED
    for change, said in (
        ({"custom_reduce": print}, "has no custom_reduce; use"),
        ({"metric_types": ["mean", "mean"]}, "metric_types has 'mean'"),
        ({"metric_functions": []}, "2 metric_names and 0 metric_functions"),
    ):
        with pytest.raises(UsageError, match=said):
            DataAnalyzer(DATA, **METRICS | change)  # type: ignore[arg-type]


def on_ranks(folder: Path) -> None:
    more = {"num_workers": comm.world_size(), "worker_id": comm.rank(), "batch_size": 2}
    DistributedDataAnalyzer(DATA, save_path=str(folder), **more, **METRICS).run_map_reduce()  # type: ignore[arg-type]
    assert written(folder) == EXPECTED


def test_the_distributed_analyzer(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2, on_ranks, tmp_path)
