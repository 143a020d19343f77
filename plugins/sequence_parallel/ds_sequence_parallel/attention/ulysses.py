"""Attention over full sequences, each rank for some of the heads: exchanges around any attention.

DeepSpeed-Ulysses (Jacobs et al. 2023): an all-to-all of queries, keys and values turns a part of
the sequence with all heads into the full sequence with some heads; another one turns it back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from ds_comm_autograd import all_to_all
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_core import comm
from ds_core.errors import UsageError
from ds_sequence_parallel.along import AlongSequence


@dataclass(frozen=True)
class Heads:
    """Which heads each rank attends to. A rank has the key-value heads that its query heads need."""

    queries: tuple[tuple[int, int], ...]
    """(first, end) by rank."""
    keys: tuple[tuple[int, int], ...]
    """(first, end) by rank; key-value heads that several ranks need are sent to each."""
    per_key: int
    """Query heads that share a key-value head."""

    @staticmethod
    def of(query_heads: int, key_heads: int, ranks: int) -> Heads:
        """Query heads in shares that differ by one at most; UsageError where key-value heads do not
        divide them.
        """
        if query_heads % key_heads:
            raise UsageError(
                f"{query_heads} query heads do not divide over {key_heads} key-value heads"
            )
        per_key = query_heads // key_heads
        # The first ranks have one more; with fewer heads than ranks the last have none.
        ends = [
            0,
            *itertools.accumulate(
                query_heads // ranks + (i < query_heads % ranks) for i in range(ranks)
            ),
        ]
        queries = tuple(itertools.pairwise(ends))
        # Rounded outwards to full groups: from the group of the first query head to that of the
        # last.
        keys = tuple(
            (a // per_key, max(a // per_key, -(-b // per_key) if b > a else 0)) for a, b in queries
        )
        return Heads(queries, keys, per_key)

    @property
    def query_sizes(self) -> list[int] | None:
        """Query heads of each rank; None where all have equally many."""
        return _sizes(self.queries)

    @property
    def key_sizes(self) -> list[int] | None:
        """Key-value heads of each rank; None where all have equally many."""
        return _sizes(self.keys)

    def spread(self, whole: Tensor, dim: int) -> Tensor:
        """Key-value heads in the order in which they are sent, those that several ranks need once
        for each.
        """
        count = whole.shape[dim]
        if sum(end - first for first, end in self.keys) == count:  # none is needed twice
            return whole
        return torch.cat([whole.narrow(dim, first, end - first) for first, end in self.keys], dim)

    def repeats(self, rank: int) -> list[int] | None:
        """For each query head of `rank` the key-value head (of its own) that it needs; None where
        groups are whole.
        """
        (first, end), (key, _) = self.queries[rank], self.keys[rank]
        # Only full groups: the attention function shares key-value heads itself.
        if first % self.per_key == 0 and end % self.per_key == 0:
            return None
        return [head // self.per_key - key for head in range(first, end)]


def ulysses(
    attend: Callable[[Tensor, Tensor, Tensor, bool], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: ProcessGroup | None,
    *,
    heads: int,
    sequence: int,
    out_heads: int | None = None,
    out_sequence: int | None = None,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """The result of `attend` for full sequences, of which each rank has a part.

    attend: called with this rank's heads of the full sequence, and whether key-value heads were
        repeated, so that there is one per query head.
    heads, sequence: dimensions of `query`, `key` and `value`, in any order.
    out_heads, out_sequence: of the result of `attend`, where they differ.
    lengths: each rank's part of the sequence; None: all are equal.

    Collective along `group`.
    """
    rank = comm.rank(group)
    ranks = comm.world_size(group)
    if ranks == 1:
        return attend(query, key, value, False)
    plan = Heads.of(query.shape[heads], key.shape[heads], ranks)
    # 1. Heads are scattered, the sequence is gathered.
    query = all_to_all(query, group, heads, sequence, plan.query_sizes, lengths)
    key = all_to_all(plan.spread(key, heads), group, heads, sequence, plan.key_sizes, lengths)
    value = all_to_all(plan.spread(value, heads), group, heads, sequence, plan.key_sizes, lengths)
    # 2. Where a group of query heads is divided over ranks, key-value heads no longer match by
    # order: one per query head.
    repeats = plan.repeats(rank)
    if repeats is not None:
        index = torch.tensor(repeats, device=key.device)
        key = key.index_select(heads, index)
        value = value.index_select(heads, index)
    # 3. Attention, and back: the sequence is scattered, heads are gathered.
    there = heads if out_heads is None else out_heads
    along = sequence if out_sequence is None else out_sequence
    if query.shape[heads]:
        out = attend(query, key, value, repeats is not None)
    # A rank without heads attends to nothing, but takes part in the exchanges, also of gradients:
    # so its empty result depends on all three.
    else:
        out = value.transpose(heads, there) + 0 * (query.sum() + key.sum())
    return all_to_all(out, group, along, there, lengths, plan.query_sizes)


class DistributedAttention(AlongSequence):
    """Any attention function, for ranks that each have a part of the sequence.

    local_attention: called as ``(query, key, value, *args, **kwargs)`` with full sequences and some
        of the heads; returns a tensor of the shape of `query`, or a tuple that begins with one.
        With fewer key-value heads than query heads it may be given as many of both, repeated.
    group: of the ranks that divide the sequence; None: the axis ``sp``, once `ds_core.initialize`
        has the model.
    heads, sequence: dimensions of query, key and value.

    All ranks have equally many positions.
    """

    def __init__(
        self,
        local_attention: Callable[..., Any],
        group: ProcessGroup | None = None,
        heads: int = 2,
        sequence: int = 1,
    ) -> None:
        super().__init__(group)
        if heads == sequence:
            raise UsageError(f"DistributedAttention: heads and sequence are both dimension {heads}")
        self.local_attention = local_attention
        self.heads = heads
        self.sequence = sequence

    def bind_sequence(self, group: ProcessGroup, zigzag: bool) -> None:
        """Use `group`, if none was given."""
        if zigzag:
            raise UsageError(
                "DistributedAttention needs sequence_parallel.mode ulysses: with ring, a rank's "
                "part is no stretch of the sequence"
            )
        super().bind_sequence(group, zigzag)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The attention of this rank's positions; see the class. Collective along the group."""
        # Different shapes on two ranks would hang the exchange, or mix up tokens.
        if not self._along.checked:
            _check_alike(query, key, value, self.group)
            self._along.checked = True
        more: tuple[Any, ...] = ()

        def attend(query: Tensor, key: Tensor, value: Tensor, repeated: bool) -> Tensor:
            nonlocal more
            out = self.local_attention(query, key, value, *args, **kwargs)
            # Further results (attention weights) are of this rank's heads only, and left out.
            if isinstance(out, tuple):
                more = (None,) * (len(out) - 1)
                out = out[0]
            return cast(Tensor, out)

        out = ulysses(
            attend, query, key, value, self.group, heads=self.heads, sequence=self.sequence
        )
        return (out, *more) if more else out


def _check_alike(query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup) -> None:
    """Raise UsageError on every rank where shapes differ. Collective, once per layer."""
    shapes = [list(x.shape) for x in (query, key, value)]
    everyone = comm.all_gather_json(shapes, group)
    if any(other != everyone[0] for other in everyone):
        raise UsageError(
            "DistributedAttention: query, key and value have shapes "
            + "; ".join(f"{s} on rank {i}" for i, s in enumerate(everyone))
            + " of the sequence's group; cut the sequence into equal parts, padded to a multiple "
            "of the ranks"
        )


def _sizes(ranges: Sequence[tuple[int, int]]) -> list[int] | None:
    sizes = [end - first for first, end in ranges]
    return None if len(set(sizes)) == 1 else sizes
