"""Attention in which keys and values go from rank to rank: any number of heads.

No rank ever has the full sequence. Ring Attention (Liu et al. 2023), with the zigzag layout for
causal attention.

Dimensions: ``batch``, ``heads`` of queries, ``kv_heads`` of keys and values, ``positions`` of this
rank, ``size`` of a head, ``value_size``.

[Note: who sends what] In step s of P-1 each rank sends its own keys and values to the rank s places
on, and gets those of the rank s places back; with causal attention only the stretches that the
other rank looks at. Attention to a block runs while the next is on its way. Nothing is kept for
backward but this rank's own: blocks come again, and the gradients of a block go back to its owner.
A step is one all-to-all in which each rank has one partner on either side; so the order of messages
is the same everywhere, and grouped where the backend needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup, distributed_c10d

from ds_core import comm
from ds_core.errors import UsageError
from ds_sequence_parallel.along import AlongSequence
from ds_sequence_parallel.attention import blocks
from ds_sequence_parallel.attention.layout import Layout

if TYPE_CHECKING:
    from jaxtyping import Float

Mask = Callable[[Tensor, Tensor], Tensor]
"""(query positions, key positions) -> boolean [batch or 1, 1, queries, keys]; true where a query
may look.
"""


def ring_attention(
    query: Float[Tensor, "batch heads positions size"],
    key: Float[Tensor, "batch kv_heads positions size"],
    value: Float[Tensor, "batch kv_heads positions value_size"],
    group: ProcessGroup | None,
    layout: Layout,
    *,
    causal: bool = True,
    scale: float | None = None,
    mask: Mask | None = None,
) -> Float[Tensor, "batch heads positions value_size"]:
    """The attention of this rank's queries to the full sequence, of which each rank has a part.

    key, value: fewer heads than queries have are shared by query heads in order.
    layout: which positions each rank has.
    mask: more that queries may not look at, besides `causal`.

    Collective along `group`.
    """
    if query.shape[1] % key.shape[1]:
        raise UsageError(
            f"{query.shape[1]} query heads do not divide over {key.shape[1]} key-value heads"
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # In a graph the ring is one operation, which knows its group by name: graphs have no process
    # groups.
    if torch.compiler.is_compiling() and mask is None and comm.world_size(group) > 1:
        members: Any = dist.group.WORLD if group is None else group
        name = members.group_name
        return cast(
            Tensor,
            _ring_op(query, key, value, name, layout.length, layout.zigzag, causal, scale)[0],
        )
    plan = _Plan(group, layout, causal, scale, mask)
    if query.shape[2] != plan.own:
        raise UsageError(
            f"ring attention: rank {plan.rank} has {query.shape[2]} positions, and of a "
            f"sequence of {layout.length} over {layout.ranks} ranks it has {plan.own}"
        )
    return cast(Tensor, _eagerly(query, key, value, plan))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a mask is a function, for which a graph has no place
def _eagerly(query: Tensor, key: Tensor, value: Tensor, plan: _Plan) -> Any:
    apply: Any = _Ring.apply
    return apply(query, key, value, plan)


class RingAttention(AlongSequence):
    """`ring_attention` as a module of the model.

    group: of the ranks that divide the sequence; None: the axis ``sp``, once `ds_core.initialize`
        has the model.
    zigzag: whether the parts are as `Layout` has them with ``zigzag``; the config's ``mode: ring``
        cuts inputs so.

    All ranks have equally many positions.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        *,
        causal: bool = True,
        scale: float | None = None,
        zigzag: bool = False,
    ) -> None:
        super().__init__(group)
        self.causal = causal
        self.scale = scale
        self.zigzag = zigzag

    def bind_sequence(self, group: ProcessGroup, zigzag: bool) -> None:
        """Use `group`, if none was given, and parts as the config has them."""
        super().bind_sequence(group, zigzag)
        if not self._along.given:
            self.zigzag = zigzag

    def forward(
        self,
        query: Float[Tensor, "batch heads positions size"],
        key: Float[Tensor, "batch kv_heads positions size"],
        value: Float[Tensor, "batch kv_heads positions value_size"],
    ) -> Float[Tensor, "batch heads positions value_size"]:
        """The attention of this rank's positions to the whole sequence.

        Collective along the group.
        """
        ranks = comm.world_size(self.group)
        layout = Layout(query.shape[2] * ranks, ranks, self.zigzag and ranks > 1)
        return ring_attention(
            query, key, value, self.group, layout, causal=self.causal, scale=self.scale
        )


@dataclass(frozen=True)
class _Task:
    """The attention of some queries of one rank to the first keys of another."""

    first: int
    """The first query, in the order of the rank's own positions."""
    last: int
    """The end of the queries."""
    keys: int
    """Keys 0 to this one (excluded)."""
    causal: bool
    """Queries see keys up to their own position only; both are the same positions then."""


class _Plan:
    """What a rank computes and sends, of one layout."""

    def __init__(
        self,
        group: ProcessGroup | None,
        layout: Layout,
        causal: bool,
        scale: float,
        mask: Mask | None,
    ) -> None:
        self.group = group
        self.layout = layout
        self.causal = causal
        self.scale = scale
        self.mask = mask
        self.rank = comm.rank(group)
        self.ranks = layout.ranks
        self.own = self.length(self.rank)

    def length(self, rank: int) -> int:
        return sum(end - first for first, end in self.layout.pieces(rank))

    def task(self, rank: int, other: int) -> _Task | None:
        """What `rank` has to do with the keys of `other`; None: it sees none of them."""
        whole = self.length(other)
        # A rank's own block has the diagonal; without causal attention every block is full.
        if rank == other or not self.causal:
            return _Task(0, self.length(rank), whole, self.causal) if whole else None
        # Positions ascend, so a stretch of queries sees the first keys of the other rank, up to
        # some stretch.
        seen = []
        first = 0
        for start, end in self.layout.pieces(rank):
            keys = sum(e - s for s, e in self.layout.pieces(other) if e <= start)
            seen.append((first, first + end - start, keys))
            first += end - start
        looking = [row for row in seen if row[2] and row[1] > row[0]]
        if not looking:
            return None
        # Zigzag: of two stretches of queries either both see the first stretch of keys, or the
        # later one sees both; so one rectangle covers a task, without a mask.
        assert len({row[2] for row in looking}) == 1  # of the two layouts there are
        return _Task(looking[0][0], looking[-1][1], looking[0][2], False)

    def keys(self, rank: int, other: int) -> int:
        """How many of its keys `other` sends to `rank`."""
        task = self.task(rank, other)
        return 0 if task is None else task.keys

    def block_mask(self, other: int, task: _Task, device: torch.device) -> Tensor | None:
        """The mask of a task; None where all of it counts."""
        if self.mask is None:
            return None
        queries = self.layout.positions(self.rank, device)[task.first : task.last]
        return self.mask(queries, self.layout.positions(other, device)[: task.keys])


class _Shift:
    """A message to the rank `ahead` places on, and one from the rank as many places back, under
    way.
    """

    def __init__(self, given: Tensor, takes: int, plan: _Plan, ahead: int) -> None:
        to = (plan.rank + ahead) % plan.ranks
        source = (plan.rank - ahead) % plan.ranks
        self.given = given
        self.taken = given.new_empty(takes)
        # As an all-to-all in which all other parts are empty; see the note.
        gives = [0] * plan.ranks
        comes = [0] * plan.ranks
        gives[to] = given.numel()
        comes[source] = takes
        self.work = comm.all_to_all_single(
            self.taken, given, comes, gives, group=plan.group, async_op=True
        )

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.taken


def _pack(parts: tuple[Tensor, ...], rows: int) -> Tensor:
    """The first rows of keys and values as one message."""
    return torch.cat([part[:, :, :rows].reshape(-1) for part in parts])


def _unpack(message: Tensor, like: tuple[Tensor, ...], rows: int) -> list[Tensor]:
    shapes = [(*part.shape[:2], rows, part.shape[3]) for part in like]
    sizes = [part.shape[0] * part.shape[1] * rows * part.shape[3] for part in like]
    return [flat.view(shape) for flat, shape in zip(message.split(sizes), shapes, strict=True)]


def _width(parts: tuple[Tensor, ...]) -> int:
    """Elements per position."""
    return sum(part.shape[0] * part.shape[1] * part.shape[3] for part in parts)


class _Ring(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Plan) -> Tensor:
        out, lse = _forward(query, key, value, plan)
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        return *_backward(grad, query, key, value, out, lse, ctx.plan), None


def _forward(query: Tensor, key: Tensor, value: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
    parts = (key, value)
    # Sums over blocks are in fp32 (fp64 for fp64), whatever the dtype of the inputs.
    out = query.new_zeros((*query.shape[:3], value.shape[3]), dtype=_sum_dtype(query))
    lse = query.new_full(query.shape[:3], float("-inf"), dtype=out.dtype)
    # Step 0 is this rank's own block, while the first message is on its way.
    coming = _send_keys(parts, plan, 1)
    for step in range(plan.ranks):
        other = (plan.rank - step) % plan.ranks
        if step:
            assert coming is not None
            message = coming.wait()
            # The next exchange begins before this block is attended to, so that both overlap.
            coming = _send_keys(parts, plan, step + 1)
            parts_here = tuple(_unpack(message, parts, plan.keys(plan.rank, other)))
        else:
            parts_here = parts
        # Nothing to attend to; the exchanges above were made all the same.
        if (task := plan.task(plan.rank, other)) is None:
            continue
        rows = slice(task.first, task.last)
        more, more_lse = blocks.attend(
            query[:, :, rows],
            *parts_here,
            causal=task.causal,
            scale=plan.scale,
            mask=plan.block_mask(other, task, query.device),
        )
        blocks.add(out[:, :, rows], lse[:, :, rows], more, more_lse)
    return out.to(query.dtype), lse


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, plan: _Plan
) -> tuple[Tensor, Tensor, Tensor]:
    parts = (key, value)
    wide = _sum_dtype(query)
    dq, *own = (
        torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format)
        for x in (query, key, value)
    )
    # Keys and values come again as in forward; the gradients of each block go back to its owner,
    # one step later.
    coming = _send_keys(parts, plan, 1)
    going = None
    for step in range(plan.ranks):
        other = (plan.rank - step) % plan.ranks
        parts_here: Any = parts
        if step:
            assert coming is not None
            message = coming.wait()
            coming = _send_keys(parts, plan, step + 1)
            parts_here = _unpack(message, parts, plan.keys(plan.rank, other))
        task = plan.task(plan.rank, other)
        # A rank that sees none of these keys sends an empty message: the exchange has a partner on
        # either side.
        grads: tuple[Tensor, ...] = (key.new_empty(0),)
        if task is not None:
            rows = slice(task.first, task.last)
            more, *grads_here = blocks.attend_backward(
                *(x[:, :, rows] for x in (grad, query)),
                *parts_here,
                *(x[:, :, rows] for x in (out, lse)),
                causal=task.causal,
                scale=plan.scale,
                mask=plan.block_mask(other, task, query.device),
            )
            dq[:, :, rows] += more
            # Sent in the inputs' dtype, half the bytes for 16 bits; summed in fp32 by the owner.
            grads = tuple(g.to(key.dtype) for g in grads_here)
        if step == 0:
            for mine, more in zip(own, grads, strict=True):
                mine += more
            continue
        _add_returned(going, own, parts, plan, step - 1)
        sent = _pack(grads, plan.keys(plan.rank, other)) if task is not None else grads[0]
        # The opposite direction of the keys: this rank used keys from `step` places back, and its
        # own were used `step` places on.
        takes = plan.keys((plan.rank + step) % plan.ranks, plan.rank) * _width(parts)
        going = _Shift(sent, takes, plan, -step)
    _add_returned(going, own, parts, plan, plan.ranks - 1)
    return dq.to(query.dtype), own[0].to(key.dtype), own[1].to(value.dtype)


def _send_keys(parts: tuple[Tensor, ...], plan: _Plan, step: int) -> _Shift | None:
    """Start the exchange of keys and values of `step`."""
    if step >= plan.ranks:
        return None
    to = (plan.rank + step) % plan.ranks
    source = (plan.rank - step) % plan.ranks
    given = _pack(parts, plan.keys(to, plan.rank))
    return _Shift(given, plan.keys(plan.rank, source) * _width(parts), plan, step)


def _add_returned(
    going: _Shift | None, own: list[Tensor], parts: tuple[Tensor, ...], plan: _Plan, step: int
) -> None:
    """Add the gradients of this rank's keys and values that the rank `step` places on computed."""
    if going is None:
        return
    rows = plan.keys((plan.rank + step) % plan.ranks, plan.rank)
    for mine, more in zip(own, _unpack(going.wait(), parts, rows), strict=True):
        mine[:, :, :rows] += more


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# -- as operations of torch, for graphs ------------------------------------------------------------


# custom_op reads its schema from the annotations, so these have no shapes.
def _plan_of(group: str, length: int, zigzag: bool, causal: bool, scale: float) -> _Plan:
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    members = resolve(group)
    return _Plan(members, Layout(length, members.size(), zigzag), causal, scale, None)


@torch.library.custom_op("ds_sequence_parallel::ring", mutates_args=())
def _ring_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: str,
    length: int,
    zigzag: bool,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return _forward(query, key, value, _plan_of(group, length, zigzag, causal, scale))


@_ring_op.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: str,
    length: int,
    zigzag: bool,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    out = query.new_empty((*query.shape[:3], value.shape[3]))
    return out, query.new_empty(query.shape[:3], dtype=_sum_dtype(query))


@torch.library.custom_op("ds_sequence_parallel::ring_backward", mutates_args=())
def _ring_backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    group: str,
    length: int,
    zigzag: bool,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(
        grad, query, key, value, out, lse, _plan_of(group, length, zigzag, causal, scale)
    )


@_ring_backward_op.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, *output)


def _ring_gradients(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    return *_ring_backward_op(grad, *ctx.saved_tensors, *ctx.settings), *([None] * 5)


_ring_op.register_autograd(_ring_gradients, setup_context=_keep)
