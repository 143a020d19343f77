"""The optimizer's step over all buckets: those that a store evicts are updated one by one.

[Note: rounds] A round is one call of the optimizer, for some buckets of this rank. One whose step
communicates must be given the same parameters on all ranks that share them, and as often on all:
so `agree_on_rounds` settles once which buckets go together. Any other has a round for all that is
in memory, and one for each evicted bucket with a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_core import comm
from ds_core.errors import UsageError
from ds_zero.buckets.evicted import Evicted

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_zero.buckets.masters import Masters
    from ds_zero.reduce.source import GradientSource
    from ds_zero.updates import Updates

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


def _rounds_by_gradient(given: Mapping[Masters, Sequence[Tensor | None]]) -> list[Round]:
    """The rounds of an optimizer that works on its own. given: the gradients of each bucket."""
    with_grads = [m for m, grads in given.items() if any(g is not None for g in grads)]
    tiles = [m for m in with_grads if isinstance(m, Evicted)]
    present = [m for m in with_grads if not isinstance(m, Evicted)]
    # Without any gradient the optimizer is called, too: it may count.
    return [present] * (bool(present) or not tiles) + [[tile] for tile in tiles]


def step(
    updates: Updates, optimizer: Optimizer, grads: Sequence[Tensor | None], factor: float
) -> None:
    """`Stepper.step` for the buckets of `updates`.

    grads: of the masters of all buckets, in order; for evicted buckets views of
        ``GradientSource.reduced(bucket)``, which may be evicted too.

    Weights are written before their masters are evicted again; the store may save both behind the
    step.
    """
    source = updates.owner.reducer
    if updates.rounds is None and all(b.masters.evicts is None for b in source.buckets):
        updates.stepper.step(optimizer, grads, factor)
        return
    rest = iter(grads)
    given = {b.masters: list(islice(rest, len(b.masters.fragments))) for b in source.buckets}
    rounds = _rounds_by_gradient(given) if updates.rounds is None else updates.rounds
    # While one bucket is updated the next one is fetched, where the config wants that.
    offload = updates.owner.section.offload_optimizer
    ahead = offload is not None and offload.pipeline_read
    kept = settings_of(optimizer)
    for masters, following in zip(rounds, [*rounds[1:], []], strict=True):
        mine = [g for m, own in given.items() for g in (own if m in masters else [None] * len(own))]
        tiles = {m: given[m] for m in masters if isinstance(m, Evicted)}
        later = [m for m in following if isinstance(m, Evicted)] if ahead else []
        with _in_memory(optimizer, source, tiles, later):
            updates.stepper.step(optimizer, mine, factor)
            for tile, own in tiles.items():
                tile.write_back([p for p, g in zip(tile.fragments, own, strict=True) if g is None])
                if tile.bucket.placement.transfers is not None:
                    tile.bucket.placement.transfers.synchronize()
        if len(rounds) > 1 and settings_of(optimizer) != kept:
            raise UsageError(
                f"{type(optimizer).__name__} changes its parameter groups in each step, and "
                "evicted states are updated "
                "in several steps, so it would count them wrongly; use offload_optimizer.device cpu"
            )


@contextlib.contextmanager
def _in_memory(
    optimizer: Optimizer,
    source: GradientSource,
    tiles: Mapping[Evicted, Sequence[Tensor | None]],
    following: Sequence[Evicted],
) -> Iterator[None]:
    """Inside, what the step of these evicted buckets needs is in memory.

    tiles: with the gradients of their fragments.
    following: what is to be fetched meanwhile.
    """
    needed: list[Tensor] = []
    for later in following:
        needed += [*source.reduced(later.bucket), *later.states(optimizer)]
    with contextlib.ExitStack() as inside:
        if tiles:
            inside.enter_context(torch.no_grad())
        for tile, grads in tiles.items():
            # Without a gradient for every element, the weights of others must be read first.
            written = sum(g.numel() for g in grads if g is not None)
            all_used = written == sum(p.master.numel() for p in tile.fragments)
            reduced = source.reduced(tile.bucket)
            inside.enter_context(tile.step(optimizer, reduced, needed, all_used=all_used))
        yield


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Everything of the parameter groups but parameters."""
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
