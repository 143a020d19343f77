"""The objects of OpenAI's protocol, for complete answers and for the chunks of a stream."""

from __future__ import annotations

import functools
import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_inference.generate.requests import Finish, Output
from ds_inference.generate.stopping import Decode
from ds_inference.serve.text import Text


@dataclass(frozen=True, slots=True)
class Piece:
    """A token of an answer as text."""

    text: str
    # The character of the answer at which it begins.
    at: int
    logprob: float
    # The most probable tokens at its place, with their log-probabilities.
    top: tuple[tuple[str, float], ...]


@dataclass
class Usage:
    """Tokens of a request."""

    prompt: int
    completion: int = 0

    def body(self) -> dict[str, int]:
        """As JSON."""
        total = self.prompt + self.completion
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": total,
        }


class Choice:
    """One answer as it grows."""

    def __init__(
        self, index: int, decode: Decode, stops: Sequence[str], name: Callable[[int], str] | None
    ) -> None:
        self.index = index
        self._text = Text(decode, stops)
        self._name = name
        # Tokens whose text is not shown yet: it may turn out to be part of a stop string.
        self._pieces: list[Piece] = []
        # The reason why it ended; None while it runs.
        self.finish: str | None = None
        self.begun = False

    @property
    def named(self) -> bool:
        """Whether logprobs were asked for."""
        return self._name is not None

    def add(self, output: Output) -> tuple[str, list[Piece]]:
        """The text that this token makes readable, and the tokens that it is made of (with logprobs
        only).
        """
        shown = ""
        ends = output.finished is Finish.STOP  # its token is an end of sequence, not text
        if output.token is not None and not ends:
            at = self._text.decoded
            if self._name is not None:
                top = tuple((self._name(token), _finite(value)) for token, value in output.top)
                self._pieces.append(
                    Piece(self._name(output.token), at, _finite(output.logprob or 0.0), top)
                )
            shown = self._text.add(output.token)
        # A stop string comes before the end that the generator reports: it ends the text earlier.
        if self._text.stopped:
            self.finish = "stop"
        elif output.finished is not None:
            shown += self._text.end()
            self.finish = "stop" if ends or self._text.stopped else output.finished.value
        # Logprobs are given out with the text that they belong to; those of a stop string never
        # are.
        ready = [p for p in self._pieces if p.at < self._text.length]
        self._pieces = [] if self.finish is not None else self._pieces[len(ready) :]
        return shown, ready


@dataclass(frozen=True)
class Reply:
    """Makes the objects of one answer."""

    # Which of the two kinds.
    chat: bool
    model: str
    # Whether chunks have the field usage.
    usage_in_stream: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @functools.cached_property
    def id(self) -> str:
        """The name of the answer."""
        return ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex

    def _object(self, chunk: bool, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = (
            ("chat.completion.chunk" if chunk else "chat.completion")
            if self.chat
            else "text_completion"
        )
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def whole(
        self, choices: Sequence[tuple[Choice, str, list[Piece]]], usage: Usage
    ) -> dict[str, Any]:
        """Everything at once."""
        rows = []
        for choice, text, pieces in choices:
            message = {"role": "assistant", "content": text, "refusal": None}
            said: dict[str, Any] = {"message": message} if self.chat else {"text": text}
            rows.append(self._row(choice, said, pieces))
        return self._object(False, rows) | {"usage": usage.body()}

    def first(self, choice: Choice, prompt: str = "") -> dict[str, Any] | None:
        """What comes before an answer's first token: its role, or the prompt where it is to be
        repeated.
        """
        if self.chat:
            return self._chunk(
                [self._row(choice, {"delta": {"role": "assistant", "content": ""}}, None)]
            )
        return self._chunk([self._row(choice, {"text": prompt}, None)]) if prompt else None

    def chunk(self, choice: Choice, text: str, pieces: list[Piece]) -> dict[str, Any] | None:
        """What a token adds; None where that is nothing."""
        if not text and not pieces and choice.finish is None:
            return None
        said = (
            {"delta": {"content": text} if text or pieces else {}} if self.chat else {"text": text}
        )
        return self._chunk([self._row(choice, said, pieces)])

    def last(self, usage: Usage) -> dict[str, Any]:
        """The chunk that counts tokens."""
        return self._object(True, []) | {"usage": usage.body()}

    def _chunk(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        # OpenAI's field: null in all chunks but the last.
        return self._object(True, rows) | ({"usage": None} if self.usage_in_stream else {})

    def _row(
        self, choice: Choice, said: dict[str, Any], pieces: list[Piece] | None
    ) -> dict[str, Any]:
        logprobs = None
        if choice.named and pieces is not None:
            logprobs = (
                {"content": [_chat_piece(p) for p in pieces], "refusal": None}
                if self.chat
                else _columns(pieces)
            )
        return {"index": choice.index, **said, "logprobs": logprobs, "finish_reason": choice.finish}


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's number for what cannot be is -9999."""
    return logprob if math.isfinite(logprob) else -9999.0


def _chat_piece(piece: Piece) -> dict[str, Any]:
    top = [{"token": text, "logprob": value, "bytes": _bytes(text)} for text, value in piece.top]
    return {
        "token": piece.text,
        "logprob": piece.logprob,
        "bytes": _bytes(piece.text),
        "top_logprobs": top,
    }


def _bytes(text: str) -> list[int] | None:
    """None: a part of a character, which has no text of its own."""
    return None if "\ufffd" in text else list(text.encode())


def _columns(pieces: list[Piece]) -> dict[str, Any]:
    return {
        "tokens": [p.text for p in pieces],
        "token_logprobs": [p.logprob for p in pieces],
        "top_logprobs": [dict(p.top) for p in pieces],
        "text_offset": [p.at for p in pieces],
    }
