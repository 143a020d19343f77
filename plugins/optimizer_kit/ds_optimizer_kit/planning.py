"""What an exchange of matrices takes, before there is one: arithmetic only, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_optimizer_kit.dealing import deal

_FP32 = 4


@dataclass(frozen=True, slots=True)
class ExchangeNeed:
    """Of the rank with the most."""

    sent: int
    """Bytes that it sends per step, for owners and for what comes back of them."""
    held: int
    """Bytes of whole matrices, and of what comes of them, in fp32."""


def plan_exchange(
    shapes: Sequence[tuple[int, int]],
    world: int,
    cost: Callable[[int, int], float],
    *,
    sharded: bool,
) -> ExchangeNeed:
    """What `ds_optimizer_kit.MatrixExchange` of matrices of these shapes takes.

    world: ranks that have parts or replicas of them.
    sharded: whether each rank has an equal part of each matrix; otherwise all have all.
    """
    holders: list[Sequence[int]] = [() if sharded else range(world) for _ in shapes]
    owners = deal([cost(*shape) for shape in shapes], holders, world)
    owned = [0] * world
    for (rows, columns), owner in zip(shapes, owners, strict=True):
        owned[owner] += rows * columns
    total = sum(owned)
    # To owners goes what they lack; back goes to each rank its part, or all.
    if sharded:
        sent = [(total - mine) / world + mine * (world - 1) / world for mine in owned]
    else:
        sent = [float(mine * (world - 1)) for mine in owned]
    return ExchangeNeed(round(max(sent) * _FP32), 2 * max(owned) * _FP32)
