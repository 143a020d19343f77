"""What is asked of a generator and what it answers."""

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
    """How to choose tokens.

    max_new_tokens: None: as many as the model's positions and the cache allow. min_new_tokens: stop
        tokens are not chosen before. temperature: 0 takes the most probable token (greedy), except
        with beams, where it is 1. top_k 0, top_p 1 and min_p 0 filter nothing. repetition_penalty
        divides the scores of tokens of the prompt and the answer; presence and frequency penalties
        are subtracted for tokens of the answer, once or per occurrence. num_beams > 1: beam search
        (with `temperature` > 0 its candidates are drawn). stop_token_ids: besides the model's own
        (which ignore_eos switches off). stop_strings: need the generator's `decode`. seed: None:
        one is drawn. logprobs: also return the log-probabilities of the tokens and of this many
        most probable ones. logits_processors: called row by row, after the penalties and before
        temperature and filters. stopping: called after each token. keep_scores,
    keep_logits: `Result` has the vocabulary's scores of each step, after and before processing.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    num_return_sequences: int = 1
    logprobs: int | None = None
    logits_processors: tuple[Processor, ...] = ()
    stopping: tuple[Stopping, ...] = ()
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
    """A prompt and how to answer it. id: the caller's own, for whatever it wants."""

    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    id: object = None


@dataclass(slots=True, eq=False)
class Result:
    """One answer: `tokens` without the prompt (grows while it is made), `finished` None until it is
    whole.

    text: with the generator's `decode`, up to a stop string. logprobs and top: of each token, where
    asked for. score: of a beam, its summed log-probability divided by length ** length_penalty.
    scores, logits: fp32, one tensor per step, [vocabulary], or [num_beams, vocabulary] at the first
    of a prompt's beams. beam_indices: of a beam, the beams that its tokens came from.
    """

    tokens: list[int] = field(default_factory=list)
    finished: Finish | None = None
    text: str | None = None
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    score: float | None = None
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    beam_indices: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Handle:
    """A submitted request. results: `num_return_sequences` of them. error: what made it end with
    `Finish.ERROR`.
    """

    request: Request
    results: list[Result]
    done: bool = False
    error: Exception | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """What a step brought to a request: a token of answer `index`, its end (`finished`), or both.

    done: the request has ended with this one. A beam search has one for each answer, at its end,
    without a token; a request that failed ends with one without a token.
    """

    handle: Handle
    token: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finished: Finish | None = None
    index: int = 0
    done: bool = False
