"""Requests to a generator, and its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from torch import Tensor

from ds_core.errors import UsageError

Processor = Callable[[Tensor, Tensor], Tensor]
"""(ids int64 [1, tokens so far], scores fp32 [1, vocabulary]) -> scores; transformers'
LogitsProcessor is one.
"""

Stopping = Callable[[Sequence[int]], bool]
"""(tokens so far, prompt included) -> whether the sequence ends here."""


class Finish(str, Enum):
    """Why a sequence ended: a stop token, string or criterion; its length; `Generator.cancel`; an
    error of its own.
    """

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. Values without a meaning are refused with UsageError.

    The order, as in transformers: penalties, `min_new_tokens`, `logits_processors`, temperature,
    top_k, top_p, min_p.
    """

    # None: as many as the model's positions and the cache allow.
    max_new_tokens: int | None = None
    # Stop tokens are not chosen before.
    min_new_tokens: int = 0
    # 0 takes the most probable token (greedy), except with beams, where it is 1.
    temperature: float = 0.0
    # The k most probable tokens are left; 0: all.
    top_k: int = 0
    # The most probable tokens that have this probability together are left; 1: all.
    top_p: float = 1.0
    # Tokens with at least this part of the highest probability are left; 0: all.
    min_p: float = 0.0
    # Divides positive scores of tokens of the prompt and the answer, multiplies negative ones.
    repetition_penalty: float = 1.0
    # Subtracted from the scores of tokens of the answer, once; frequency_penalty for each time.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # More than 1: beam search; with `temperature` > 0 its candidates are drawn.
    num_beams: int = 1
    # Beam search: a score is divided by length to this power.
    length_penalty: float = 1.0
    # Beam search, as in transformers: True ends at `num_beams` answers, "never" when none can be
    # better.
    early_stopping: bool | Literal["never"] = False
    # Besides the model's own, which ignore_eos switches off.
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    # Need the generator's `decode`.
    stop_strings: tuple[str, ...] = ()
    # None: one is drawn.
    seed: int | None = None
    # Answers to the prompt.
    num_return_sequences: int = 1
    # Also return the log-probabilities of the tokens, and of this many most probable ones.
    logprobs: int | None = None
    # Called row by row.
    logits_processors: tuple[Processor, ...] = ()
    # Called after each token.
    stopping: tuple[Stopping, ...] = ()
    # `Result` has the vocabulary's scores of each step after processing; keep_logits: before it.
    keep_scores: bool = False
    keep_logits: bool = False

    def __post_init__(self) -> None:
        """Refuse values without a meaning."""
        checks: tuple[tuple[str, bool, str], ...] = (
            (
                "max_new_tokens",
                self.max_new_tokens is None or self.max_new_tokens >= 1,
                "at least 1",
            ),
            ("min_new_tokens", self.min_new_tokens >= 0, "at least 0"),
            ("temperature", 0 <= self.temperature < float("inf"), "at least 0 (0: greedy)"),
            ("top_k", self.top_k >= 0, "at least 0 (0: all)"),
            ("top_p", 0 <= self.top_p <= 1, "between 0 and 1 (1: all)"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1 (0: all)"),
            (
                "repetition_penalty",
                1e-4 <= self.repetition_penalty <= 1e4,
                "between 0.0001 and 10000 (1: none)",
            ),
            (
                "presence_penalty",
                abs(self.presence_penalty) <= 1e4,
                "between -10000 and 10000 (0: none)",
            ),
            (
                "frequency_penalty",
                abs(self.frequency_penalty) <= 1e4,
                "between -10000 and 10000 (0: none)",
            ),
            ("num_beams", self.num_beams >= 1, "at least 1"),
            ("num_return_sequences", self.num_return_sequences >= 1, "at least 1"),
            (
                "early_stopping",
                self.early_stopping in (True, False, "never"),
                'True, False or "never"',
            ),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "at least 0"),
            ("stop_strings", all(self.stop_strings), "of strings that are not empty"),
        )
        for name, right, must in checks:
            if not right:
                raise UsageError(f"{name}={getattr(self, name)!r}: must be {must}")
        if self.num_beams > 1:
            self._check_beams()

    def _check_beams(self) -> None:
        if self.num_return_sequences > self.num_beams:
            raise UsageError(
                f"num_return_sequences={self.num_return_sequences} is more than "
                f"num_beams={self.num_beams}"
            )
        if self.logprobs is not None:
            raise UsageError(
                "logprobs: beams have scores (Result.score) instead; set num_beams=1 or "
                "logprobs=None"
            )

    @property
    def rows(self) -> int:
        """Sequences that decode at the same time."""
        return max(self.num_beams, self.num_return_sequences)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt and how to answer it."""

    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    # An identifier of the caller's own, which is not looked at.
    id: object = None


@dataclass(slots=True, eq=False)
class Result:
    """One answer."""

    # Without the prompt; grows while the answer is made.
    tokens: list[int] = field(default_factory=list)
    # None until the answer is complete.
    finished: Finish | None = None
    # With the generator's `decode`, up to a stop string.
    text: str | None = None
    # The log-probability of each token, and in `top` those of the most probable tokens beside it;
    # empty unless the request asks for them.
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    # Beam search: the summed log-probability divided by length ** length_penalty.
    score: float | None = None
    # fp32, one tensor a step: [vocabulary], or [num_beams, vocabulary] at the first of a prompt's
    # beams. logits: likewise.
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    # Beam search: the beam that each token came from.
    beam_indices: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Handle:
    """A submitted request."""

    request: Request
    # `num_return_sequences` of them.
    results: list[Result]
    # Whether it has ended, in whatever way.
    done: bool = False
    # What made it end with `Finish.ERROR`.
    error: Exception | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """What a step brought to a request: a token of an answer, its end, or both.

    A beam search has one for each answer, at its end, without a token; a request that failed ends
    with one without a token.
    """

    handle: Handle
    # None: there is none with this output.
    token: int | None
    # The token's log-probability, and in `top` those of the most probable tokens, if the request
    # asks for them.
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    # Why the answer ended; None: it continues.
    finished: Finish | None = None
    # Which answer of the request.
    index: int = 0
    # The request has ended with this output.
    done: bool = False
