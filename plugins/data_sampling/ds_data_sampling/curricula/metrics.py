"""What an analysis measures: numbers of samples, and sums over all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from ds_core.entries import resolve
from ds_core.errors import UsageError
from ds_data_sampling.batching.lengths import tokens_of
from ds_data_sampling.curricula.index import Array


@dataclass(frozen=True)
class Measure:
    """Something to measure.

    function: of a sample, or with `batched` of a batch as collate_fn makes it.
    kind: "value" gives a number per sample (batched: an array of them, in order); "sum" gives an
        array that is added up over all samples; shorter ones are filled up with zeros.
    dtype: what the numbers must be, as numpy says it; "": any.
    """

    name: str
    function: Callable[[Any], Any]
    kind: Literal["value", "sum"] = "value"
    batched: bool = False
    dtype: str = ""


def seqlen(sample: Any) -> int:
    """Tokens of a sample: those that its ``attention_mask`` marks, or all where it has none; see
    `tokens_of`.
    """
    mask = sample.get("attention_mask") if isinstance(sample, Mapping) else None
    if mask is None:
        return tokens_of(sample)
    return int(np.count_nonzero(_numbers(mask)))


def vocabulary(sample: Any) -> Array:
    """How often each token occurs in a sample: [largest token + 1]."""
    return np.bincount(_tokens(sample))


@dataclass(frozen=True)
class Rarity:
    """How rare the tokens of a sample are: the sum of -ln(share of the token among all of the data
    set).

    counts: of each token in the dataset. Source: DeepSpeed Data Efficiency,
    https://arxiv.org/abs/2212.03597.
    """

    counts: Array

    def __call__(self, sample: Any) -> float:
        """Of a sample, in nats."""
        tokens = _tokens(sample)
        if len(tokens) and (tokens.max() >= len(self.counts) or not self.counts[tokens].all()):
            raise UsageError(
                "a sample has a token that the counted vocabulary has not; count it again"
            )
        return float(-np.log(self.counts[tokens] / self.counts.sum()).sum())


def _uncounted(sample: Any) -> float:
    raise UsageError(
        "vocabularyrarity is measured by ds_data_sampling.curricula.analysis, "
        "which counts the vocabulary first"
    )


VOCABULARY = Measure("vocabulary", vocabulary, "sum")
RARITY = Measure("vocabularyrarity", _uncounted)
"""Stands for `Rarity` until the vocabulary has been counted."""
BUILT_IN: Mapping[str, Measure] = {
    each.name: each for each in (Measure("seqlen", seqlen), VOCABULARY, RARITY)
}


def named(text: str) -> Measure:
    """The measure that `text` asks for: a built-in name, or ``NAME=package.module:function`` of a
    sample.

    Raises UsageError for another name.
    """
    name, given, reference = text.partition("=")
    if not given:
        if name not in BUILT_IN:
            raise UsageError(
                f"no metric is called {name!r}; there are {', '.join(BUILT_IN)}, and "
                "NAME=package.module:function"
            )
        return BUILT_IN[name]
    function = resolve(reference)
    if not callable(function):
        raise UsageError(
            f"{reference} is a {type(function).__name__}; a function of a sample is needed"
        )
    if not name.isidentifier():
        raise UsageError(f"{name!r} cannot be the name of a metric; use letters, digits and _")
    return Measure(name, function)


def _tokens(sample: Any) -> Array:
    """The tokens of a sample that count: without padding, where an ``attention_mask`` tells it."""
    mask = None
    if isinstance(sample, Mapping):
        mask = sample.get("attention_mask")
        sample = sample["input_ids"] if "input_ids" in sample else next(iter(sample.values()))
    elif isinstance(sample, tuple):
        sample = sample[0]
    tokens = _numbers(sample)
    if mask is not None:
        tokens = tokens[_numbers(mask).astype(bool)]
    if tokens.dtype.kind not in "iu" or (len(tokens) and tokens.min() < 0):
        raise UsageError(
            "the tokens of a sample must be integers from 0; give your own function for others"
        )
    return tokens


def _numbers(value: Any) -> Array:
    found: Array = np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value)
    return found.reshape(-1) if found.size else found.reshape(-1).astype(np.int64)
