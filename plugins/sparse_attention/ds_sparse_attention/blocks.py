"""Attention over some blocks of keys, in torch's own operations; work grows with the number of blocks.

Neighbouring rows of blocks form a tile where they look at much the same blocks, so that these are
gathered once. Tiles that look at about equally many blocks form a group, which torch's
`scaled_dot_product_attention` attends at a time. So every device and dtype of torch works, forward
and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Allowed = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(sample, position of the query, of the key) -> whether it may look: index tensors that broadcast,
to a bool one.
"""

FILL = 0.75
"""A tile joins a group if it looks at no less than this part of the blocks of the group's first
tile.
"""

COPY = 20
"""What gathering a block costs, in multiples of attending with one token of a query to it (measured
on a CPU).
"""

TILES = (1, 2, 4, 8)
LARGEST = 128
"""Tokens of a tile, at most."""


@dataclass(frozen=True, eq=False)
class _Group:
    """Tiles that are attended together."""

    tiles: Tensor
    """Their numbers, [g]."""
    columns: Tensor
    """The blocks that rows of a tile look at, [g, m]."""
    used: Tensor | None
    """Which row of the tile looks at which of them, [g, rows of a tile, m]; None: each at all."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """A layout in the form that `attend_blocks` reads."""

    block: int
    """Tokens along an edge."""
    length: int
    """Blocks of a sequence."""
    tile: int
    """Rows of blocks that share their gathered keys."""
    per_head: bool
    """Tiles of all heads are one sequence of tiles; else all heads have the same."""
    groups: tuple[_Group, ...]
    density: float
    """The part of the blocks that is looked at."""

    @property
    def tiles(self) -> int:
        """Tiles of a sequence."""
        return -(-self.length // self.tile)

    @property
    def computed(self) -> int:
        """Pairs of blocks that are computed, of all heads, or of one where all have the same."""
        return self.tile * sum(group.columns.numel() for group in self.groups)


def make_pattern(layout: Tensor, block: int, device: torch.device) -> Pattern:
    """From a layout (bool [heads or 1, rows, rows]), each of whose rows has a block."""
    heads, length, _ = layout.shape
    # 1. Larger tiles gather blocks once for more rows, and compute more pairs that only some rows
    # use: the cheapest, by `_cost`.
    tile = min(
        (t for t in TILES if t == 1 or t * block <= LARGEST), key=lambda t: _cost(layout, t, block)
    )
    split = _split(layout, tile)
    flat = split.flatten(0, 1)  # [heads x tiles, rows of a tile, blocks]
    # 2. The blocks of each tile: all that one of its rows looks at.
    union = flat.any(1)
    counts = union.sum(1).tolist()
    # 3. Groups of tiles with about equally many blocks, the largest first: all of a group are
    # padded to its first.
    order = sorted(range(len(counts)), key=lambda i: -counts[i])
    groups = []
    start = 0
    while start < len(order):
        most = counts[order[start]]
        end = next(
            (e for e in range(start, len(order)) if counts[order[e]] < FILL * most), len(order)
        )
        tiles = torch.tensor(sorted(order[start:end]))
        # A stable sort puts the blocks that are seen first, in their order.
        columns = (~union[tiles]).to(torch.uint8).sort(dim=1, stable=True).indices[:, :most]
        # Where rows of a tile, or the padding, differ, a mask says which pairs count.
        used = flat[tiles].gather(2, columns[:, None].expand(-1, tile, -1))
        groups.append(
            _Group(tiles.to(device), columns.to(device), None if used.all() else used.to(device))
        )
        start = end
    return Pattern(block, length, tile, heads > 1, tuple(groups), float(layout.float().mean()))


def _split(layout: Tensor, tile: int) -> Tensor:
    """[heads, tiles, rows of a tile, blocks]; rows behind the last look at what the last looks
    at."""
    missing = -len(layout[0]) % tile
    if missing:
        layout = torch.cat([layout, layout[:, -1:].expand(-1, missing, -1)], 1)
    split: Tensor = layout.unflatten(1, (-1, tile))
    return split


def _cost(layout: Tensor, tile: int, block: int) -> float:
    """Of gathering the blocks of each tile once, and computing all its rows with them."""
    return int(_split(layout, tile).any(2).sum()) * (tile + COPY / block)


def attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    causal: bool = False,
    allowed: Allowed | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(q k^T x scale) v over the blocks of `pattern`: [batch, heads, tokens, size], as
    `query`.

    tokens: at most ``pattern.length x block``, and more than a block less. A token that may look at
    nothing gives zeros.

    key, value: [batch, key heads, tokens, size]; several heads of queries may share one (heads is a
        multiple).
    causal: no token looks at a later one.
    allowed: further limits.
    dropout: of the weights; 0 outside training.
    scale: 1/sqrt(size) by default.
    """
    batch, heads, tokens, _ = query.shape
    key_heads = key.shape[1]
    edge = pattern.block
    rows = pattern.block * pattern.tile
    # Padded to full tiles of queries and full blocks of keys; `_mask` keeps the padding out.
    missing = pattern.tiles * rows - tokens
    query = functional.pad(query, (0, 0, 0, missing)) if missing else query
    if missing := pattern.length * edge - tokens:
        key, value = (functional.pad(x, (0, 0, 0, missing)) for x in (key, value))
    share = heads // key_heads
    # A lane is attended as one; queries that share keys lie together in it, so that these are
    # gathered once. With patterns per head all heads are one lane of heads x tiles.
    lanes = 1 if pattern.per_head else key_heads
    if pattern.per_head:
        q = query.reshape(batch, 1, heads * pattern.tiles, 1, rows, -1)
    else:
        q = query.view(batch, key_heads, share, pattern.tiles, rows, -1).transpose(2, 3)
    k, v = (x.reshape(batch, lanes, -1, edge, x.shape[-1]) for x in (key, value))
    out = q.new_empty(*q.shape[:-1], value.shape[-1])
    for group in pattern.groups:
        # In that lane the blocks of keys of a tile begin behind those of the heads before.
        first = (
            (group.tiles // pattern.tiles // share * pattern.length)[:, None]
            if pattern.per_head
            else 0
        )
        mask = _mask(group, pattern, tokens, causal, allowed, batch)
        part = _attend_group(q, k, v, group, first + group.columns, mask, dropout, scale)
        out = out.index_copy(2, group.tiles, part)
    out = out if pattern.per_head else out.transpose(2, 3)
    return out.reshape(batch, heads, pattern.tiles * rows, -1)[:, :, :tokens]


def _attend_group(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: _Group,
    columns: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """[batch, lanes, g, shared, tokens of a tile, size] of one group.

    mask: [batch or 1, g, tokens of a tile, keys].
    """
    batch, lanes, _, share, rows, size = q.shape
    g, m = columns.shape
    queries = q.index_select(2, group.tiles).reshape(batch * lanes, g, share * rows, size)
    keys, values = (
        x.index_select(2, columns.flatten()).reshape(batch * lanes, g, m * x.shape[3], x.shape[4])
        for x in (k, v)
    )
    nothing = None
    if mask is not None:
        # A row that sees nothing would be all -inf, and its softmax NaN: it sees all instead, and its
        # result is set to zero.
        nothing = ~mask.any(-1, keepdim=True)
        mask = mask | nothing
        if share > 1:
            mask, nothing = (x.repeat(1, 1, share, 1) for x in (mask, nothing))
        if len(mask) > 1 and lanes > 1:
            mask, nothing = (x.repeat_interleave(lanes, 0) for x in (mask, nothing))
    out = functional.scaled_dot_product_attention(queries, keys, values, mask, dropout, scale=scale)
    if nothing is not None:
        out = out.masked_fill(nothing, 0.0)
    return out.reshape(batch, lanes, g, share, rows, -1)


def _mask(
    group: _Group, pattern: Pattern, tokens: int, causal: bool, allowed: Allowed | None, batch: int
) -> Tensor | None:
    """Which keys of a group's blocks count: bool [batch or 1, g, tokens of a tile, m x block];
    None: all.
    """
    edge = pattern.block
    device = group.tiles.device
    padded = tokens < pattern.length * edge
    if group.used is None and not causal and allowed is None and not padded:
        return None
    rows = edge * pattern.tile
    # Positions of queries and keys in the sequence.
    q = ((group.tiles % pattern.tiles)[:, None] * rows + torch.arange(rows, device=device))[
        :, :, None
    ]
    k = (group.columns[:, :, None] * edge + torch.arange(edge, device=device)).flatten(1)[
        :, None, :
    ]
    mask = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
    if group.used is not None:
        mask = group.used.repeat_interleave(edge, 1).repeat_interleave(edge, 2)
    if causal:
        mask = mask & (q >= k)
    if padded:
        mask = mask & (k < tokens)
    mask = mask.expand(len(group.tiles), rows, k.shape[-1])[None]
    if allowed is not None:
        sample = torch.arange(batch, device=device)[:, None, None, None]
        # `allowed` may index tensors of the sequence; positions of the padding are masked above.
        last = tokens - 1
        mask = mask & allowed(sample, q.clamp(max=last)[None], k.clamp(max=last)[None])
    return mask
