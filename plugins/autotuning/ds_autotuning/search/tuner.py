"""The order of trials, and when to stop.

gridsearch and random go stage by stage of ZeRO: micro-batches grow until a larger one gains less
than 5 %, then the other keys are tried with the best few sizes. model_based searches all keys
together. Either begins with the config as given, so that the result says what was gained.

Everything here follows from the config, the profile and the results alone, in one order: that is
what lets a killed tuner go on (see `experiments`).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ds_autotuning.records import Result, Row, Status
from ds_autotuning.search.candidates import Candidate
from ds_autotuning.search.search import Search
from ds_autotuning.search.space import MICRO, STAGE, Dimension, Setting, Space, key_of
from ds_autotuning.search.why import best_of, value_of

if TYPE_CHECKING:
    from ds_autotuning.config import Autotuning

GAIN = 1.05
"""A larger micro-batch must be faster by this, or growth stops."""
PROMISING = 0.005
"""A trial that the model expects to gain more than this share does not count for early stopping."""
AHEAD = 2
"""How many sizes beyond the largest that has run may be tried by model_based."""


@dataclass
class Tuning:
    """One tuning: what it may try, and what came of it."""

    section: Autotuning
    # -- what may be tried
    # All keys but the micro-batch size.
    space: Space
    # Sizes of micro-batches for a setting, ascending.
    sizes: Callable[[Setting], Sequence[int]]
    # See `candidates.Judge`.
    judge: Callable[[Setting], Candidate]
    # (number, name, candidate) -> result.
    run: Callable[[int, str, Candidate], Result]
    # Called with each row.
    say: Callable[[Row], None] = lambda _: None
    # The setting of the config as given, where it says all of it.
    given: Setting | None = None
    # -- what came of it
    # In the order of trials; with what was ruled out.
    rows: list[Row] = field(default_factory=list)
    best: Row | None = None
    # How many settings were run.
    trials: int = 0
    # By `key_of` of the setting.
    _known: dict[str, Row] = field(default_factory=dict)

    def trial(self, setting: Setting) -> Row:
        """Try a setting, unless it was tried or is ruled out."""
        if (row := self._known.get(key_of(setting))) is not None:
            return row
        # What composition or the forecast of memory refuses costs no trial, and is a row of the
        # report all the same.
        candidate = self.judge(setting)
        result = candidate.refused
        number = 0
        name = name_of(setting, self.space)
        if result is None:
            number = self.trials = self.trials + 1
            result = self.run(number, name, candidate)
        row = Row(number, name, setting, result, candidate.forecast)
        self._known[key_of(setting)] = row
        self.rows.append(row)
        self.best = best_of([row] if self.best is None else [self.best, row], self.section.metric)
        self.say(row)
        return row

    @property
    def spent(self) -> bool:
        """Whether no more trial may be run."""
        return self.trials >= self.section.tuner_num_trials


def tune(tuning: Tuning) -> None:
    """Run trials until nothing promising is left or the limits are reached; `rows` and `best` have
    what came of it.
    """
    # The config as given comes first: all gains are compared with it.
    if tuning.given is not None:
        tuning.trial(tuning.given)
    if tuning.section.tuner_type == "model_based":
        _together(tuning)
    else:
        stages = tuning.space.dimension(STAGE)
        for stage in stages.values if stages else (None,):
            if not tuning.spent:
                _stage(
                    tuning,
                    tuning.space
                    if stage is None
                    else tuning.space.where(**{STAGE.replace(".", "__"): stage}),
                )


def score(row: Row, metric: str) -> float | None:
    """The larger the better; None where nothing was measured."""
    value = value_of(row, metric)
    if value is None or value <= 0:
        return None
    return 1 / value if metric == "latency" else value


def name_of(setting: Setting, space: Space) -> str:
    """For folders and tables: stage and micro-batch, and a few letters that tell other keys
    apart."""
    parts = [f"z{setting[STAGE]}"] if STAGE in setting else []
    parts += [f"mbs{setting[MICRO]}"] if MICRO in setting else []
    base = space.base()
    other = {
        k: v
        for k, v in setting.items()
        if k not in (STAGE, MICRO) and key_of({"": v}) != key_of({"": base.get(k)})
    }
    parts += [hashlib.sha256(key_of(other).encode()).hexdigest()[:6]] if other else []
    return "_".join(parts) or "given"


# -- stage by stage --------------------------------------------------------------------------------


def _stage(tuning: Tuning, space: Space) -> None:
    sizes = _grow(tuning, space)
    # With one setting per size there is nothing left to search.
    if not sizes or len(space) == 1:
        return
    whole = Space((*space.dimensions, Dimension((MICRO,), tuple(sizes))))
    search = Search(
        whole,
        tuning.section.tuner_type,
        tuning.section.seed,
        lambda s: key_of(s) not in tuning._known,
    )
    _until_it_stops(tuning, search)


def _grow(tuning: Tuning, space: Space) -> list[int]:
    """Micro-batches of growing size, all else as given. Gives the best few, the best first."""
    # All other keys keep the config's values, so that sizes are compared under equal conditions.
    base = space.meaning(space.base())
    seen = {}
    last = None
    for size in tuning.sizes(base):
        if tuning.spent and key_of({**base, MICRO: size}) not in tuning._known:
            break
        row = tuning.trial({**base, MICRO: size})
        value = score(row, tuning.section.metric)
        if value is None:
            # A size may be refused for a reason that a larger one has not, such as divisibility.
            if row.result.status is Status.INVALID:
                continue
            break
        seen[size] = value
        # Larger sizes cost memory that other settings could use.
        if last is not None and value < GAIN * last:
            break
        last = value
    return sorted(seen, key=lambda size: -seen[size])[: tuning.section.num_tuning_micro_batch_sizes]


# -- all together ----------------------------------------------------------------------------------


def _together(tuning: Tuning) -> None:
    base = tuning.space.base()
    stages = tuning.space.dimension(STAGE)
    by_stage = {
        key_of({"": v}): tuning.sizes({**base, STAGE: v}) for v in (stages.values if stages else ())
    }
    sizes = sorted(
        {size for each in (by_stage.values() if stages else [tuning.sizes(base)]) for size in each}
    )
    if not sizes:
        return
    # Sizes that have run bound how far ahead of them the model may look; settings that failed rule
    # out the same with a larger size.
    tried: set[int] = set()
    failed: list[Setting] = []

    def allowed(setting: Setting) -> bool:
        size = setting[MICRO]
        largest = max(tried, default=sizes[0])
        reach = max(bisect_right(sizes, largest) - 1, 0) + AHEAD
        inside = size in by_stage[key_of({"": setting[STAGE]})] if stages else True
        return (
            inside
            and size <= sizes[min(reach, len(sizes) - 1)]
            and not any(_is_larger(setting, f) for f in failed)
        )

    def heard(row: Row) -> None:
        if row.result.status is Status.DONE:
            tried.add(row.setting[MICRO])
        elif row.result.status in (Status.OUT_OF_MEMORY, Status.TIMEOUT, Status.DOES_NOT_FIT):
            failed.append(row.setting)

    space = Space((*tuning.space.dimensions, Dimension((MICRO,), tuple(sizes))))
    search = Search(space, "model_based", tuning.section.seed, allowed)
    # The trial of the config as given is the model's first point.
    for row in tuning.rows:
        heard(row)
        search.learn(row.setting, _worth(tuning, row))
    _until_it_stops(tuning, search, heard)


def _is_larger(setting: Setting, failed: Setting) -> bool:
    """Whether it is `failed` with as large a micro-batch or a larger one."""
    same = all(k in failed and setting[k] == failed[k] for k in setting if k != MICRO)
    return same and bool(setting[MICRO] >= failed[MICRO])


def _until_it_stops(
    tuning: Tuning, search: Search, heard: Callable[[Row], None] = lambda _: None
) -> None:
    idle = 0
    patience = tuning.section.tuner_early_stopping
    while not tuning.spent and not (patience and idle >= patience):
        setting = search.next()
        if setting is None:
            return
        before = tuning.best
        # Patience counts trials from which nothing was expected: the search continues while the
        # model promises a gain.
        promising = search.expected > PROMISING
        row = tuning.trial(setting)
        heard(row)
        search.tell(setting, _worth(tuning, row))
        # A setting that was ruled out has cost nothing, and does not count as a trial.
        if row.number:
            idle = 0 if tuning.best is not before else idle + (not promising)


def _worth(tuning: Tuning, row: Row) -> float | None:
    """What a search learns of a trial: one that died was bad, one that was not run says nothing."""
    value = score(row, tuning.section.metric)
    if value is not None or not row.number:
        return value
    # A penalty below the worst that ran, so that the model avoids the neighbourhood of failures.
    seen = [v for r in tuning.rows if (v := score(r, tuning.section.metric)) is not None]
    return 0.7 * min(seen) if seen else None
