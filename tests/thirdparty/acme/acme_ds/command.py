"""The command ``dscore acme``."""

from __future__ import annotations


def greet(name: str = "world") -> None:
    """Greet NAME."""
    print(f"acme greets {name}")


def mood(value: str, words: list[str]) -> dict[str, str]:
    """``dscore run --mood``: a variable of the processes."""
    return {"ACME_MOOD": value}


def only_greet(value: bool, words: list[str]) -> int:
    """``dscore run --only-greet``: nothing is run."""
    print(f"acme greets {' '.join(words)}")
    return 3
