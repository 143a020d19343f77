"""What a run of the matrix found: refusals are traced to the pair of values that causes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import trial
from ds_testing import RemoteError
from ds_testing.kits.matrix.covering import Choice, Combination, Row, Rules, combinations
from features import FEATURES

from ds_core.errors import DSError
from ds_core.setup.compose import compose

REFUSALS = ("ConfigError", "UsageError", "PluginError", "LostRankError")
"""Errors that say what to change; those of initialize are refusals."""


def judge(ranks: Any, row: Row, folder: Path) -> dict[str, Any]:
    """The verdict of a row; "refused" with the message, "failed" with the error."""
    try:
        return trial.run(ranks, row, folder)
    except RemoteError as error:
        text = str(error.failures[0])
        message = text[-6000:]
        said = next((line for line in text.splitlines() if " raised " in line), "")
        if "in initialize" in text and any(kind in said for kind in REFUSALS):
            return {"kind": "refused", "message": said}
        return {"kind": "failed", "message": message}
    except AssertionError as error:
        return {"kind": "wrong", "worst": str(error)[:600], "off": float("nan")}


def words_of(choice: Choice) -> set[str]:
    """Words by which a message may name a choice: its own, and the keys of its config."""
    name, value = choice
    found = FEATURES[name][value]
    return {*found.words, *_leaves(found.config)}


def _leaves(config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value)
        else:
            yield key


def refusal(row: Row) -> str:
    """Why the config of a row is refused before ranks start; empty where it is not."""
    world, _ = trial.ranks_of(row)
    try:
        compose(trial.settings(row, "folder", int(row["gas"]))).mesh(world)
    except DSError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def cause(row: Row, message: str, asked: Combination = frozenset()) -> Combination:
    """The pair of choices to which a refusal belongs: `asked` where the message names both of its
    choices, else two others of the row that it names.
    """
    if asked and names_both(asked, message):
        return asked
    spoken = [choice for choice in row.items() if any(w in message for w in words_of(choice))]
    special = [choice for choice in spoken if choice[1] != next(iter(FEATURES[choice[0]]))]
    # A plain value may be what is refused: offload without a stage of ZeRO.
    for pair in itertools.chain(
        itertools.combinations(special, 2), itertools.combinations(spoken, 2)
    ):
        if any(choice in special for choice in pair):
            return frozenset(pair)
    return asked or frozenset(special[:1])


def names_both(pair: Combination, message: str) -> bool:
    """Whether a refusal names both of its keys."""
    return all(any(word in message for word in words_of(choice)) for choice in pair)


def learn(rules: Rules, judged: Callable[[Row], str] = refusal) -> dict[Combination, str]:
    """Every pair that is refused by itself, with the message; `rules` learn them, too.

    A pair is tried in the plainest row that is allowed.
    """
    found: dict[Combination, str] = {}
    order = list(rules.features)
    pairs = sorted(
        combinations(rules.features, 2),
        key=lambda pair: sorted((order.index(name), value) for name, value in pair),
    )
    for pair in pairs:
        # Each refusal that belongs to another pair leads to another row.
        while (row := rules.complete(dict(pair))) is not None and (message := judged(row)):
            blamed = cause(row, message, pair)
            found[blamed] = message
            rules.refused.add(blamed)
    return found
