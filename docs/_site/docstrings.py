"""Docstrings as Sphinx reads them: what is said of each argument becomes an item of a list.

In the code an argument has a line of its own, ``name: what it is``, and what does not fit on it is
indented below. To reStructuredText that is a paragraph with an error in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_ITEM = re.compile(r"[\w*`.\[\]]+(?:, [\w*`.\[\]]+)*: \S")
_OTHER = re.compile(r"(?:[-*] |\d+\. |\||\.\. |>>>|===|---)")


def listed(lines: list[str]) -> list[str]:
    """The lines of a docstring, with lists where it has lines of arguments."""
    found: list[str] = []
    literal = False
    for block in _blocks(lines):
        indented = block[0].startswith(" ")
        # What follows "::" is code for as long as it is indented.
        literal = indented and (literal or (bool(found) and _text_before(found).endswith("::")))
        found += block if literal or indented else _listed(block)
        found.append("")
    return found


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    """The paragraphs: lines without an empty one between them."""
    block: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line.rstrip())
        elif block:
            yield block
            block = []


def _text_before(found: list[str]) -> str:
    return next((line for line in reversed(found) if line), "")


def _listed(block: list[str]) -> list[str]:
    """A paragraph; where lines of arguments begin in it, a list from there on."""
    if _OTHER.match(block[0]):
        return block
    found: list[str] = []
    items = False
    for line in block:
        if line.startswith(" "):
            # What does not fit on the line above it.
            found[-1] += f" {line.strip()}"
        elif _ITEM.match(line) and (items or _begins(block)):
            found += [f"- {line}"] if items or not found else ["", f"- {line}"]
            items = True
        elif items:
            found += ["", line]
            items = False
        else:
            found.append(line)
    return found


def _begins(block: list[str]) -> bool:
    """Whether any line of the paragraph is one of arguments: some are indented below others, or all
    of them look so.
    """
    return any(line.startswith(" ") for line in block) or all(map(_ITEM.match, block))
