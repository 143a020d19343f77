"""In which order settings are tried: one after another, at random, or where a model of the trials
so far expects most.

optuna keeps the trials (ask and tell, in memory; the files of `experiments` are the only record).
The order depends only on the seed and on the results, so a tuner that was killed asks for the
same settings again.

[Note: the model] Throughput is close to a product of effects: ZeRO's stage costs a factor, a larger
micro-batch gains one, a bucket size another. So the logarithm of the metric is fitted by Bayesian
linear regression on one effect per value (and the logarithm of numbers), with weaker effects of
pairs with the stage and the micro-batch size. It knows its own uncertainty, needs numpy only, and
tells an effect from a handful of trials, where a model that assumes nothing of its inputs has not
begun to learn. The next trial is the one with the largest expected improvement.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ds_autotuning.search.space import MICRO, STAGE, Setting, Space, key_of

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, Trial

MANY = 2048
"""Settings among which the next one is chosen; of a larger space a sample, and the neighbours of
the best.
"""


class Search:
    """Settings of one space, each given once.

    allowed: whether a setting may be tried now; one that may not is passed over, and may come
    later.
    """

    def __init__(
        self,
        space: Space,
        kind: str,
        seed: int,
        allowed: Callable[[Setting], bool] = lambda _: True,
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space = space
        self.allowed = allowed
        # improvement that the next setting promises, as a share; 0: unknown
        self.expected = 0.0
        self.seen: set[str] = set()
        self._all: dict[str, dict[str, Any]] | None = None
        self._labels = {d.key: [key_of({"": v}) for v in d.values] for d in space.dimensions}
        self._given = {
            d.key: dict(zip(self._labels[d.key], d.values, strict=True)) for d in space.dimensions
        }
        self.distributions: dict[str, BaseDistribution] = {
            key: optuna.distributions.CategoricalDistribution(labels)
            for key, labels in self._labels.items()
        }
        self.study = optuna.create_study(direction="maximize", sampler=_sampler(kind, seed, self))
        self._asked: dict[str, Trial] = {}

    def next(self) -> dict[str, Any] | None:
        """The next setting; None when nothing is left that is allowed."""
        for _ in range(50):  # a sampler may come back to what it knows
            trial = self.study.ask(self.distributions)
            setting = self.space.meaning(
                {key: self._given[key][trial.params[key]] for key in self._labels}
            )
            if self._is_new(setting):
                return self._take(setting, trial)
            self._give_up(trial)
        # The sampler repeats itself: the first setting that is left, in the space's own order.
        for setting in itertools.islice(self.untried(), 1):
            self.study.enqueue_trial({key: key_of({"": setting[key]}) for key in self._labels})
            return self._take(setting, self.study.ask(self.distributions))
        return None

    def tell(self, setting: Setting, value: float | None) -> None:
        """What came of it: the larger the better; None: it failed, or cannot be run."""
        trial = self._asked.pop(key_of(setting))
        if value is None:
            self._give_up(trial)
        else:
            self.study.tell(trial, value)

    def learn(self, setting: Setting, value: float | None) -> None:
        """What came of a setting that was tried without being asked for."""
        import optuna

        self.seen.add(key_of(setting))
        params = self.labels(setting) if setting.keys() == self._labels.keys() else {}
        if (
            value is not None
            and params
            and all(label in self._given[key] for key, label in params.items())
        ):
            self.study.add_trial(
                optuna.trial.create_trial(
                    params=params, distributions=self.distributions, value=value
                )
            )

    def untried(self) -> Iterator[dict[str, Any]]:
        """Settings that are new and allowed, in the order of `Space.settings`."""
        return (
            setting
            for key, setting in self._each()
            if key not in self.seen and self.allowed(setting)
        )

    def _each(self) -> Iterable[tuple[str, dict[str, Any]]]:
        """Every setting with its key, those that mean the same once; kept, where they are not too
        many.
        """
        if self._all is None:
            each = ((key_of(s), s) for s in map(self.space.meaning, self.space.settings()))
            if len(self.space) > MANY:
                return each
            self._all = dict(each)
        return self._all.items()

    def labels(self, setting: Setting) -> dict[str, str]:
        """Its values as optuna knows them."""
        return {key: key_of({"": setting[key]}) for key in self._labels}

    def _is_new(self, setting: Setting) -> bool:
        return key_of(setting) not in self.seen and self.allowed(setting)

    def _take(self, setting: dict[str, Any], trial: Trial) -> dict[str, Any]:
        self.seen.add(key_of(setting))
        self._asked[key_of(setting)] = trial
        return setting

    def _give_up(self, trial: Trial) -> None:
        import optuna

        self.study.tell(trial, state=optuna.trial.TrialState.FAIL)


def _sampler(kind: str, seed: int, search: Search) -> Any:
    import optuna

    if kind == "random":
        return optuna.samplers.RandomSampler(seed)
    choose = _first if kind == "gridsearch" else _Expecting(seed)

    class Chosen(optuna.samplers.BaseSampler):  # type: ignore[misc, unused-ignore]
        """Of the settings that are left, the one that `choose` takes."""

        def infer_relative_search_space(
            self, study: Study, trial: FrozenTrial
        ) -> dict[str, BaseDistribution]:
            return search.distributions

        def sample_relative(self, study: Study, trial: FrozenTrial, space: Any) -> dict[str, Any]:
            done = [
                (t.params, t.value)
                for t in study.trials
                if t.state == optuna.trial.TrialState.COMPLETE and t.value
            ]
            setting = choose(search, done)
            return {} if setting is None else search.labels(setting)

        def sample_independent(
            self, study: Study, trial: FrozenTrial, name: str, distribution: Any
        ) -> Any:
            return distribution.choices[0]

    return Chosen()


def _first(
    search: Search, done: Sequence[tuple[Mapping[str, Any], float]]
) -> dict[str, Any] | None:
    return next(search.untried(), None)


# -- the model -------------------------------------------------------------------------------------


class _Expecting:
    """The setting with the largest expected improvement, once each effect has been seen."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __call__(
        self, search: Search, done: Sequence[tuple[Mapping[str, Any], float]]
    ) -> dict[str, Any] | None:
        # Settings that may be tried now; the config as given is the first of them.
        pool = self._pool(search, done)
        if not pool:
            return None
        if not done:
            return pool[0]
        import numpy

        # One matrix for settings that ran and those that are left, so that both have the same
        # columns.
        known = [
            {d.key: dict(_by_label(d))[params[d.key]] for d in search.space.dimensions}
            for params, _ in done
        ]
        features = _features(search.space, [*known, *pool])
        inputs = features[: len(known)]
        ahead = features[len(known) :]
        # Effects multiply, so they add in the logarithm; see [Note: the model].
        values = numpy.log(numpy.array([value for _, value in done]))
        mean, deviation = _predict(inputs, values, ahead)
        gain = _expected_improvement(mean, deviation, float(values.max()))
        search.expected = float(gain.max())
        return pool[int(gain.argmax())]

    def _pool(
        self, search: Search, done: Sequence[tuple[Mapping[str, Any], float]]
    ) -> list[dict[str, Any]]:
        """What is left; shuffled behind the config as given, so that equal expectations favour no
        key.
        """
        if len(search.space) <= MANY:
            left = list(search.untried())
        else:
            # A sample of a large space: its beginning, what is close to the best, and settings
            # drawn at random.
            near = list(itertools.islice(search.untried(), MANY // 8))
            left = list(
                {
                    key_of(s): s
                    for s in (*near, *self._neighbours(search, done), *self._some(search))
                }.values()
            )
        rest = left[1:]
        self.random.shuffle(rest)
        return left[:1] + rest

    def _some(self, search: Search) -> Iterator[dict[str, Any]]:
        dimensions = search.space.dimensions
        for _ in range(MANY // 4):
            setting = search.space.meaning(
                {d.key: self.random.choice(d.values) for d in dimensions}
            )
            if search._is_new(setting):
                yield setting

    def _neighbours(
        self, search: Search, done: Sequence[tuple[Mapping[str, Any], float]]
    ) -> Iterator[dict[str, Any]]:
        """Of the three best: one value changed."""
        for params, _ in sorted(done, key=lambda row: -row[1])[:3]:
            best = {d.key: dict(_by_label(d))[params[d.key]] for d in search.space.dimensions}
            for dimension in search.space.dimensions:
                for value in dimension.values:
                    setting = search.space.meaning({**best, dimension.key: value})
                    if search._is_new(setting):
                        yield setting


def _by_label(dimension: Any) -> list[tuple[str, Any]]:
    return [(key_of({"": v}), v) for v in dimension.values]


def _features(space: Space, settings: Sequence[Setting]) -> NDArray[numpy.float64]:
    """One row per setting; each column scaled by how large its effect may be."""
    import numpy

    columns: list[NDArray[numpy.float64]] = [numpy.full(len(settings), 3.0)]
    main: dict[str, list[NDArray[numpy.float64]]] = {}
    for dimension in space.dimensions:
        if len(dimension.values) > 1:
            main[dimension.key] = list(_of(dimension.values, [s[dimension.key] for s in settings]))
            columns += main[dimension.key]
    # Effects of pairs are weaker beforehand: those of the stage and the micro-batch size are the
    # likeliest.
    for one, two in itertools.combinations(main, 2):
        weight = (
            0.4 if {one, two} == {STAGE, MICRO} else 0.25 if {one, two} & {STAGE, MICRO} else 0.1
        )
        columns += [weight * a * b for a in main[one] for b in main[two]]
    return numpy.stack(columns, axis=1)


def _of(values: Sequence[Any], chosen: Sequence[Any]) -> Iterator[NDArray[numpy.float64]]:
    """Effects of one key: of each value; and of positive numbers the trend of their logarithm, and
    its bend.
    """
    import numpy

    for value in values:
        yield 0.3 * numpy.array([float(key_of({"": c}) == key_of({"": value})) for c in chosen])
    # Numbers have a trend as well, which tells something of values that have not been tried.
    if len(values) > 2 and all(
        isinstance(v, (int, float)) and not isinstance(v, bool) and v > 0 for v in values
    ):
        logs = numpy.log([float(v) for v in values])
        trend = (numpy.log([float(c) for c in chosen]) - logs.mean()) / (logs.std() or 1.0)
        yield 0.5 * trend
        yield 0.3 * (trend**2 - 1)


NOISE = 0.03
"""What two trials of one setting differ by, as a share."""


def _predict(
    inputs: NDArray[numpy.float64], values: NDArray[numpy.float64], ahead: NDArray[numpy.float64]
) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
    """Mean and deviation at `ahead`, by Bayesian linear regression with effects that are N(0, 1)
    beforehand.
    """
    import numpy

    # Values are scaled to mean 0 and deviation 1, for which the columns' scales are made.
    middle = values.mean()
    spread = max(float(values.std()), 0.3 / len(values))  # few trials do not tell it
    # As many unknowns as rows at most: the kernel form, n x n.
    kernel = inputs @ inputs.T + (NOISE / spread) ** 2 * numpy.eye(len(inputs))
    across = ahead @ inputs.T
    solved = numpy.linalg.solve(
        kernel, numpy.concatenate([((values - middle) / spread)[:, None], across.T], axis=1)
    )
    mean = across @ solved[:, 0]
    variance = (ahead**2).sum(1) - (across * solved[:, 1:].T).sum(1)
    return middle + spread * mean, spread * numpy.sqrt(numpy.maximum(variance, 1e-12))


def _expected_improvement(
    mean: NDArray[numpy.float64], deviation: NDArray[numpy.float64], best: float
) -> NDArray[numpy.float64]:
    """E[max(x - best, 0)] of a normal x (Jones, Schonlau and Welch 1998)."""
    import numpy

    score = (mean - best) / deviation
    density = numpy.exp(-(score**2) / 2) / math.sqrt(2 * math.pi)
    below = numpy.array([0.5 * math.erfc(-s / math.sqrt(2)) for s in score])
    expected: NDArray[numpy.float64] = (mean - best) * below + deviation * density
    return expected
