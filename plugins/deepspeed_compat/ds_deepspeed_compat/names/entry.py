"""One row of the table: a name of DeepSpeed's, what serves it, and how that differs (standard
library only).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class State(str, Enum):
    """How far a name is served."""

    WORKS = "works"
    DIFFERS = "works differently"
    CONSTANT = "constant"
    MISSING = "not offered"


@dataclass(frozen=True)
class Name:
    """What serves a name.

    target: ``"module:attribute"``; ``"module"`` when the attribute has the name itself,
        ``"module:"`` for the module.
    text: how it differs, or for a missing name what there is instead.
    value: of a constant, as DeepSpeed has it.
    """

    state: State
    target: str = ""
    text: str = ""
    value: Any = None


Rows = Mapping[str, "str | Name"]
"""Names separated by spaces -> their target, or a `Name` where there is more to say."""


def differs(target: str, how: str) -> Name:
    """A name that is served with another behaviour than documented."""
    return Name(State.DIFFERS, target, how)


def missing(instead: str) -> Name:
    """A documented name that is not offered.

    instead: what to use.
    """
    return Name(State.MISSING, "", instead)
