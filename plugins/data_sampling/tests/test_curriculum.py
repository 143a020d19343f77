"""Samples by difficulty: who may come when, how often, and that the order depends on nothing
else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ds_data_sampling.batching.order import make_order
from ds_data_sampling.config import DataEfficiency
from ds_data_sampling.curricula.config import Curriculum, Metric
from ds_data_sampling.curricula.curriculum import ByDifficulty

from ds_core.errors import UsageError

SIZE = 60
LENGTHS = np.random.RandomState(3).randint(1, 65, SIZE)
RARITY = np.random.RandomState(4).permutation(SIZE)
LINEAR = {"total_curriculum_step": 10, "difficulty_step": 8}


def files(folder: Path, name: str, values: Any) -> dict[str, str]:
    order = np.argsort(values, kind="stable")
    np.save(folder / f"{name}_samples.npy", order)
    np.save(folder / f"{name}_values.npy", np.asarray(values)[order])
    return {
        "index_to_sample_path": str(folder / f"{name}_samples.npy"),
        "index_to_metric_path": str(folder / f"{name}_values"),  # the suffix may be left out
    }


def by_length(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        **files(folder, "seqlen", LENGTHS),
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": 16,
        "max_difficulty": 64,
        "schedule_type": "fixed_linear",
        "schedule_config": LINEAR,
        **changes,
    }


def by_rarity(folder: Path, **changes: Any) -> dict[str, Any]:
    numbers = {"min_difficulty": 20, "max_difficulty": 100, "difficulty_type": "percentile"}
    schedule = {
        "schedule_type": "fixed_root",
        "schedule_config": LINEAR | {"difficulty_step": 10, "root_degree": 2},
    }
    return by_length(folder) | files(folder, "rarity", RARITY) | numbers | schedule | changes


def order_of(metrics: dict[str, Any], seed: int = 7, **settings: Any) -> ByDifficulty:
    settings = {"enabled": True, "curriculum_metrics": metrics, **settings}
    return ByDifficulty(Curriculum.model_validate(settings), SIZE, seed)


def steps(order: ByDifficulty, count: int, batch: int = 6, first: int = 0) -> list[list[int]]:
    """Batches of optimizer steps, epoch after epoch."""
    found = []
    for step in range(first, first + count):
        taken = order.take(batch, step)
        if len(taken) < batch:
            order.start(order.state_dict()["epoch"] + 1)
            taken += order.take(batch - len(taken), step)
        found.append(taken)
    return found


def test_samples_wait_until_they_are_easy_enough(tmp_path: Path) -> None:
    order = order_of({"seqlen": by_length(tmp_path)})
    longest = []
    for step, batch in enumerate(steps(order, 40)):
        limit = order.difficulties["seqlen"] if step == 39 else None
        longest.append(int(LENGTHS[batch].max()))
        allowed = min(64, (16 + 48 * (step + 1) // 10) // 8 * 8)
        assert longest[-1] <= allowed and (limit is None or limit == allowed)
    assert longest[0] <= 16 and max(longest[10:]) > 56


def test_a_percentile_is_of_all_samples(tmp_path: Path) -> None:
    numbers = {
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [20, 50], "max_step": [4]},
    }
    order = order_of({"rarity": by_rarity(tmp_path, max_difficulty=50, **numbers)})
    batches = steps(order, 40)
    assert {i for batch in batches[:4] for i in batch} <= set(np.flatnonzero(RARITY < 12).tolist())
    later = {i for batch in batches[4:] for i in batch}
    assert later == set(np.flatnonzero(RARITY < 30).tolist())  # the harder half never comes


def test_with_several_metrics_the_last_to_admit_decides(tmp_path: Path) -> None:
    metrics = {
        "seqlen": by_length(tmp_path, min_difficulty=40),
        "rarity": by_rarity(tmp_path, min_difficulty=40),
    }
    for folder in (None, str(tmp_path / "clusters")):
        order = order_of(metrics, data_cluster_path=folder)
        seen: set[int] = set()
        for step in range(60):
            batch = steps(order, 1, first=step)[0]
            length = order.difficulties["seqlen"]
            percent = order.difficulties["rarity"]
            assert all(LENGTHS[i] <= length and RARITY[i] < SIZE * percent // 100 for i in batch)
            seen.update(batch)
        assert seen == set(range(SIZE))
    written = sorted(file.name for file in (tmp_path / "clusters").iterdir())
    assert written and all(
        name.startswith("cluster-") and name.endswith(".npy") for name in written
    )


def test_when_all_are_admitted_each_comes_about_equally_often(tmp_path: Path) -> None:
    order = order_of({"seqlen": by_length(tmp_path, min_difficulty=32)})
    batches = steps(order, 1010)
    counts = Counter(i for batch in batches[10:] for i in batch)
    assert len(counts) == SIZE
    expected = 6 * 1000 / SIZE
    # Of a cluster each sample comes equally often, give or take one pass; clusters are drawn by
    # chance.
    assert all(0.7 * expected < count < 1.3 * expected for count in counts.values())
    first = [i for i in range(SIZE) if LENGTHS[i] <= 32]
    of_first = [counts[i] for i in first]
    assert max(of_first) - min(of_first) <= 2


def test_one_cluster_gives_every_sample_once_per_epoch(tmp_path: Path) -> None:
    order = order_of({"seqlen": by_length(tmp_path, clustering_type="single_cluster")})
    epochs = []
    for epoch in range(3):
        order.start(epoch)
        epochs.append(order.take(SIZE + 5, epoch))
        assert sorted(epochs[-1]) == list(range(SIZE))
    assert epochs[0] != epochs[1] != epochs[2]
    assert order.difficulties == {"seqlen": 24}


def test_the_order_does_not_depend_on_how_much_is_taken_at_a_time(tmp_path: Path) -> None:
    metrics = {"seqlen": by_length(tmp_path)}
    whole = order_of(metrics)
    parts = order_of(metrics)
    for step in range(9):
        one_by_one = [parts.take(1, step)[0] for _ in range(6)]
        assert whole.take(6, step) == one_by_one
    assert steps(order_of(metrics, seed=8), 9) != steps(order_of(metrics), 9)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("stop", [1, 5, 11, 23])
def test_it_goes_on_from_its_state(tmp_path: Path, several: bool, stop: int) -> None:
    metrics = {"seqlen": by_length(tmp_path)}
    if several:
        metrics["rarity"] = by_rarity(tmp_path, min_difficulty=60)
    order = order_of(metrics)
    expected = steps(order, 30)
    first = order_of(metrics)
    second = order_of(metrics)
    assert steps(first, stop) == expected[:stop]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.difficulties == first.difficulties
    assert steps(second, 30 - stop, first=stop) == expected[stop:]
    assert second.state_dict() == order.state_dict()


def test_custom_schedules(tmp_path: Path) -> None:
    schedules: dict[str, Callable[[int], int]] = {}
    metrics = {
        "seqlen": Metric.model_validate(
            by_length(tmp_path, schedule_type="custom", schedule_config={})
        )
    }
    order = ByDifficulty(Curriculum(enabled=True, curriculum_metrics=metrics), SIZE, 7, schedules)
    with pytest.raises(UsageError, match="set_custom_curriculum_learning_schedule"):
        order.take(1, 0)
    schedules["seqlen"] = lambda step: 64 if step == 3 else 20
    difficulties = []
    for step in range(5):
        order.take(2, step)
        difficulties.append(order.difficulties["seqlen"])
    assert difficulties == [20, 20, 64, 64, 64]  # what has come to the end stays there


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"easy enough for step 1.*raise min_difficulty"):
        order_of({"seqlen": by_length(tmp_path, min_difficulty=0)}).take(1, 0)
    order = order_of({"seqlen": by_length(tmp_path)})
    order.take(1, 0)
    with pytest.raises(
        UsageError, match=r"saved with 60 samples and difficulties of seqlen.* and rarity"
    ):
        order_of({"rarity": by_rarity(tmp_path)}).load_state_dict(order.state_dict())
    with pytest.raises(UsageError, match="is of a dataset of 60 samples; the training data has 61"):
        settings = {"enabled": True, "curriculum_metrics": {"seqlen": by_length(tmp_path)}}
        ByDifficulty(Curriculum.model_validate(settings), SIZE + 1, 0)


def test_the_config_chooses(tmp_path: Path) -> None:
    curriculum = {"enabled": True, "curriculum_metrics": {"seqlen": by_length(tmp_path)}}
    config = {
        "enabled": True,
        "data_sampling": {"enabled": True, "curriculum_learning": curriculum},
    }
    assert isinstance(make_order(DataEfficiency.model_validate(config), SIZE), ByDifficulty)
    config["data_sampling"] = {"enabled": True}
    plain = make_order(DataEfficiency.model_validate(config), 5, shuffle=False)
    plain.start(0)
    assert plain.take(9, 0) == [0, 1, 2, 3, 4]
