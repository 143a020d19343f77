"""Text from tokens as they come, and the stop strings in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_inference.generate.requests import SamplingParams

Decode = Callable[[list[int]], str]
"""A tokenizer's decoding of tokens."""

_UNFINISHED = "\ufffd"


class Detokenizer:
    """Text of a growing list of tokens, piece by piece.

    What a token reads as depends on those before it (spaces, characters of several tokens), so each
    piece is the difference of two decodings that begin a few tokens earlier. A piece waits while
    its last character is incomplete.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        # The last tokens, what they read as, and how many of them wait for the rest of a character.
        self._tokens: list[int] = []
        self._known = ""
        self._held = 0

    def push(self, token: int) -> str:
        """The text that `token` adds; empty while a character is incomplete."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        # A replacement character at the end is the beginning of a character of several tokens; one
        # that stays so for too long is really in the text.
        if text.endswith(_UNFINISHED) and self._held < _LONGEST - 1:
            self._held += 1
            return ""
        return self._move(text)

    def rest(self) -> str:
        """What is still held back, as it reads now."""
        return self._move(self._decode(self._tokens))

    def _move(self, text: str) -> str:
        new = text[len(self._known) :]
        tail = self._tokens[-_CONTEXT:]
        # The time per token stays constant: old tokens are dropped, and the others are decoded
        # again to compare the next text with.
        if len(self._tokens) > 2 * _CONTEXT:
            text = self._decode(tail)
            self._tokens = tail
        self._known = text
        self._held = 0
        return new


_CONTEXT = 8
"""Tokens before a new one that are decoded with it."""

_LONGEST = 4
"""Tokens that wait for the rest of a character; one that is longer is invalid."""


class StopStrings:
    """The text of a sequence until one of `strings` appears in it, in one token or across
    several."""

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings = tuple(strings)
        self._reads = Detokenizer(decode)
        # A string that ends in new text begins at most so many characters before it.
        self._reach = max(map(len, self._strings)) - 1
        self.text = ""

    def push(self, token: int) -> bool:
        """Whether a string is complete with `token`; then `text` ends before it."""
        new = self._reads.push(token)
        # Text before was searched already.
        begin = max(0, len(self.text) - self._reach)
        self.text += new
        found = [
            at for at in (self.text.find(string, begin) for string in self._strings) if at >= 0
        ]
        if found:
            # The first of several; what follows it is not part of the answer.
            self.text = self.text[: min(found)]
        return bool(found)

    def finish(self) -> str:
        """The whole text, with what was incomplete."""
        self.text += self._reads.rest()
        return self.text


def beam_ends(
    params: SamplingParams, prompt: int, decode: Decode | None
) -> Callable[[list[int]], bool] | None:
    """Whether a beam with these tokens ends by a stop string or a criterion; None: none can.

    prompt: how many of the tokens were given.
    """
    strings = params.stop_strings
    if not strings and not params.stopping:
        return None

    def ends(tokens: list[int]) -> bool:
        # The whole answer is decoded each time: a beam is another text in every step, so
        # nothing can be kept.
        text = decode(tokens[prompt:]) if strings and decode is not None else ""
        return any(string in text for string in strings) or any(
            stop(tokens) for stop in params.stopping
        )

    return ends
