"""Reading JSON configs (standard library only)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any


def dict_raise_error_on_duplicate_keys(ordered_pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """For ``json.load(object_pairs_hook=...)``: a dict, or ValueError with the keys that are there
    twice.
    """
    pairs = list(ordered_pairs)
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"duplicate keys in the config: {', '.join(twice)}; keep one of each")
    return dict(pairs)
