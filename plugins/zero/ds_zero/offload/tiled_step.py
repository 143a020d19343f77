"""The optimizer's step over all buckets: those that a store evicts are updated one by one.

[Note: rounds] A round is one call of the optimizer, for some buckets of this rank. One whose step
communicates must be given the same parameters on all ranks that share them, and as often on all:
so `agree_on_rounds` settles once which buckets go together. Any other has a round for all that is
in memory, and one for each evicted bucket with a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_core import comm
from ds_core.errors import UsageError
from ds_zero.buckets.evicted import Evicted

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_core.partition import Stepper
    from ds_zero.buckets.masters import Masters
    from ds_zero.reduce.source import GradientSource

Round = list["Masters"]


def agree_on_rounds(source: GradientSource) -> list[Round]:
    """The rounds of an optimizer that communicates in its step, as many on all ranks. Collective.

    Buckets are cut by size, elsewhere on ranks with other slices: those that share a parameter on
    any rank are of one round. Stages of a pipeline share none: they work in the same rounds.
    """
    # What is always in memory is one step anyway.
    present = [b.masters for b in source.buckets if b.masters.evicts is None]
    mine = [present, *([b.masters] for b in source.buckets if b.masters.evicts is not None)]
    rows = comm.all_gather_json([[p.name for m in some for p in m.fragments] for some in mine])
    placed, count = number_rounds(rows)
    found: list[Round] = [[] for _ in range(count)]
    for masters in (m for some in mine for m in some):
        found[placed[masters.fragments[0].name]].append(masters)
    return found


def number_rounds(rows: Iterable[Iterable[Iterable[str]]]) -> tuple[dict[str, int], int]:
    """The round of each parameter, by name, and how many rounds there are.

    rows: of each rank, the names of what it updates together.
    """
    rounds: list[set[int]] = []
    placed: dict[str, int] = {}
    for names, ranks in _connected(rows):
        # The first round in which these ranks have nothing to do yet.
        free = [number for number, busy in enumerate(rounds) if not busy & ranks]
        if not free:
            free = [len(rounds)]
            rounds.append(set())
        rounds[free[0]] |= ranks
        placed |= dict.fromkeys(names, free[0])
    return placed, len(rounds)


def _connected(rows: Iterable[Iterable[Iterable[str]]]) -> list[tuple[set[str], set[int]]]:
    """Names that must be in one round, with the ranks that have any of them."""
    found: list[tuple[set[str], set[int]]] = []
    for rank, some in enumerate(rows):
        for given in some:
            names = set(given)
            ranks = {rank}
            others = []
            for known in found:
                if known[0].isdisjoint(names):
                    others.append(known)
                else:
                    names |= known[0]
                    ranks |= known[1]
            if names:
                found = [*others, (names, ranks)]
    return found


def _rounds_by_gradient(source: GradientSource, grads: Sequence[Tensor | None]) -> list[Round]:
    """The rounds of an optimizer that works on its own."""
    owners = owners_of(source)
    with_grads = dict.fromkeys(m for m, g in zip(owners, grads, strict=True) if g is not None)
    tiles = [m for m in with_grads if isinstance(m, Evicted)]
    present = [m for m in with_grads if not isinstance(m, Evicted)]
    # Without any gradient the optimizer is called, too: it may count.
    return [present] * (bool(present) or not tiles) + [[tile] for tile in tiles]


def owners_of(source: GradientSource) -> list[Masters]:
    """The masters of each fragment, in the order of gradients."""
    return [b.masters for b in source.buckets for _ in b.masters.fragments]


def step(
    optimizer: Optimizer,
    source: GradientSource,
    stepper: Stepper,
    grads: Sequence[Tensor | None],
    factor: float,
    *,
    ahead: bool,
    rounds: Sequence[Round] | None = None,
) -> None:
    """`Stepper.step` for the buckets of `source`.

    grads: of the masters of all buckets, in order; for evicted buckets views of
        ``source.reduced(bucket)``, which may be evicted too.
    ahead: while one bucket is updated the next one is fetched.
    rounds: of `agree_on_rounds`; None: by the gradients that there are.

    Weights are written before their masters are evicted again; the store may save both behind the
    step.
    """
    if rounds is None:
        if all(b.masters.evicts is None for b in source.buckets):
            stepper.step(optimizer, grads, factor)
            return
        rounds = _rounds_by_gradient(source, grads)
    owners = owners_of(source)
    kept = settings_of(optimizer)
    for masters, following in zip(rounds, [*rounds[1:], []], strict=True):
        members = set(masters)
        mine = [g if m in members else None for m, g in zip(owners, grads, strict=True)]
        tiles = [m for m in masters if isinstance(m, Evicted)]
        if not tiles:
            stepper.step(optimizer, mine, factor)
        else:
            _update_tiles(optimizer, source, stepper, mine, factor, tiles, following * ahead)
        if len(rounds) > 1 and settings_of(optimizer) != kept:
            raise UsageError(
                f"{type(optimizer).__name__} changes its parameter groups in each step, and "
                "evicted states are updated "
                "in several steps, so it would count them wrongly; use offload_optimizer.device cpu"
            )


def _update_tiles(
    optimizer: Optimizer,
    source: GradientSource,
    stepper: Stepper,
    grads: Sequence[Tensor | None],
    factor: float,
    tiles: Sequence[Evicted],
    following: Sequence[Masters],
) -> None:
    """One round with evicted buckets.

    grads: of all fragments; None for those of other rounds.
    following: what is to be fetched meanwhile.
    """
    fragments = [p for b in source.buckets for p in b.masters.fragments]
    given = list(zip(owners_of(source), fragments, grads, strict=True))
    needed: list[Tensor] = []
    for later in following:
        if isinstance(later, Evicted):
            needed += [*source.reduced(later.bucket), *later.states(optimizer)]
    with torch.no_grad(), contextlib.ExitStack() as inside:
        for tile in tiles:
            # Without a gradient for every element, the weights of others must be read first.
            written = sum(g.numel() for m, _, g in given if m is tile and g is not None)
            all_used = written == sum(p.master.numel() for p in tile.fragments)
            reduced = source.reduced(tile.bucket)
            inside.enter_context(tile.step(optimizer, reduced, needed, all_used=all_used))
        stepper.step(optimizer, grads, factor)
        for tile in tiles:
            tile.write_back([p for m, p, g in given if m is tile and g is None])
            if tile.bucket.placement.transfers is not None:
                tile.bucket.placement.transfers.synchronize()


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Everything of the parameter groups but parameters."""
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
