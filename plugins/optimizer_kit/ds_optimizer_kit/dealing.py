"""Who computes which matrix: arithmetic only, no tensors."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence


def deal(costs: Sequence[float], holders: Sequence[Collection[int]], world: int) -> list[int]:
    """The rank that computes each matrix, so that all have about the same to do.

    A rank that has all of a matrix keeps it, as long as it has no more than an equal share: what
    stays is not sent. The rest goes to the rank with the least so far, largest first. So no rank
    has more than an equal share and one matrix of the rest.

    costs: of each matrix, in any unit.
    holders: the ranks that have all of it.
    """
    share = sum(costs) / world
    loads = [0.0] * world
    owners = [-1] * len(costs)
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    for index in order:
        # A matrix that every rank has is given to anybody.
        if not 0 < len(holders[index]) < world:
            continue
        rank = min(holders[index], key=loads.__getitem__)
        if loads[rank] + costs[index] <= share:
            owners[index] = rank
            loads[rank] += costs[index]
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for index in order:
        if owners[index] < 0:
            load, owners[index] = heap[0]
            heapq.heapreplace(heap, (load + costs[index], owners[index]))
    return owners
