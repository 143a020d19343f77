"""Choosing tokens: scores of all rows of a step at once.

A drawn token depends on its row and on one number in [0, 1) of its sequence's own generator only, so on no other row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_inference.requests import SamplingParams

__all__ = ["Filters", "draw", "filtered", "log_probability", "processed", "shown"]

_NUCLEUS = 512
"""Most probable tokens among which a nucleus is looked for before all are sorted."""


def processed(row: Tensor, params: SamplingParams, tokens: Sequence[int], prompt: int, stops: Iterable[int]) -> Tensor:
    """`row` [vocabulary], fp32, changed by penalties, `min_new_tokens` and logits processors.

    tokens: of the sequence, the first `prompt` of which were given. stops: tokens that end a sequence.
    """
    width = row.shape[0]
    row = row.clone()
    ids = torch.tensor(tokens, dtype=torch.int64, device=row.device)
    if params.repetition_penalty != 1:
        seen = ids[ids < width]
        score = row[seen]
        row[seen] = torch.where(score < 0, score * params.repetition_penalty, score / params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        said, counts = ids[prompt:].unique(return_counts=True)
        row[said] -= params.presence_penalty + params.frequency_penalty * counts
    if len(tokens) - prompt < params.min_new_tokens:
        row[[token for token in stops if token < width]] = -torch.inf
    for processor in params.logits_processors:
        row = processor(ids[None], row[None])[0]
    if row.shape != (width,):
        raise ValueError(f"a logits processor returned {tuple(row.shape)} scores for a vocabulary of {width}")
    return row


@dataclass(frozen=True, slots=True, eq=False)
class Filters:
    """Temperatures and filters of some rows, each [rows, 1].

    most: the largest top_k. keep: tokens that no filter removes. open: there are rows without top_k. plain: no filter.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    most: int
    keep: int
    open: bool
    plain: bool

    @staticmethod
    def of(params: Sequence[SamplingParams], device: torch.device | str = "cpu", keep: int = 1) -> Filters:
        """Those of `params`, one a row."""

        def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        ks = [p.top_k and max(p.top_k, keep) for p in params]
        return Filters(
            column([p.temperature or 1.0 for p in params]), column([*ks], torch.int64),
            column([2.0 if p.top_p == 1 else p.top_p for p in params], torch.float64),
            column([p.min_p for p in params], torch.float64), max(ks), keep, not all(ks),
            not any(p.top_k or p.top_p < 1 or p.min_p for p in params),
        )  # fmt: skip


def filtered(scores: Tensor, filters: Filters) -> tuple[Tensor, Tensor | None]:
    """The tokens that may be drawn: (their weights [rows, n], fp64, their ids [rows, n]; None: the whole vocabulary).

    Weights of a row are proportional to probabilities. Temperature comes first, then top_k, top_p of what is left, and
    min_p, as in transformers; of equal scores at the k-th place all stay.
    """
    scores = scores / filters.temperature
    if filters.plain:
        return torch.softmax(scores, -1).double(), None
    width = scores.shape[1]
    whole = scores.double().logsumexp(-1, keepdim=True) if filters.open else None
    count = min(width, max(filters.most + 16, _NUCLEUS if filters.open else 0))
    while True:
        values, ids = _sorted(scores, count)
        kth = values.gather(1, (filters.top_k - 1).clamp(0, count - 1))
        limited = filters.top_k > 0
        kept = ~limited | (values >= kth)
        values = values.double()
        norm = values.masked_fill(~kept, -torch.inf).logsumexp(-1, keepdim=True)
        if whole is not None:
            norm = torch.where(limited, norm, whole)
        weights = torch.where(kept, (values - norm).exp(), 0)
        before = weights.cumsum(-1) - weights
        inside = (before < filters.top_p) & (weights >= filters.min_p * weights[:, :1])
        inside[:, : filters.keep] = True
        weights = torch.where(inside, weights, 0)
        if count == width or not bool(weights[:, -1].any()):
            return weights, ids
        count = width


def _sorted(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest scores of each row and where they are; of equal ones the first comes first."""
    values, ids = scores.topk(count)
    ids, order = ids.sort(-1)
    values, order = values.gather(1, order).sort(stable=True, dim=-1, descending=True)
    return values, ids.gather(1, order)


def draw(weights: Tensor, ids: Tensor | None, numbers: Sequence[float]) -> Tensor:
    """One token of each row, by the row's number in [0, 1)."""
    reached = weights.cumsum(-1)
    # A hair below the total: rounding must not point behind the last token with a weight.
    at = torch.tensor(numbers, dtype=torch.float64, device=weights.device)[:, None] * (1 - 2.0**-50)
    places = torch.searchsorted(reached, at * reached[:, -1:], right=True)
    return (places if ids is None else ids.gather(1, places))[:, 0]


def shown(row: Tensor, params: SamplingParams, keep: int = 1) -> Tensor:
    """`row` [vocabulary] after temperature and filters: -inf where no token may be drawn."""
    if not params.temperature:
        return row.clone()
    weights, ids = filtered(row[None], Filters.of([params], row.device, keep))
    row = row / params.temperature
    if ids is None:
        return row
    return row.masked_fill(~torch.zeros_like(row, dtype=torch.bool).scatter(0, ids[0], weights[0] > 0), -torch.inf)


def log_probability(row: Tensor, token: int, most: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Of `token` by the scores `row`, and the `most` highest, by token."""
    logs = torch.log_softmax(row.float(), -1)
    if not most:
        return float(logs[token]), ()
    values, ids = logs.topk(min(most, logs.shape[0]))
    return float(logs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True))
