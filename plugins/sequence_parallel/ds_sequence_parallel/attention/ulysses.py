"""Attention over whole sequences, each rank for some of the heads: two exchanges around any
attention function.
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
    """Which heads each rank attends to. A rank has the key-value heads that its query heads need.

    queries, keys: (first, end) by rank. Key-value heads that several ranks need are sent to each.
    """

    queries: tuple[tuple[int, int], ...]
    keys: tuple[tuple[int, int], ...]
    per_key: int

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
        ends = [
            0,
            *itertools.accumulate(
                query_heads // ranks + (i < query_heads % ranks) for i in range(ranks)
            ),
        ]
        queries = tuple(itertools.pairwise(ends))
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
    """What `attend` gives for whole sequences, of which each rank has a part.

    attend: called with this rank's heads of the whole sequence, and whether key-value heads were
    repeated, so that there is one per query head. heads, sequence: dimensions of `query`;
    `out_heads`, `out_sequence` of what `attend` gives, where they differ. lengths: each rank's part
    of the sequence; None: all are equal. Collective along `group`.
    """
    rank = comm.rank(group)
    ranks = comm.world_size(group)
    if ranks == 1:
        return attend(query, key, value, False)
    plan = Heads.of(query.shape[heads], key.shape[heads], ranks)
    query = all_to_all(query, group, heads, sequence, plan.query_sizes, lengths)
    key = all_to_all(plan.spread(key, heads), group, heads, sequence, plan.key_sizes, lengths)
    value = all_to_all(plan.spread(value, heads), group, heads, sequence, plan.key_sizes, lengths)
    repeats = plan.repeats(rank)
    if repeats is not None:
        index = torch.tensor(repeats, device=key.device)
        key = key.index_select(heads, index)
        value = value.index_select(heads, index)
    there = heads if out_heads is None else out_heads
    along = sequence if out_sequence is None else out_sequence
    if query.shape[heads]:
        out = attend(query, key, value, repeats is not None)
    # more ranks than heads: nothing to attend to, but a part in the exchanges, also of gradients
    else:
        out = value.transpose(heads, there) + 0 * (query.sum() + key.sum())
    return all_to_all(out, group, along, there, lengths, plan.query_sizes)


class DistributedAttention(AlongSequence):
    """Any attention function, for ranks that each have a part of the sequence.

    local_attention: called as ``(query, key, value, *args, **kwargs)`` with whole sequences and
    some of the heads; it gives what has the shape of `query` (or a tuple whose first item does).
    With fewer key-value heads than query heads it may be given as many of both, repeated. group: of
    the ranks that divide the sequence; None: the axis ``sp``, once `ds_core.initialize` has the
    model. heads, sequence: dimensions of query, key and value. All ranks have equally many
    positions.
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
                "part is no stretch of "
                "the sequence"
            )
        super().bind_sequence(group, zigzag)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The attention of this rank's positions; see the class. Collective along the group."""
        if not self._along.checked:
            _check_alike(query, key, value, self.group)
            self._along.checked = True
        more: tuple[Any, ...] = ()

        def attend(query: Tensor, key: Tensor, value: Tensor, repeated: bool) -> Tensor:
            nonlocal more
            out = self.local_attention(query, key, value, *args, **kwargs)
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
