"""Choosing tokens: scores of all rows of a step at once.

A drawn token depends on its row and on one number in [0, 1) of its sequence's own generator only,
so on no other row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_inference.generate.requests import SamplingParams

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

_FIRST = 512
"""Most probable tokens among which a nucleus is looked for at first; then among 16 times as many.
"""
_ROWS = 8
"""Rows that are drawn from at a time where nothing is filtered."""
_PART = 32
"""Scores of a row that are looked at together."""
_COLDEST = 1e-6
"""Lower temperatures count as this one: it draws the most probable token, and scores divided by it
are still finite.
"""
_MOST = 2**31 - 1
"""The largest `top_k` that is told apart: no vocabulary has as many tokens."""


def process(
    row: Float[Tensor, " vocab"],
    params: SamplingParams,
    tokens: Sequence[int],
    prompt: int,
    stops: Iterable[int],
) -> Float[Tensor, " vocab"]:
    """`row`, fp32, changed by penalties, `min_new_tokens` and logits processors.

    tokens: of the sequence, the first `prompt` of which were given.
    stops: tokens that end a sequence.
    """
    width = row.shape[0]
    # The row may be a view of the step's logits, which `Result.logits` and log-probabilities read
    # later.
    row = row.clone()
    ids = torch.tensor(tokens, dtype=torch.int64, device=row.device)
    if params.repetition_penalty != 1:
        # Prompts may have tokens behind the vocabulary (padded embeddings), which have no score.
        seen = ids[ids < width]
        score = row[seen]
        # Keskar et al. 2019 (CTRL): both signs become less probable. A token that was seen twice is
        # written the same value twice.
        row[seen] = torch.where(
            score < 0, score * params.repetition_penalty, score / params.repetition_penalty
        )
    if params.presence_penalty or params.frequency_penalty:
        # Counted in the answer only, without the prompt, as OpenAI defines both penalties.
        said, counts = ids[prompt:].unique(return_counts=True)
        row[said] -= params.presence_penalty + params.frequency_penalty * counts
    if len(tokens) - prompt < params.min_new_tokens:
        row[[token for token in stops if token < width]] = -torch.inf
    for processor in params.logits_processors:
        row = processor(ids[None], row[None])[0]
    if row.shape != (width,):
        raise ValueError(
            f"a logits processor returned {tuple(row.shape)} scores for a vocabulary of {width}"
        )
    return row


@dataclass(frozen=True, slots=True, eq=False)
class Filters:
    """Temperatures and filters of some rows."""

    # fp32; 1 where a row is greedy.
    temperature: Float[Tensor, "rows 1"]
    # int64; 0: none.
    top_k: Int[Tensor, "rows 1"]
    # fp64; 2 where there is none, which no running sum reaches.
    top_p: Float[Tensor, "rows 1"]
    # fp64; 0: none.
    min_p: Float[Tensor, "rows 1"]
    # The largest top_k.
    most: int
    # Tokens that no filter removes.
    keep: int
    # There are rows without top_k.
    open: bool
    # No row has a filter.
    plain: bool

    def rows(self, rows: Tensor) -> Filters:
        """Those of `rows` alone."""
        temperature, top_k, top_p, min_p = (
            x[rows] for x in (self.temperature, self.top_k, self.top_p, self.min_p)
        )
        return replace(self, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)

    @staticmethod
    def of(
        params: Sequence[SamplingParams], device: torch.device | str = "cpu", keep: int = 1
    ) -> Filters:
        """Those of `params`, one a row."""

        def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        ks = [p.top_k and min(max(p.top_k, keep), _MOST) for p in params]
        temperatures = [max(p.temperature, _COLDEST) if p.temperature else 1.0 for p in params]
        return Filters(
            column(temperatures),
            column([*ks], torch.int64),
            column([2.0 if p.top_p == 1 else p.top_p for p in params], torch.float64),
            column([p.min_p for p in params], torch.float64),
            max(ks),
            keep,
            not all(ks),
            not any(p.top_k or p.top_p < 1 or p.min_p for p in params),
        )


def filter_scores(
    scores: Float[Tensor, "rows vocab"], filters: Filters, count: int = _FIRST
) -> tuple[Float[Tensor, "rows n"], Int[Tensor, "rows n"], Bool[Tensor, " rows"]]:
    """The n most probable tokens: (their weights, fp64, their ids, whether those are all that may
    be drawn).

    Weights of a row are its probabilities, times a factor; 0: may not be drawn. Temperature comes
    first, then top_k, top_p of what is left, and min_p, as in transformers; of equal scores at the
    k-th place all stay. The last is False for rows of which more than n tokens may be drawn: their
    weights are of no use.
    """
    # Rows with top_k need k places and some more for equal scores; rows without are looked at in
    # parts, the most probable first.
    scores = scores / filters.temperature
    count = min(scores.shape[1], max(filters.most + 16, count if filters.open else 0))
    # Only rows without top_k are normalised over the whole vocabulary.
    whole = scores.logsumexp(-1, keepdim=True).double() if filters.open else None
    values, ids = _sorted(scores, count)
    limited = filters.top_k > 0
    # Of equal scores at the k-th place all stay, as in transformers, which compares with the k-th
    # score.
    kept = ~limited | (values >= values.gather(1, (filters.top_k - 1).clamp(0, count - 1)))
    values = values.double()
    norm = values.masked_fill(~kept, -torch.inf).logsumexp(-1, keepdim=True)
    if whole is not None:
        norm = torch.where(limited, norm, whole)
    # Probabilities of what top_k has left.
    weights = torch.where(kept, (values - norm).exp(), 0)
    # The token that reaches top_p still belongs to the nucleus: what counts is the sum before it.
    before = weights.cumsum(-1) - weights
    inside = (before < filters.top_p) & (weights >= filters.min_p * weights[:, :1])
    inside[:, : filters.keep] = True
    weights = torch.where(inside, weights, 0)
    # The last place is outside of the nucleus, so everything behind it is, too.
    complete = weights[:, -1] == 0
    return weights, ids, complete if count < scores.shape[1] else torch.ones_like(complete)


def _sorted(
    scores: Float[Tensor, "rows vocab"], count: int
) -> tuple[Float[Tensor, "rows count"], Int[Tensor, "rows count"]]:
    """The `count` highest scores of each row and where they are; of equal ones the first comes
    first.
    """
    values, ids = _highest(scores, count)
    # By place first, then stably by score: of equal scores the first comes first on every device,
    # so that a draw is the same everywhere.
    ids, order = ids.sort(-1)
    values, order = values.gather(1, order).sort(stable=True, dim=-1, descending=True)
    return values, ids.gather(1, order)


def _highest(
    scores: Float[Tensor, "rows vocab"], count: int
) -> tuple[Float[Tensor, "rows count"], Int[Tensor, "rows count"]]:
    """``topk``, several times as fast: only parts of a row whose maximum is among the highest are
    looked into.
    """
    # Below that `topk` itself is as fast.
    if 4 * count * _PART > scores.shape[1]:
        return scores.topk(count)
    scores = torch.nn.functional.pad(scores, (0, -scores.shape[1] % _PART), value=-torch.inf)
    # `count` parts with the highest maxima hold the `count` highest scores: any other part has a
    # maximum below theirs.
    parts = scores.unflatten(1, (-1, _PART)).amax(-1).topk(count, sorted=False).indices
    places = (parts[:, :, None] * _PART + torch.arange(_PART, device=scores.device)).flatten(1)
    values, at = scores.gather(1, places).topk(count)
    return values, places.gather(1, at)


def draw(
    scores: Float[Tensor, "rows vocab"], filters: Filters, numbers: Sequence[float]
) -> Int[Tensor, " rows"]:
    """One token of each row of `scores`, by the row's number in [0, 1)."""
    points = torch.tensor(numbers, dtype=torch.float64, device=scores.device)
    if filters.plain:
        # Few rows at a time: what is 64 bits wide stays small.
        parts = zip(*(x.split(_ROWS) for x in (scores, filters.temperature, points)), strict=True)
        return torch.cat([pick(torch.softmax(s / t, -1).double(), p) for s, t, p in parts])
    return _draw_filtered(scores, filters, points, _FIRST)


def _draw_filtered(
    scores: Float[Tensor, "rows vocab"],
    filters: Filters,
    points: Float[Tensor, " rows"],
    count: int,
) -> Int[Tensor, " rows"]:
    weights, ids, complete = filter_scores(scores, filters, count)
    tokens = ids.gather(1, pick(weights, points)[:, None])[:, 0]
    # A flat distribution has a nucleus of thousands: only such rows pay for looking at more. The
    # same number is used again, so the draw is the same as from all places at once.
    if not bool(complete.all()):
        rows = (~complete).nonzero()[:, 0]
        tokens[rows] = _draw_filtered(scores[rows], filters.rows(rows), points[rows], 16 * count)
    return tokens


def pick(weights: Float[Tensor, "rows n"], points: Float[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """Where each row's running sum passes the row's point, which is a share of its total; never at
    a weight of 0.
    """
    reached = weights.cumsum(-1)
    # A hair below the total: rounding must not point behind the last weight.
    goals = points[:, None] * (1 - 2.0**-50) * reached[:, -1:]
    return torch.searchsorted(reached, goals, right=True).clamp(max=weights.shape[1] - 1)[:, 0]


def mask_excluded(
    row: Float[Tensor, " vocab"], params: SamplingParams, keep: int = 1
) -> Float[Tensor, " vocab"]:
    """`row` after temperature and filters: -inf where no token may be drawn."""
    if not params.temperature:
        return row.clone()
    filters = Filters.of([params], row.device, keep)
    if filters.plain:
        return row / max(params.temperature, _COLDEST)
    # Over the whole vocabulary at once, since every place of the row is shown.
    weights, ids, _ = filter_scores(row[None], filters, row.shape[0])
    row = row / max(params.temperature, _COLDEST)
    inside = torch.zeros_like(row, dtype=torch.bool)
    inside[ids[0][weights[0] > 0]] = True
    return row.masked_fill(~inside, -torch.inf)


def log_probability(
    row: Float[Tensor, " vocab"], token: int, most: int
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Of `token` by the scores `row`, and the `most` highest, by token."""
    logs = torch.log_softmax(row.float(), -1)
    if not most:
        return float(logs[token]), ()
    values, ids = logs.topk(min(most, logs.shape[0]))
    return float(logs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True))
