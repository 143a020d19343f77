"""Which messages a text is, or is like (torch-free, offline).

``messages.json`` is generated from docs/errors.md and from the messages in the sources; ``python
tests/docs/test_message_data.py`` writes it, and a test holds it current.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST = 20_000
"""Characters of a text that are looked at: its end, where a traceback has the message."""
_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Z]\w*)(?:: |:?$)")
_NEAR = 0.45


@dataclass(frozen=True, slots=True)
class Entry:
    """A message, with ``…`` for what it names."""

    error: str
    """The class."""
    message: str
    meaning: str = ""
    """What it means and what to do; "" for one that is in no page."""
    module: str = ""
    """Where the code has it."""


@dataclass(frozen=True, slots=True)
class Found:
    """What is said of a text."""

    entries: tuple[Entry, ...]
    """The nearest first; none where nothing is near."""
    exact: bool
    """Whether the text is the first one's message."""
    error: str
    """The class that the text names, where it is one of ours."""


def load() -> dict[str, Any]:
    """``classes``: name -> what it means. ``messages``: rows of `Entry`."""
    text = Path(__file__).with_name("messages.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def search(text: str, data: dict[str, Any], most: int = 3) -> Found:
    """The messages that `text` is or is like.

    Of a traceback the last message counts.
    """
    error, said = last_message(text)
    error = error if error in data["classes"] else ""
    entries = [Entry(*row) for row in data["messages"]]
    words = [_words(entry.message) for entry in entries]
    seen = Counter(word for found in words for word in set(found))
    rare = {word: math.log(len(entries) / count) + 0.1 for word, count in seen.items()}
    asked = set(_words(said))
    wanted = sum(rare.get(word, 0.0) for word in asked)
    lowered = " ".join(said.lower().split())
    rows = []
    for entry, found in zip(entries, words, strict=True):
        whole = sum(rare[word] for word in set(found))
        common = sum(rare[word] for word in set(found) & asked)
        score = common / math.sqrt(whole * wanted) if common else 0.0
        is_it = len(set(found)) > 1 and _has_parts(entry.message, lowered)
        if is_it:  # the longest of those that the text has
            score = 2 + whole
        # A message with its meaning comes before the same one of the sources.
        score += 0.1 * (entry.error == error) + 0.1 * bool(entry.meaning)
        if score >= _NEAR:
            rows.append((score, is_it, entry))
    rows.sort(key=lambda row: -row[0])
    near = tuple(dict.fromkeys(entry for _, _, entry in rows))[:most]
    return Found(near, bool(rows) and rows[0][1], error)


def last_message(text: str) -> tuple[str, str]:
    """(class, message) of the last error in a text; the class is "" where the text names none."""
    lines = [line.strip() for line in text[-LONGEST:].splitlines() if line.strip()]
    for index in range(len(lines) - 1, -1, -1):
        line = lines[index].removeprefix("dscore: ")
        if (named := _RAISED.match(line)) is not None:
            return named[1], "\n".join([line[named.end() :], *lines[index + 1 :]])
    return "", lines[-1].removeprefix("dscore: ") if lines else ""


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z_]{2,}", text.lower())


def _has_parts(template: str, text: str) -> bool:
    """Whether the parts of a message between its ``…`` are in `text`, in order."""
    at = 0
    for part in template.lower().split("…"):
        part = " ".join(part.split())
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return True
