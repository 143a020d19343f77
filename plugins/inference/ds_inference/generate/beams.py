"""Beam search of one prompt, step by step, with the results of transformers' `num_beams`.

All arithmetic is in fp32 tensors, in transformers' order, so scores are equal to the last bit where
logits are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import torch
from torch import Tensor

from ds_inference.generate import sampling
from ds_inference.generate.requests import Finish, Result, SamplingParams

_NEVER = -1e9
"""The score of a beam that does not count."""


class Beams:
    """The running and the finished beams of one prompt.

    params: of the request, with num_beams > 1.
    prompt: how many tokens the prompt has.
    new: the most tokens of an answer.

    stop_ids: tokens that end a beam.
    ends: whether a beam with these tokens (prompt included) ends, for other reasons.
    random: for candidates that are drawn (temperature > 0).
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: int,
        new: int,
        stop_ids: frozenset[int],
        ends: Callable[[list[int]], bool] | None,
        random: Random,
        device: torch.device | str,
    ) -> None:
        count = params.num_beams
        self._params = params
        self._prompt = prompt
        self._new = new
        self._stop_ids = stop_ids
        self._ends = ends
        self._random = random
        # A candidate that ends takes no place among the running beams: with so many candidates
        # there are `count` that go on even where every stop token is among the best of each beam.
        self._kept = max(2, 1 + len(stop_ids)) * count
        # Only the first beam counts at first: all begin with the same prompt.
        self._running = torch.full((count,), _NEVER, device=device)
        self._running[0] = 0
        # Where each running beam came from, step by step; `Result.beam_indices` of its answer.
        self._paths: list[tuple[int, ...]] = [()] * count
        # The finished answers: scores already divided by their length penalty; `_over` says which
        # of them are there.
        self._scores = torch.full((count,), _NEVER, device=device)
        self._over = torch.zeros(count, dtype=torch.bool, device=device)
        self._answers: list[tuple[list[int], tuple[int, ...]]] = [([], ())] * count
        self._open = True
        self._steps = 0
        self._all_scores: list[Tensor] = []
        self._all_logits: list[Tensor] = []

    def advance(self, logits: Tensor, beams: Sequence[list[int]]) -> list[tuple[int, int]] | None:
        """The next beams, as (which of `beams` it goes on with, token); None: the search is over.

        logits: [beams, vocabulary], or one row for all.
        beams: the tokens of each, prompt included.
        """
        count = self._params.num_beams
        # Sum up the log-probabilities along each beam, over all continuations of all beams at once.
        scores = self._score(logits.float(), beams)
        width = scores.shape[-1]
        scores, places = self._candidates(
            (scores.expand(count, -1) + self._running[:, None]).flatten()
        )
        # A place in the flat row is a beam and a token.
        found = [(place // width, place % width) for place in places.tolist()]
        self._steps += 1
        # Of the first step's logits there is one row for all beams, so a beam's number may be
        # larger than the number of `beams`.
        hits = [self._hit(beams[min(beam, len(beams) - 1)], token) for beam, token in found]
        hit = torch.tensor(hits, device=scores.device)
        paths = [(*self._paths[beam], beam) for beam, _ in found]
        # The beams that continue: the best that do not end.
        going = scores + hit.float() * _NEVER
        order = going.topk(count)[1]
        self._finish(
            scores,
            hit,
            [
                ([*beams[min(b, len(beams) - 1)][self._prompt :], t], path)
                for (b, t), path in zip(found, paths, strict=True)
            ],
        )
        # Only after `_finish`, which compares with the answers as they were before this step.
        self._running = going[order]
        follow = order.tolist()
        self._paths = [paths[place] for place in follow]
        self._open = self._open and self._may_improve()
        # Finished: nothing can become better, all places are taken, or no running beam is left.
        full = self._params.early_stopping is True and bool(self._over.all())
        return None if not self._open or full or all(hits) else [found[place] for place in follow]

    def results(self) -> list[Result]:
        """The best answers, the best first."""
        results = []
        for (tokens, path), score in zip(self._answers, self._scores.tolist(), strict=True):
            # A beam that was cut off at its longest ended by length, unless its last token is a
            # stop.
            stopped = len(tokens) < self._new or tokens[-1] in self._stop_ids
            results.append(
                Result(
                    tokens,
                    Finish.STOP if stopped else Finish.LENGTH,
                    score=score,
                    beam_indices=path,
                )
            )
        results[0].scores = self._all_scores
        results[0].logits = self._all_logits
        return results[: self._params.num_return_sequences]

    def _score(self, logits: Tensor, beams: Sequence[list[int]]) -> Tensor:
        """Log-probabilities after processing (of one beam or of all)."""
        params = self._params
        scores = torch.log_softmax(logits, -1)
        stops = self._stop_ids
        rows = []
        for row, tokens in zip(scores, beams, strict=True):
            row = sampling.process(row, params, tokens, self._prompt, stops)
            # One token more than there are stop tokens stays: else all candidates of a beam could
            # end.
            rows.append(sampling.mask_excluded(row, params, keep=len(stops) + 1))
        scores = torch.stack(rows)
        if params.keep_logits:
            self._all_logits.append(logits.expand(params.num_beams, -1).clone())
        if params.keep_scores:
            self._all_scores.append(scores.expand(params.num_beams, -1).clone())
        return scores

    def _candidates(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The best of all continuations, or some that are drawn, without repetition: (scores,
        places).
        """
        count = min(self._kept, scores.shape[0])
        if not self._params.temperature:
            return scores.topk(count)
        # Drawn without repetition: a candidate that was drawn has no weight in the next draw.
        weights = torch.softmax(scores, -1).double()[None]
        places = []
        for _ in range(min(count, int((weights > 0).sum()))):
            point = torch.tensor([self._random.random()], dtype=torch.float64, device=scores.device)
            places.append(sampling.pick(weights, point))
            weights[0, places[-1]] = 0
        chosen = torch.cat(places)
        return scores[chosen], chosen

    def _hit(self, tokens: list[int], token: int) -> bool:
        if token in self._stop_ids or self._steps >= self._new:
            return True
        return self._ends is not None and self._ends([*tokens, token])

    def _finish(
        self, scores: Tensor, hit: Tensor, found: list[tuple[list[int], tuple[int, ...]]]
    ) -> None:
        """Take what has ended among the first `num_beams` candidates into the answers, if it is
        better.
        """
        params = self._params
        count = self._params.num_beams
        # transformers lets an answer end only from among the first `num_beams` candidates: others
        # would be worse than a beam that continues.
        ended = hit & (torch.arange(len(found), device=hit.device) < count)
        scores = scores / self._steps**params.length_penalty
        # Once the search is over nothing replaces an answer, however good it is.
        if (params.early_stopping is True and bool(self._over.all())) or not self._open:
            scores = scores + _NEVER
        scores = scores + (~ended) * _NEVER
        # The best of the old answers and of those that ended now, as many as there are beams.
        merged, order = torch.cat([self._scores, scores]).topk(count)
        self._over = torch.cat([self._over, ended])[order]
        both = [*self._answers, *found]
        self._scores = merged
        self._answers = [both[place] for place in order.tolist()]

    def _may_improve(self) -> bool:
        """Whether the best running beam could still become better than the worst answer."""
        params = self._params
        # "never" takes the best score that a beam can still reach, at the largest length, which a
        # positive penalty favours; else the present length is taken, as a heuristic.
        length = (
            self._new
            if params.early_stopping == "never" and params.length_penalty > 0
            else self._steps
        )
        best = self._running[:1] / length**params.length_penalty
        worst = torch.where(self._over, self._scores.min(), _NEVER)
        return bool((best > worst).any())
