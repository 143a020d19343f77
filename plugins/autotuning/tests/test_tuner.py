"""The order of trials, and when to stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from ds_autotuning.config import Autotuning
from ds_autotuning.records import Result, Status
from ds_autotuning.search.candidates import Candidate
from ds_autotuning.search.space import MICRO, STAGE, Dimension, Space
from ds_autotuning.search.tuner import Tuning, name_of, tune

STAGES = Space((Dimension((STAGE,), (0, 1, 2, 3), implied=True),))
FULL = Space((*STAGES.dimensions, Dimension(("b",), (5, 50, 500), implied=True)))


def tuned(
    speed: Any,
    space: Space = STAGES,
    sizes: Sequence[int] = (1, 2, 4, 8, 16),
    given: Any = None,
    **keys: Any,
) -> tuple[Tuning, list[Mapping[str, Any]]]:
    """A tuning over `speed(setting)`: samples/s, or a status.

    Gives the settings that were run, too.
    """
    ran: list[Mapping[str, Any]] = []

    def judge(setting: Mapping[str, Any]) -> Candidate:
        what = speed(setting)
        ruled_out = what in (Status.INVALID, Status.DOES_NOT_FIT)
        return Candidate(setting, {}, refused=Result(what, "why") if ruled_out else None)

    def run(number: int, name: str, candidate: Candidate) -> Result:
        ran.append(candidate.setting)
        assert number == len(ran)
        what = speed(candidate.setting)
        return (
            Result(what)
            if isinstance(what, Status)
            else Result(Status.DONE, throughput=what, latency=1 / what)
        )

    tuning = Tuning(Autotuning(**keys), space, lambda _: sizes, judge, run, given=given)
    tune(tuning)
    return tuning, ran


def pairs(ran: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    return [(s[STAGE], s[MICRO]) for s in ran]


@pytest.mark.parametrize("kind", ["gridsearch", "random"])
def test_micro_batches_grow_until_the_gain_is_under_5_percent_stage_by_stage(kind: str) -> None:
    tuning, ran = tuned(lambda s: 10 * min(s[MICRO], 4) - s[STAGE], tuner_type=kind)
    assert pairs(ran) == [(z, m) for z in (0, 1, 2, 3) for m in (1, 2, 4, 8)]
    assert tuning.best is not None
    assert tuning.best.setting == {STAGE: 0, MICRO: 4}


def test_growth_ends_where_memory_does_and_what_is_refused_is_passed_over() -> None:
    def speed(s: Mapping[str, Any]) -> Any:
        if s[MICRO] == 2:
            return Status.INVALID
        if s[STAGE] == 0:
            return Status.OUT_OF_MEMORY if s[MICRO] >= 4 else s[MICRO]
        return Status.DOES_NOT_FIT if s[MICRO] >= 8 else s[MICRO]

    tuning, ran = tuned(speed, tuner_type="gridsearch")
    assert pairs(ran) == [(0, 1), (0, 4), (1, 1), (1, 4), (2, 1), (2, 4), (3, 1), (3, 4)]
    never = [(r.name, r.result.status) for r in tuning.rows if not r.number]
    assert never[:2] == [("z0_mbs2", Status.INVALID), ("z1_mbs2", Status.INVALID)]
    assert ("z1_mbs8", Status.DOES_NOT_FIT) in never


def test_the_other_keys_are_tried_with_the_best_few_sizes() -> None:
    _, ran = tuned(
        lambda s: 10 * s[MICRO] + s["b"] / 100,
        FULL,
        sizes=(1, 2, 4),
        tuner_type="gridsearch",
        num_tuning_micro_batch_sizes=1,
        tuner_early_stopping=0,
    )
    assert [(s[MICRO], s["b"]) for s in ran if s[STAGE] == 0] == [
        (1, 5),
        (2, 5),
        (4, 5),
        (4, 50),
        (4, 500),
    ]


def test_a_stage_ends_after_so_many_trials_without_a_better_one() -> None:
    keys: dict[str, Any] = {"sizes": (1,), "tuner_type": "gridsearch"}
    wide = Space((Dimension((STAGE,), (0, 1)), Dimension(("b",), tuple(range(10)))))
    _, ran = tuned(lambda s: 100 - s["b"], wide, tuner_early_stopping=2, **keys)
    assert [(s[STAGE], s["b"]) for s in ran] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    _, ran = tuned(lambda s: 100 - s["b"], wide, tuner_early_stopping=0, **keys)
    assert len(ran) == 20


@pytest.mark.parametrize("kind", ["gridsearch", "random", "model_based"])
def test_never_more_trials_than_allowed(kind: str) -> None:
    tuning, ran = tuned(lambda s: 1 + s["b"] * s[MICRO], FULL, tuner_type=kind, tuner_num_trials=7)
    assert len(ran) == tuning.trials == 7


def test_the_model_stops_where_it_expects_nothing() -> None:
    _, ran = tuned(
        lambda s: 100.0, FULL, tuner_type="model_based", tuner_num_trials=60, tuner_early_stopping=3
    )
    assert len(ran) < 30


def test_the_model_goes_to_larger_batches_by_steps_and_not_beyond_what_failed() -> None:
    sizes = [2**n for n in range(11)]
    _, ran = tuned(
        lambda s: Status.OUT_OF_MEMORY if s[MICRO] >= 64 else float(s[MICRO]),
        STAGES,
        sizes,
        tuner_early_stopping=0,
    )
    seen = 0
    for setting in ran:
        step = sizes.index(setting[MICRO])
        assert step <= seen + 2
        seen = max(seen, step if setting[MICRO] < 64 else 0)
    for stage in range(4):
        failed = [s[MICRO] for s in ran if s[STAGE] == stage and s[MICRO] >= 64]
        assert failed == sorted(failed, reverse=True)  # after one, none as large


def test_the_config_as_given_is_the_first_trial() -> None:
    given = {STAGE: 2, MICRO: 3}
    for kind in ("gridsearch", "model_based"):
        tuning, ran = tuned(lambda s: s[MICRO], given=given, tuner_type=kind)
        assert ran[0] == given
        assert ran.count(given) == 1
        assert tuning.rows[0].name == "z2_mbs3"


def test_latency_is_better_when_it_is_less() -> None:
    tuning, _ = tuned(lambda s: 10.0 + s[STAGE], sizes=(1,), metric="latency")
    assert tuning.best is not None
    assert tuning.best.setting[STAGE] == 3
    none, _ = tuned(lambda s: Status.CRASHED, sizes=(1,), metric="latency")
    assert none.best is None


def test_without_a_stage_to_choose_the_sizes_alone_are_tuned() -> None:
    for kind in ("gridsearch", "model_based"):
        tuning, _ = tuned(lambda s: float(s[MICRO]), Space(()), (1, 2, 4), tuner_type=kind)
        assert tuning.best is not None
        assert tuning.best.setting == {MICRO: 4}


def test_names_tell_settings_apart() -> None:
    one = name_of({STAGE: 1, "b": 5, MICRO: 2}, FULL)
    two = name_of({STAGE: 1, "b": 50, MICRO: 2}, FULL)
    assert one == "z1_mbs2"
    assert two.startswith("z1_mbs2_")
    assert name_of({}, Space(())) == "given"
