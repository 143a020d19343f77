"""The next token of each of some sequences, from the logits of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from ds_core.errors import UsageError
from ds_inference.generate import sampling
from ds_inference.generate.requests import SamplingParams
from ds_inference.generate.scheduler import Sequence


class Choice:
    """How `sequences` choose; made once for as long as a step has the same ones.

    rows: the row of the logits that each reads; None: the i-th reads row i.
    """

    def __init__(
        self,
        sequences: SequenceOf[Sequence],
        rows: SequenceOf[int] | None,
        device: torch.device | str,
    ) -> None:
        self.sequences = list(sequences)
        params = [sequence.group.params for sequence in sequences]
        # An index on the device: reading rows by a Python list would copy it there in each step.
        self._rows = None if rows is None else torch.tensor(rows, dtype=torch.int64, device=device)
        # Most requests need none of the following; a step of such sequences is one argmax over the
        # rows.
        self._processed = [i for i, p in enumerate(params) if _changes(p)]
        self._kept = [i for i, p in enumerate(params) if p.keep_logits or p.keep_scores]
        self._logged = [i for i, p in enumerate(params) if p.logprobs is not None]
        # (places, the same as a tensor, their filters) of the sequences that draw.
        self._drawn = []
        # Rows without filters need no sorting, so they go apart.
        for plain in (True, False):
            places = [i for i, p in enumerate(params) if p.temperature and _plain(p) is plain]
            if places:
                filters = sampling.Filters.of([params[i] for i in places], device)
                self._drawn.append(
                    (places, torch.tensor(places, dtype=torch.int64, device=device), filters)
                )

    def __call__(self, logits: Tensor) -> tuple[list[int], Tensor, dict[int, Exception]]:
        """The tokens, as a list and on their device, and the errors of sequences that could not
        choose, by place.
        """
        errors: dict[int, Exception] = {}
        raw = logits if self._rows is None else logits[self._rows]
        # also where nothing is changed: argmax of bf16 takes several times as long
        scores = raw.float()
        if self._processed:
            scores = scores.clone() if scores is raw else scores
            self._process(scores, errors)
        # Greedy for all rows; rows that draw are overwritten below.
        ids = scores.argmax(-1)
        # The highest score shows both faults: -inf where every token was excluded, NaN from the
        # model (argmax returns the place of a NaN).
        for i, value in enumerate(scores.gather(1, ids[:, None])[:, 0].tolist()):
            if not math.isfinite(value):
                what = (
                    "there is no token that may be chosen"
                    if value == -math.inf
                    else f"the highest is {value}"
                )
                errors.setdefault(i, UsageError(f"scores of the next token: {what}"))
        for places, index, filters in self._drawn:
            # The usual step, in which all sequences draw in one way, copies no rows.
            mine = scores if len(places) == len(self.sequences) else scores[index]
            ids[index] = sampling.draw(mine, filters, [self._number(i, errors) for i in places])
        tokens: list[int] = ids.tolist()
        self._record(raw, scores, tokens, errors)
        return tokens, ids, errors

    def _number(self, place: int, errors: dict[int, Exception]) -> float:
        random = self.sequences[place].random
        assert random is not None
        # Drawing for a failed sequence would advance its generator, and its row has no
        # distribution; its token is dropped by the caller.
        return 0.0 if place in errors else random.random()

    def _process(self, scores: Tensor, errors: dict[int, Exception]) -> None:
        for i in self._processed:
            group = self.sequences[i].group
            tokens = self.sequences[i].tokens
            try:
                scores[i] = sampling.process(
                    scores[i], group.params, tokens, group.prompt, group.stop_ids
                )
            # a processor is the caller's code: its request fails, no other
            except Exception as error:
                errors[i] = error

    def _record(
        self, raw: Tensor, scores: Tensor, tokens: list[int], errors: dict[int, Exception]
    ) -> None:
        """Log-probabilities, scores and logits, for those that want them."""
        # From the model's own scores, before penalties and filters, as OpenAI's log-probabilities.
        for i in self._logged:
            result = self.sequences[i].result
            most = self.sequences[i].group.params.logprobs
            if result is not None and most is not None and i not in errors:
                chance, top = sampling.log_probability(raw[i], tokens[i], most)
                result.logprobs.append(chance)
                result.top.append(top)
        for i in self._kept:
            sequence = self.sequences[i]
            assert sequence.result is not None
            if sequence.group.params.keep_logits:
                # A copy: `raw` may be the memory of a recorded graph, which the next step
                # overwrites.
                sequence.result.logits.append(raw[i].float().clone())
            if sequence.group.params.keep_scores:
                sequence.result.scores.append(
                    sampling.mask_excluded(scores[i].float(), sequence.group.params)
                )


def _changes(params: SamplingParams) -> bool:
    """Whether scores are changed row by row."""
    return bool(
        params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or params.min_new_tokens
        or params.logits_processors
    )


def _plain(params: SamplingParams) -> bool:
    return not (params.top_k or params.top_p < 1 or params.min_p)
