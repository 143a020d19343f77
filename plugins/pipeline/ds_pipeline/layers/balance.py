"""Which layers go to which part of a pipeline: boundaries b_0 = 0 <= ... <= b_P = n out of weights
(torch-free).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

METHODS = "'uniform', 'parameters', 'type:REGEX' or 'profile'"


def uniform(count: int, parts: int) -> list[int]:
    """Equal counts per part; the first ``count mod parts`` get one more (``uniform(10, 4)`` -> 0 3
    6 8 10).
    """
    least, more = divmod(count, parts)
    return [0, *itertools.accumulate(least + (p < more) for p in range(parts))]


def balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Parts of about equal weight, as documented: the least difference between the heaviest and the
    lightest.

    Dynamic programming over prefixes; it keeps one best per prefix, so it is not always the global
    optimum.
    """
    count = len(weights)
    if count <= parts:
        return uniform(count, parts)
    sums = [0.0, *itertools.accumulate(weights)]
    # Per prefix that is cut into j parts: the heaviest and the lightest part, and where the last
    # begins.
    best: list[tuple[float, float, list[int]]] = [(sums[i], sums[i], [0]) for i in range(count + 1)]
    for j in range(2, parts + 1):
        best = [_extend(best, sums, i, j) if i >= j else best[i] for i in range(count + 1)]
    return [*best[count][2], count]


def _extend(
    best: Sequence[tuple[float, float, list[int]]], sums: Sequence[float], end: int, parts: int
) -> tuple[float, float, list[int]]:
    """The best way to add a last part that ends at `end`, the `parts`-th; each before it has a
    layer.
    """
    found: tuple[float, float, list[int]] | None = None
    for begin in range(parts - 1, end):
        before = best[begin]
        weight = sums[end] - sums[begin]
        high = max(before[0], weight)
        low = min(before[1], weight)
        if found is None or high - low <= found[0] - found[1]:  # ties to the larger beginning
            found = (high, low, [*before[2], begin])
    assert found is not None
    return found


def partition(
    method: str,
    names: Sequence[str],
    parts: int,
    parameters: Callable[[], Sequence[float]],
    times: Callable[[], Sequence[float]],
) -> list[int]:
    """Boundaries of `parts` parts by the documented `method` (case does not matter).

    names: class or function name of each layer.
    parameters, times: of each layer, called when the method needs them.

    Raises ValueError for an unknown method, or one that matches no layer.
    """
    wanted = method.lower()
    if wanted == "uniform":
        return uniform(len(names), parts)
    if wanted == "parameters":
        return balanced(parameters(), parts)
    if wanted == "profile":
        return balanced(times(), parts)
    if wanted.startswith("type:"):
        pattern = re.compile(method[len("type:") :], re.IGNORECASE)
        weights = [1.0 if pattern.search(name) else 0.0 for name in names]
        if not any(weights):
            raise ValueError(
                f"partition_method {method!r} matches no layer; there are "
                f"{', '.join(sorted(set(names)))}"
            )
        return balanced(weights, parts)
    raise ValueError(f"partition_method {method!r} is unknown; use {METHODS}")
