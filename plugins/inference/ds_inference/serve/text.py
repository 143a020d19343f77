"""Text of an answer, token by token, with nothing of a stop string or after it."""

from __future__ import annotations

from collections.abc import Sequence

from ds_inference.generate.stopping import Decode, Detokenizer


class Text:
    """The text of one answer.

    decode: of the tokenizer.
    stops: strings that end it.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._reads = Detokenizer(decode)
        self._stops = tuple(stops)
        # One character less than the longest: more would have been found as a stop string.
        self._hold = max((len(s) for s in stops), default=1) - 1
        self._waiting = ""  # text that may be the beginning of a stop string
        # Characters that tokens stand for, and those given out so far; final once a stop string
        # came.
        self.decoded = 0
        self.length = 0
        self.stopped = False

    def add(self, token: int) -> str:
        """What can be shown now that `token` came."""
        return self._more(self._reads.push(token))

    def end(self) -> str:
        """What is left to show when no more tokens come."""
        shown = "" if self.stopped else self._more(self._reads.rest())
        rest, self._waiting = self._waiting, ""
        self.length += len(rest)
        return shown + rest

    def _more(self, new: str) -> str:
        self.decoded += len(new)
        text = self._waiting + new
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            self._waiting = ""
            shown = text[: min(found)]
        else:
            # What may still become a stop string is kept back: it could not be taken back from a
            # client.
            held = self._beginning(text)
            shown = text[: len(text) - held]
            self._waiting = text[len(text) - held :]
        self.length += len(shown)
        return shown

    def _beginning(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a stop string."""
        for size in range(min(self._hold, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
