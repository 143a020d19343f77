"""The command ``dscore acme``."""

from __future__ import annotations


def greet(name: str = "world") -> None:
    """Greet NAME."""
    print(f"acme greets {name}")
