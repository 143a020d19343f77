"""From a setting to the config of its trial, or to why it is not tried."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from ds_autotuning.config import Autotuning
from ds_autotuning.records import Forecast, Status
from ds_autotuning.search.candidates import Judge, documented_bytes, micro_batches, without_output
from ds_autotuning.search.space import MICRO, STAGE, Space, installed_models, marked, space_of
from ds_autotuning.session import _Session

ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def judge(
    base: Mapping[str, Any], world: int = 4, room: float = 1e9, needs: float = 1.0, **keys: Any
) -> Judge:
    space = space_of(marked(installed_models()), base, world=world, facts={}, fast=True, own={})
    return Judge(
        base,
        space,
        world,
        Autotuning(**keys),
        lambda _: Forecast(needs, 0.0),
        lambda told: "too large" if told.device > room else "",
    )


def sizes(found: Any) -> Any:
    assert found.refused is None, found.refused
    return tuple(
        found.config[key] for key in ("train_batch_size", MICRO, "gradient_accumulation_steps")
    )


@pytest.mark.parametrize(
    ("base", "keys", "micro", "expected"),
    [
        ({"train_batch_size": 32}, {}, 2, (32, 2, 4)),  # a global batch that is given stays
        ({"train_batch_size": 32, "gradient_accumulation_steps": 8}, {}, 8, (32, 8, 1)),
        ({}, {}, 2, (8, 2, 1)),
        ({"gradient_accumulation_steps": 3}, {}, 2, (24, 2, 3)),
        (
            {"train_batch_size": "auto", MICRO: "auto", "gradient_accumulation_steps": "auto"},
            {},
            2,
            (8, 2, 1),
        ),
        ({"gradient_accumulation_steps": 4}, {"max_train_batch_size": 20}, 2, (16, 2, 2)),
        ({}, {"min_train_batch_size": 20}, 2, (24, 2, 3)),
        ({"train_batch_size": 32}, {"max_train_batch_size": 64}, 16, (64, 16, 1)),
        ({"train_batch_size": 32}, {"mp_size": 2}, 2, (32, 2, 8)),
    ],
)
def test_batch_sizes(
    base: dict[str, Any], keys: dict[str, Any], micro: int, expected: tuple[int, ...]
) -> None:
    assert sizes(judge({**ADAM, **base}, **keys)({STAGE: 1, MICRO: micro})) == expected


@pytest.mark.parametrize(
    ("base", "keys", "setting", "reason"),
    [
        (
            {"train_batch_size": 32},
            {},
            {MICRO: 3},
            "of 3 on 4 replicas do not divide train_batch_size 32",
        ),
        ({}, {"max_train_batch_size": 6}, {MICRO: 2}, "make no global batch from 1 to 6"),
        ({}, {"min_train_batch_size": 10, "max_train_batch_size": 11}, {MICRO: 2}, "from 10 to 11"),
        ({}, {}, {MICRO: 1, "fp16.loss_scal": 1}, "fp16.loss_scal"),
        ({}, {}, {MICRO: 1, "optimizer.type": "Adamm"}, "Adamm"),
        ({"tensor_parallel": {"autotp_size": 3}}, {}, {MICRO: 1}, "3"),
    ],
)
def test_a_config_that_training_would_refuse_is_never_run(
    base: dict[str, Any], keys: dict[str, Any], setting: dict[str, Any], reason: str
) -> None:
    found = judge({**ADAM, **base}, **keys)({STAGE: 0, **setting})
    assert found.refused is not None
    assert found.refused.status is Status.INVALID
    assert reason in found.refused.reason


def test_what_does_not_fit_is_never_run() -> None:
    found = judge({**ADAM, "train_batch_size": 8}, room=10, needs=11)({STAGE: 0, MICRO: 1})
    assert found.refused is not None
    assert (found.refused.status, found.refused.reason) == (Status.DOES_NOT_FIT, "too large")
    assert found.forecast == Forecast(11, 0.0)


def test_ranks_that_divide_a_layer_share_a_batch() -> None:
    found = judge({**ADAM, "train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}})(
        {STAGE: 0, MICRO: 2}
    )
    assert sizes(found) == (8, 2, 2)  # two replicas of two ranks


@pytest.mark.parametrize(
    ("base", "keys", "most", "expected"),
    [
        ({}, {}, 10, [1, 2, 4, 8]),
        ({}, {}, 12, [1, 2, 4, 8, 12]),  # the largest that fits is worth a trial
        ({}, {"max_train_micro_batch_size_per_gpu": 4}, 99, [1, 2, 4]),
        ({}, {"min_train_micro_batch_size_per_gpu": 3}, 24, [3, 6, 12, 24]),
        ({}, {"max_train_batch_size": 8}, 99, [1, 2, 4]),
        ({"train_batch_size": 64}, {}, 99, [1, 2, 4, 8, 16, 32]),
        ({"train_batch_size": 24}, {}, 99, [1, 2, 3, 6, 12]),
        ({"train_batch_size": 24}, {}, 5, [1, 2, 3]),
        ({"train_batch_size": 24}, {}, 0, []),
    ],
)
def test_micro_batches_worth_a_trial(
    base: dict[str, Any], keys: dict[str, Any], most: int, expected: list[int]
) -> None:
    assert micro_batches(Autotuning(**keys), base, 2, most) == expected


def test_the_users_sizes_replace_ours() -> None:
    assert micro_batches(Autotuning(), {}, 2, 10, own=(7, 3, 99)) == [3, 7]
    assert micro_batches(
        Autotuning(min_train_micro_batch_size_per_gpu=4), {}, 2, 10, own=(7, 3, 99)
    ) == [7]


@pytest.mark.parametrize(
    ("least", "most", "tried"), [(1, 1024, True), (3, 4, True), (4, 1024, False), (1, 2, False)]
)
def test_the_config_as_given_is_a_trial_within_the_bounds(
    least: int, most: int, tried: bool
) -> None:
    base = {**ADAM, "train_micro_batch_size_per_gpu": 3}
    keys = {"min_train_micro_batch_size_per_gpu": least, "max_train_micro_batch_size_per_gpu": most}
    session: Any = SimpleNamespace(section=Autotuning(**keys), base=base)
    found = _Session._given(session, judge(base, **keys), Space(()))
    assert found == ({MICRO: 3} if tried else None)


def test_trials_do_not_write_where_runs_do() -> None:
    base = {
        "csv_monitor": {"enabled": True, "output_path": "x"},
        "run_record": {"folder": "r"},
        "fp16": {},
    }
    assert without_output(base) == {
        "csv_monitor": {"enabled": False, "output_path": "x"},
        "run_record": {"folder": "r", "enabled": False},
    }
    assert without_output({"autosave": {"folder": "c", "every": 5}}) == {
        "autosave": {"folder": "c", "every": 0, "on_sigterm": False}
    }


@pytest.mark.parametrize(
    ("stage", "half", "expected"),
    [
        (0, True, 20.0),
        (1, True, 4 + 16 / 4),
        (2, True, 2 + 18 / 4),
        (3, True, 20 / 4),
        (0, False, 16.0),
        (3, False, 4.0),
    ],
)
def test_the_documented_estimate_of_memory(stage: int, half: bool, expected: float) -> None:
    assert documented_bytes(1000, stage, 4, half, 1) == 1000 * expected
    assert documented_bytes(1000, stage, 4, half, 2) == 500 * expected
