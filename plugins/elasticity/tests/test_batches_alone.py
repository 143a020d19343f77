"""Batch sizes of elastic runs: the numbers that DeepSpeed computes, the errors, and the triple of a
run.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from ds_elasticity import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)

from ds_core.config import Batch
from ds_core.errors import ConfigError
from ds_core.setup.compose import compose

# What DeepSpeed 0.17.6 computes. version, max_train_batch_size, micro_batch_sizes, (min_gpus,
# max_gpus), prefer_larger_batch, (num_gpus_per_node, model_parallel_size), world_size -> its
# answer.
GOLDEN: list[tuple[Any, ...]] = [
    (0.1, 130, [23, 34, 4], (1, 24), True, (1, 1), 0, (96, [1, 2, 3, 4, 6, 8, 12, 24])),
    (0.2, 416, [14], (1, 10000), True, (1, 1), 1, (336, [1, 2, 3, 4, 6, 8, 12, 24], 14)),
    (0.1, 148, [2], (2, 10000), True, (1, 1), 0, (120, [2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60])),
    (0.2, 519, [1, 14, 2, 3], (2, 24), True, (4, 1), 6, (516, [6], 2)),
    (0.2, 117, [6, 4, 5], (2, 31), False, (1, 1), 11, (66, [11], 6)),
    (0.1, 138, [32, 6], (2, 34), False, (1, 1), 0, (72, [2, 3, 4, 6, 12])),
    (0.2, 160, [3, 27, 5, 34], (1, 10000), True, (4, 1), 11, (132, [11], 3)),
    (0.2, 525, [3, 14, 6], (2, 10000), False, (2, 1), 9, (486, [9], 6)),
    (
        0.2,
        405,
        [3, 33, 10],
        (2, 10000),
        False,
        (2, 1),
        4,
        (360, [2, 4, 6, 8, 10, 12, 18, 20, 24, 30, 36, 40, 60, 120], 10),
    ),
    (
        0.2,
        319,
        [6, 1],
        (2, 42),
        False,
        (2, 1),
        8,
        (240, [2, 4, 6, 8, 10, 12, 16, 20, 24, 30, 40], 6),
    ),
    (0.1, 122, [1], (1, 19), False, (1, 1), 0, (120, [1, 2, 3, 4, 5, 6, 8, 10, 12, 15])),
    (0.1, 24, [14], (4, 24), False, (1, 1), 0, (14, [])),
    (
        0.2,
        180,
        [2],
        (1, 10000),
        True,
        (1, 1),
        10,
        (120, [1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60], 2),
    ),
    (0.2, 154, [14, 3], (1, 24), True, (2, 1), 6, (144, [2, 4, 6, 8, 12, 16, 24], 3)),
    (0.2, 54, [6, 38, 7], (1, 24), True, (1, 1), 9, (54, [9], 6)),
    (0.2, 48, [4, 1, 1, 2], (2, 10000), True, (2, 1), 2, (48, [2, 4, 6, 8, 12, 16, 24, 48], 4)),
    (0.2, 119, [2], (2, 5), False, (4, 1), 1, (118, [1], 2)),
    (0.2, 134, [3, 5, 10], (1, 10000), True, (1, 1), 7, (126, [7], 3)),
    (0.1, 495, [15, 11, 40], (6, 6), False, (1, 1), 0, (360, [6])),
    (0.2, 461, [4, 39], (1, 1), False, (1, 1), 12, (0, [12], 39)),
    (0.2, 137, [15, 3], (7, 22), False, (1, 1), 9, (108, [9, 12, 18], 3)),
    (0.2, 69, [14, 3, 3], (1, 24), False, (1, 1), 12, (36, [1, 2, 3, 4, 6, 12], 3)),
    (0.2, 526, [33, 39, 3], (1, 39), False, (4, 2), 4, (360, [2, 4, 6, 8, 10, 12], 3)),
    (0.1, 156, [38], (13, 10000), True, (1, 1), 0, (152, [])),
    (0.2, 460, [16, 2, 19, 15], (5, 24), False, (2, 2), 5, (360, [2, 3, 4, 5, 6, 8, 9, 10, 12], 2)),
    (0.2, 436, [5, 38, 9, 19], (1, 24), True, (8, 2), 8, (6840, [4, 8, 12], 19)),
]


def section(**keys: Any) -> dict[str, Any]:
    return {
        "enabled": True,
        "max_train_batch_size": 100,
        "micro_batch_sizes": [2, 4],
        "max_gpus": 16,
        **keys,
    }


@pytest.mark.parametrize("row", GOLDEN, ids=str)
def test_the_numbers_are_those_of_deepspeed(row: tuple[Any, ...]) -> None:
    version, limit, micros, (low, high), larger, (node, parallel), world, expected = row
    given = {
        "enabled": True,
        "version": version,
        "max_train_batch_size": limit,
        "micro_batch_sizes": micros,
        "min_gpus": low,
        "max_gpus": high,
        "prefer_larger_batch": larger,
        "num_gpus_per_node": node,
        "model_parallel_size": parallel,
    }
    assert compute_elastic_config({"elasticity": given}, "0.17.6", world) == expected


def test_version_02_reads_the_number_of_ranks_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"elasticity": section()}
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(
        ElasticityConfigError, match="needs the number of ranks: give world_size, or set WORLD_SIZE"
    ):
        compute_elastic_config(given, "0.17.6")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert compute_elastic_config(given, "0.17.6", return_microbatch=True) == (
        96,
        [1, 2, 3, 4, 6, 8, 12, 16],
        4,
    )
    assert compute_elastic_config(given, "0.17.6") == (96, [1, 2, 3, 4, 6, 8, 12, 16])


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({}, ElasticityConfigError, "has no section elasticity"),
        ({"elasticity": {}}, ElasticityConfigError, "elasticity is off"),
        (
            {"elasticity": {"enabled": True}},
            ElasticityConfigError,
            "max_train_batch_size and micro_batch_sizes must be",
        ),
        (
            {"elasticity": section(version=0.3)},
            ElasticityConfigError,
            "version 0.3 is newer than 0.2",
        ),
        ({"elasticity": section(version=0.15)}, ElasticityConfigError, "version 0.15 is unknown"),
        (
            {"elasticity": section(micro_batch_sizes=[2, 0])},
            ElasticityConfigError,
            r"elasticity.micro_batch_sizes\[1\]",
        ),
        (
            {"elasticity": section(micro_batch_sizes=[200])},
            ElasticityConfigError,
            "micro-batch size 200 is more than",
        ),
        (
            {"elasticity": section(min_gpus=20)},
            ElasticityConfigError,
            "max_gpus 16 is less than min_gpus 20",
        ),
        (
            {"elasticity": section(version=0.1, model_parallel_size=2)},
            ElasticityConfigError,
            "needs version 0.2",
        ),
        (
            {"elasticity": section(num_gpus_per_node=3, model_parallel_size=2)},
            ElasticityConfigError,
            "num_gpus_per_node 3 is not a multiple of model_parallel_size 2",
        ),
        (
            {"elasticity": section(version=0.1)},
            ElasticityIncompatibleWorldSize,
            "5 data-parallel ranks cannot share",
        ),
    ],
)
def test_errors_name_the_key_and_the_numbers(
    given: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        compute_elastic_config(given, "0.17.6", 5)


def test_other_errors_of_the_function() -> None:
    with pytest.raises(ElasticityError, match="version 0.2.0 has no elasticity"):
        compute_elastic_config({"elasticity": section()}, "0.2.0", 1)
    with pytest.raises(ElasticityError, match="'new' is not a version"):
        compute_elastic_config({"elasticity": section()}, "new", 1)
    with pytest.raises(ElasticityConfigError, match="return_microbatch needs world_size"):
        compute_elastic_config(
            {"elasticity": section(version=0.1)}, "0.17.6", return_microbatch=True
        )
    with pytest.raises(ValueError, match="must be a dict, not str"):
        compute_elastic_config("config.json", "0.17.6")  # type: ignore[arg-type]
    configs: list[dict[str, Any]] = [{}, {"elasticity": {}}, {"elasticity": section()}]
    assert [elasticity_enabled(config) for config in configs] == [False, False, True]


def test_a_scheduler_with_another_section_is_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("DEEPSPEED_ELASTICITY_CONFIG", raising=False)
    ensure_immutable_elastic_config(section())
    assert "DEEPSPEED_ELASTICITY_CONFIG is not set" in caplog.text
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(section(min_gpus=2)))
    ensure_immutable_elastic_config(section())
    compose({"elasticity": section()})
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(section(max_train_batch_size=200)))
    said = "elasticity.max_train_batch_size: is 100 here, but the scheduler computed with 200"
    with pytest.raises(ElasticityConfigError, match=said):
        ensure_immutable_elastic_config(section())
    with pytest.raises(ConfigError, match=said):
        compose({"elasticity": section()})
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", "{")
    with pytest.raises(
        ConfigError, match="DEEPSPEED_ELASTICITY_CONFIG is not a section elasticity"
    ):
        compose({"elasticity": section()})


def test_the_triple_of_a_run_has_one_train_batch_at_every_size() -> None:
    chosen = compose({"elasticity": section(version=0.1)})
    triples = {world: chosen.batch(world) for world in (1, 2, 3, 4, 6, 8, 12, 16)}
    assert triples[8] == Batch(96, 4, 3) and triples[16] == Batch(96, 2, 3)
    assert {b.train for b in triples.values()} == {96}
    assert all(b.micro * b.gas * world == 96 for world, b in triples.items())
    with pytest.raises(
        ElasticityIncompatibleWorldSize,
        match="5 data-parallel ranks cannot share a train batch of 96",
    ):
        chosen.batch(5)


def test_the_triple_of_a_run_in_version_02() -> None:
    chosen = compose({"elasticity": section(num_gpus_per_node=4, model_parallel_size=2)})
    assert chosen.batch(4) == Batch(96, 4, 6)
    other = chosen.batch(10)  # no number of nodes that was counted on: a batch size of its own
    assert other == Batch(100, 2, 5)
    few = compose({"elasticity": section()})
    with pytest.raises(
        ElasticityIncompatibleWorldSize, match="max_train_batch_size: 100 is too small for 60"
    ):
        few.batch(60)


def test_batch_keys_are_errors_next_to_it_unless_ignored() -> None:
    keys = {"train_batch_size": 64, "gradient_accumulation_steps": 2}
    with pytest.raises(ConfigError) as caught:
        compose({"elasticity": section(), **keys})
    assert [p.path for p in caught.value.problems] == list(keys)
    chosen = compose({"elasticity": section(ignore_non_elastic_batch_info=True), **keys})
    assert chosen.batch(1).train == 96
    assert ["is on: this section sets" in str(note) for note in chosen.notes] == [True]
    off = compose({"elasticity": section(enabled=False), **keys})
    assert off.batch(2) == Batch(64, 16, 2)


def test_keys_without_effect_are_said() -> None:
    notes = compose({"elasticity": section(version=0.1, min_time=20, num_gpus_per_node=8)}).notes
    assert [note.path for note in notes] == ["elasticity.min_time", "elasticity.num_gpus_per_node"]
    old = compose({"elasticity": section(prefer_large_batch=False)})
    assert [note.path for note in old.notes] == ["elasticity.prefer_large_batch"]
    assert math.prod((old.batch(2).micro, old.batch(2).gas, 2)) == old.batch(2).train
