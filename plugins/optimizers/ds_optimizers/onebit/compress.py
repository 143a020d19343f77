"""Averaging tensors over ranks by their signs: one bit per element and a scale per tensor, each way.

The compressed all-reduce with error feedback of 1-bit Adam (Tang et al. 2021, algorithm 1).

Dimensions: ``ranks`` of the group, ``bytes`` of packed signs, ``tensors``, ``elements``.

[Note: the exchange] Every rank adds to its tensor the error it made last time, and sends the signs,
packed eight to a byte, and one scale: the root mean square. Rank j receives everybody's chunk j,
averages, adds its own last error, and sends the signs and the scale of that to all. The error of
compression is kept (worker and server error) and added next time, so that nothing is lost for good.

[Note: one message for many tensors] Each tensor has scales and errors of its own, as if it were
exchanged alone; but chunk j of all tensors is sent in one message, so a step costs two collectives
however many tensors there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_core import comm

if TYPE_CHECKING:
    from jaxtyping import Float, UInt8
    from torch.distributed import ProcessGroup

Rounds = Generator[list[Tensor], Tensor, None]
"""An exchange that gives the tensors whose scales it needs, and is sent these: twice."""
_BITS = (128, 64, 32, 16, 8, 4, 2, 1)


def padded(numel: int, ranks: int) -> int:
    """`numel` rounded up so that each of `ranks` equal chunks is whole bytes of signs: to a
    multiple of ranks * d, d = 8 * ranks / gcd(ranks, 8)."""
    unit = ranks * (8 * ranks // math.gcd(ranks, 8))
    return -(-numel // unit) * unit


def pack_signs(values: Float[Tensor, "*batch elements"]) -> UInt8[Tensor, "*batch bytes"]:
    """The signs of `values`, eight to a byte: the first is the highest bit, 0 counts as +.

    elements: a multiple of 8.
    """
    bits: Tensor = (values >= 0).unflatten(-1, (-1, 8))
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=values.device)
    return (bits * weights).sum(-1, dtype=torch.uint8)


def unpack_signs(
    packed: UInt8[Tensor, "*batch bytes"], dtype: torch.dtype
) -> Float[Tensor, "*batch elements"]:
    """The reverse of `pack_signs`: +1 and -1, eight for each byte."""
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=packed.device)
    bits = (packed.unsqueeze(-1) & weights) != 0
    return bits.flatten(-2).to(dtype).mul_(2).sub_(1)


@dataclass(slots=True)
class Errors:
    """The errors of compression of one tensor, to be added next time."""

    worker: Float[Tensor, "ranks chunk"]
    """Of the tensor that this rank sent."""
    server: Float[Tensor, " chunk"]
    """Of the average of its chunk that it sent."""

    @classmethod
    def of(cls, tensor: Tensor, ranks: int) -> Errors:
        """None lost so far."""
        chunk = padded(tensor.numel(), ranks) // ranks
        return cls(tensor.new_zeros(ranks, chunk), tensor.new_zeros(chunk))


@dataclass(slots=True)
class Exchange:
    """The ranks of one process group, and how many bytes this rank has sent to others."""

    group: ProcessGroup | None = None
    sent: int = 0
    """Bytes, over all calls."""
    full: int = 0
    """Bytes that a ring all-reduce of the same tensors would have sent."""
    ranks: int = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = comm.world_size(self.group)

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor], errors: Sequence[Errors]) -> None:
        """Replace `tensors`, of one dtype and device, by their compressed average; `errors` are
        theirs. Collective.
        """
        if not tensors:
            return
        average_together([self.rounds(tensors, errors)], lambda views: [_scales(views[0])])

    def rounds(self, tensors: Sequence[Tensor], errors: Sequence[Errors]) -> Rounds:
        """`average`, by somebody who says the scales: see `average_together`."""
        # 1. All tensors in one (ranks, elements): row j is what rank j averages. Last errors are
        # added.
        chunks = [e.server.numel() for e in errors]
        values = tensors[0].new_zeros(self.ranks, sum(chunks))
        views = list(values.split(chunks, dim=1))
        _fill(views, tensors)
        torch._foreach_add_(views, [e.worker for e in errors])
        counts = torch.tensor(chunks, device=values.device)
        signs = pack_signs(values)
        scales = yield views
        # 2. Signs and scales replace the values; the difference is the new worker error.
        values -= _values(signs, scales, counts)
        torch._foreach_copy_([e.worker for e in errors], views)

        # 3. This rank's chunk of all ranks' tensors, averaged, and compressed in the same way.
        averages = self._to_servers(signs, scales, counts)
        parts = list(averages.split(chunks))
        torch._foreach_add_(parts, [e.server for e in errors])
        signs = pack_signs(averages)
        scales = yield parts
        averages -= _values(signs, scales, counts)
        torch._foreach_copy_([e.server for e in errors], parts)

        # 4. Every chunk from the rank that averaged it.
        _empty(tensors, list(self._to_all(signs, scales, counts).split(chunks, dim=1)))
        sizes = sum(t.numel() * t.element_size() for t in tensors)
        self.full += 2 * sizes * (self.ranks - 1) // self.ranks
        yield []

    def _to_servers(self, signs: Tensor, scales: Tensor, counts: Tensor) -> Tensor:
        """Everybody's chunk of mine, averaged.

        signs: (ranks, bytes); scales: (tensors,).
        """
        # Scales as bytes behind the signs: one message.
        message = torch.cat([signs, _bytes(scales).expand(self.ranks, -1)], dim=1).contiguous()
        received = torch.empty_like(message)
        comm.all_to_all_single(received, message, group=self.group)
        self.sent += message.numel() * (self.ranks - 1) // self.ranks
        # Row by row, so that only one row is unpacked at a time; in the order of ranks, the same
        # everywhere.
        total = scales.new_zeros(8 * signs.shape[1])
        for row in received:
            total += _values(
                row[: signs.shape[1]], _scalars(row[signs.shape[1] :], scales.dtype), counts
            )
        return total.div_(self.ranks)

    def _to_all(self, signs: Tensor, scales: Tensor, counts: Tensor) -> Tensor:
        """Every rank's average of its chunk, (ranks, elements).

        signs: (bytes,); scales: (tensors,).
        """
        message = torch.cat([signs, _bytes(scales)])
        received = message.new_empty(self.ranks, message.numel())
        comm.all_gather_into_tensor(received, message, group=self.group)
        self.sent += message.numel() * (self.ranks - 1)
        rows = [
            _values(r[: len(signs)], _scalars(r[len(signs) :], scales.dtype), counts)
            for r in received
        ]
        return torch.stack(rows)


def average_together(
    exchanges: Sequence[Rounds], scales_of: Callable[[list[list[Tensor]]], Sequence[Tensor]]
) -> None:
    """Run `Exchange.rounds` of several groups of ranks side by side. Collective.

    scales_of: called twice, before values are sent and before averages are: of the tensors of each
        exchange, as they are now, their scales (tensors,).
    """
    views = [next(rounds) for rounds in exchanges]
    for _ in range(2):
        scales = scales_of(views)
        views = [rounds.send(s) for rounds, s in zip(exchanges, scales, strict=True)]


def compressed_allreduce(
    tensor: Tensor, errors: Errors, group: ProcessGroup | None = None
) -> Tensor:
    """The compressed average of `tensor` over the ranks of `group`; `errors` are updated. Collective.

    Returns a new tensor of the same shape; see [Note: the exchange].
    """
    result = tensor.clone()
    Exchange(group).average([result], [errors])
    return result


def _scales(views: Sequence[Tensor]) -> Tensor:
    """The root mean square of each."""
    sizes = torch.tensor([v.numel() for v in views], dtype=views[0].dtype, device=views[0].device)
    return torch.stack(torch._foreach_norm(list(views))) / sizes.sqrt()


def _values(signs: Tensor, scales: Tensor, counts: Tensor) -> Tensor:
    """Signs times the scale of the tensor that each belongs to.

    signs: (..., bytes); counts: elements per tensor.
    """
    return unpack_signs(signs, scales.dtype) * scales.repeat_interleave(counts)


def _bytes(scales: Tensor) -> Tensor:
    return scales.contiguous().view(torch.uint8)


def _scalars(raw: Tensor, dtype: torch.dtype) -> Tensor:
    # A copy: a view as another dtype must be aligned.
    return raw.clone().view(dtype)


def _match_parts(view: Tensor, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Matching parts of a padded (ranks, chunk) view and of a tensor: its whole rows, and the rest
    of one.
    """
    flat = tensor.view(-1)
    chunk = view.shape[1]
    rows, rest = divmod(flat.numel(), chunk) if chunk else (0, 0)
    pairs = [(view[:rows], flat[: rows * chunk].view(rows, chunk))] if rows else []
    return pairs + ([(view[rows, :rest], flat[rows * chunk :])] if rest else [])


def _fill(views: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    pairs = [
        pair
        for v, t in zip(views, tensors, strict=True)
        for pair in _match_parts(v, t.contiguous())
    ]
    if pairs:
        torch._foreach_copy_([v for v, _ in pairs], [t for _, t in pairs])


def _empty(tensors: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    """Write the values of `views` into `tensors`, without the padding."""
    for tensor, view in zip(tensors, views, strict=True):
        if tensor.is_contiguous():
            for inside, piece in _match_parts(view, tensor):
                piece.copy_(inside)
        else:
            tensor.copy_(view.reshape(-1)[: tensor.numel()].view_as(tensor))
