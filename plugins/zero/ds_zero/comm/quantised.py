"""Quantised collectives (ZeRO++): weights sent in 8 bits, gradients in 4.

A message has `numel` values of `bits` bits and then, for each group of `GROUP` of them, the fp32
scale: the largest size in the group over the largest number (127 or 7). So a value is off by at
most half its group's scale. A group that is not finite arrives as NaN.

qwZ: each rank's shard is one message, all-gathered and decoded on every rank, its own too, so all
have equal weights.

qgZ: gradients go to their owners in two exchanges, first among the ranks of a block
(`Levels.inner`: a host), then between blocks. After the first a rank adds up what its block has of
the shards that it passes on, and encodes the sums; after the second the owner adds up those of all
blocks. Between hosts each gradient thus crosses once per host, in 4 bits, and is rounded twice.

[Note: error feedback] With LoCo an encoder adds to what it encodes the error `e` that it made
before. Afterwards ``e = err_beta * e + (1 - err_beta) * (v - decoded(v))`` with v what was encoded,
kept in 8 bits. Both exchanges have errors of their own. They are cleared every `reset_T` steps, are
not in checkpoints, and a group that is not finite clears its own.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_core import comm
from ds_zero.comm.collectives import Chain, WeightGather
from ds_zero.comm.hierarchy import in_blocks, inner_axes, ranks_per_host

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from jaxtyping import Float, Float32, Shaped, UInt8

    from ds_core.context import Context
    from ds_core.kernels import Kernels
    from ds_core.mesh import Mesh
    from ds_zero.buckets.flat import FlatBucket
    from ds_zero.comm.collectives import Room, Works
    from ds_zero.comm.hierarchy import Levels
    from ds_zero.config import Loco, ZeroConfig

log = logging.getLogger("ds_zero")

GROUP = 512
"""Values to a scale: 4 bytes for 512 values are 0.8 % of 8 bits, 1.6 % of 4."""
WEIGHT_BITS = 8
GRADIENT_BITS = 4
ERROR_BITS = 8


def can_quantise(dtype: torch.dtype) -> bool:
    """Whether tensors of `dtype` can be sent quantised, with a gain."""
    return dtype.is_floating_point and dtype.itemsize > 1


@dataclass(frozen=True, slots=True)
class Message:
    """What a message has, and its sizes in bytes."""

    # Bits of a value, and how many values.
    bits: int
    numel: int
    # Bytes of the values, where the scales begin, and bytes of it all.
    values: int
    scales: int
    size: int

    @classmethod
    def of(cls, bits: int, numel: int) -> Message:
        """A message of `numel` values."""
        values = (numel * bits + 7) // 8
        # fp32 numbers begin at multiples of 4 bytes.
        scales = -(-values // 4) * 4
        return cls(bits, numel, values, scales, scales + -(-numel // GROUP) * 4)

    def parts(
        self, messages: UInt8[Tensor, "*messages size"]
    ) -> tuple[Shaped[Tensor, "*messages values"], Float32[Tensor, "*messages groups"]]:
        """Values and scales of ``messages[..., size]``, as the kernels have them."""
        values = messages[..., : self.values]
        scales = messages[..., self.scales :].view(torch.float32)
        return values.view(torch.int8) if self.bits == 8 else values, scales


class Coder:
    """Encodes and decodes messages by the run's kernels."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def encode(
        self, kind: Message, x: Float[Tensor, " numel"], message: UInt8[Tensor, " size"]
    ) -> None:
        """Write `x` into `message`."""
        room = (*kind.parts(message), None)
        self._kernels.serving("quantize", x)(
            x, bits=kind.bits, group=GROUP, symmetric=True, out=room
        )

    def decode(
        self, kind: Message, message: UInt8[Tensor, " size"], out: Float[Tensor, " numel"]
    ) -> Float[Tensor, " numel"]:
        """Write what `message` stands for into `out`, which is returned."""
        q, scales = kind.parts(message)
        how = {"bits": kind.bits, "group": GROUP, "numel": kind.numel, "dtype": out.dtype}
        self._kernels.serving("dequantize", out)(q, scales, None, **how, out=out)
        return out

    def add_up(
        self, kind: Message, messages: UInt8[Tensor, "ranks size"], out: Float[Tensor, " numel"]
    ) -> Float[Tensor, " numel"]:
        """Write the sum of what ``messages[i]`` stand for into `out`, which is returned."""
        how = {"bits": kind.bits, "group": GROUP, "numel": kind.numel, "dtype": out.dtype}
        self._kernels.serving("dequantize_sum", out)(*kind.parts(messages), **how, out=out)
        return out

    def encode_sum(
        self, kind: Message, messages: UInt8[Tensor, "ranks size"], message: UInt8[Tensor, " size"]
    ) -> None:
        """Write the sum of what ``messages[i]`` stand for into `message`."""
        scales = kind.parts(messages)[1]
        how = {"bits": kind.bits, "group": GROUP, "numel": kind.numel}
        room = (*kind.parts(message), None)
        self._kernels.serving("requantize_sum", scales)(*kind.parts(messages), **how, out=room)


# -- weights ---------------------------------------------------------------------------------------


class QuantisedGather(WeightGather):
    """qwZ: an all-gather of 8-bit messages."""

    exact = False

    def __init__(self, coder: Coder) -> None:
        self._coder = coder

    def start(self, bucket: FlatBucket) -> Works:
        """See `WeightGather.start`."""
        mine = bucket.own()
        full = bucket.full
        coder = self._coder
        kind = Message.of(WEIGHT_BITS, mine.numel())
        messages = torch.empty((bucket.world, kind.size), dtype=torch.uint8, device=mine.device)
        coder.encode(kind, mine, messages[bucket.rank])
        work = comm.all_gather_into_tensor(
            messages.view(-1), messages[bucket.rank], group=bucket.group, async_op=True
        )

        def finish() -> Works:
            for message, shard in zip(messages, bucket.shards(full), strict=True):
                coder.decode(kind, message, shard)
            return []

        return [Chain([work], finish)]


# -- gradients -------------------------------------------------------------------------------------


def blocks(mesh: Mesh, wanted: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], Levels]:
    """For each of the `wanted` axes whose ranks are in several blocks of several: the blocks.

    They are hpZ's, or else hosts. Collective over the world; ranks may want different axes.
    """
    hpz = mesh.has("hpz")
    return in_blocks(
        mesh, wanted, lambda a: mesh.size(*inner_axes(mesh, a)) if hpz else ranks_per_host(mesh, a)
    )


class Feedback:
    """The errors of LoCo, by bucket and exchange: rows of 8-bit messages.

    See [Note: error feedback].
    """

    def __init__(self, settings: Loco, coder: Coder) -> None:
        self._settings = settings
        self._coder = coder
        self._errors: dict[tuple[FlatBucket, int], Tensor] = {}
        self._steps = 0

    def encode(
        self,
        at: tuple[FlatBucket, int],
        row: int,
        rows: int,
        kind: Message,
        x: Tensor,
        message: Tensor,
    ) -> None:
        """Write `x` (fp32, overwritten) and the error of row `row` of `rows` into `message`; keep
        the new error.
        """
        coder = self._coder
        beta = self._settings.err_beta
        how = Message.of(ERROR_BITS, kind.numel)
        if at not in self._errors:
            self._errors[at] = torch.zeros((rows, how.size), dtype=torch.uint8, device=x.device)
        kept = self._errors[at][row]
        error = coder.decode(how, kept, torch.empty_like(x))
        x += error
        coder.encode(kind, x, message)
        x -= coder.decode(kind, message, torch.empty_like(x))
        coder.encode(how, error.mul_(beta).add_(x, alpha=1 - beta), kept)
        # A group that is not finite would stay so for ever.
        how.parts(kept)[1].nan_to_num_(0.0, 0.0, 0.0)

    def stepped(self) -> None:
        """The optimizer has made a step."""
        self._steps += 1
        if self._steps % self._settings.reset_T == 0:
            self._errors.clear()


class QuantisedReduce:
    """qgZ, a `GradientReduce`.

    blocks: see `blocks`; buckets without have one exchange.
    feedback: of LoCo, if any.
    """

    def __init__(
        self, coder: Coder, blocks: Mapping[tuple[str, ...], Levels], feedback: Feedback | None
    ) -> None:
        self._coder = coder
        self._blocks = dict(blocks)
        self.feedback = feedback

    def __call__(
        self, bucket: FlatBucket, source: Shaped[Tensor, " full"], group: Any, room: Room
    ) -> tuple[Works, Shaped[Tensor, " shard"]]:
        """See `GradientReduce`."""
        found = self._blocks.get(bucket.axes)
        size, count = (bucket.world, 1) if found is None else (found.size, found.count)
        kind = Message.of(GRADIENT_BITS, bucket.layout.shard_numel)
        messages = torch.empty((size, count, kind.size), dtype=torch.uint8, device=source.device)
        # By place in a block, then by block: what a rank of this block passes on is consecutive.
        for rank, part in enumerate(bucket.shards(source)):
            self._encode(bucket, rank, kind, part, messages[rank % size, rank // size])
        out = room(bucket, source)
        got = torch.empty_like(messages)
        first = _exchange(got, messages, group if found is None else found.inner)
        if found is None:
            return [Chain([first], lambda: self._finish(kind, got[:, 0], out))], out
        sums, final = (
            torch.empty((count, kind.size), dtype=torch.uint8, device=source.device)
            for _ in range(2)
        )

        def across() -> Works:
            for block in range(count):
                self._encode_sum(bucket, block, kind, got[:, block], sums[block])
            comm.label(bucket.about_gradients)
            return [_exchange(final, sums, found.outer)]

        return [Chain([first], across, lambda: self._finish(kind, final, out))], out

    def _encode(
        self, bucket: FlatBucket, row: int, kind: Message, x: Tensor, message: Tensor
    ) -> None:
        if self.feedback is None:
            self._coder.encode(kind, x, message)
        else:
            self.feedback.encode(
                (bucket, 1), row, bucket.world, kind, x.to(torch.float32, copy=True), message
            )

    def _encode_sum(
        self, bucket: FlatBucket, row: int, kind: Message, messages: Tensor, message: Tensor
    ) -> None:
        if self.feedback is None:
            self._coder.encode_sum(kind, messages, message)
        else:
            total = self._coder.add_up(
                kind, messages, torch.empty(kind.numel, device=messages.device)
            )
            self.feedback.encode(
                (bucket, 2), row, bucket.world // len(messages), kind, total, message
            )

    def _finish(self, kind: Message, messages: Tensor, out: Tensor) -> Works:
        self._coder.add_up(kind, messages, out)
        return []


def _exchange(got: Tensor, given: Tensor, group: Any) -> Any:
    return comm.all_to_all_single(got.view(-1), given.view(-1), group=group, async_op=True)


# -- what the config asks for ----------------------------------------------------------------------


def quantised_gather(
    ctx: Context, section: ZeroConfig, buckets: Sequence[FlatBucket]
) -> QuantisedGather | None:
    """qwZ for `buckets`, or for the frozen ones of them, if the config has it.

    Those that cannot be quantised are counted in one line of the log.
    """
    if not (section.zero_quantized_weights or section.zero_quantized_nontrainable_weights):
        return None
    if section.zero_quantized_weights:
        _log_others(ctx, "zero_quantized_weights", [b for b in buckets if b.world > 1], "sent")
    return QuantisedGather(Coder(ctx.kernels))


def quantised_reduce(
    ctx: Context, section: ZeroConfig, buckets: Sequence[FlatBucket]
) -> QuantisedReduce | None:
    """qgZ for the sharded ones of `buckets`, if the config has it. Collective over the world."""
    if not section.zero_quantized_gradients:
        return None
    served = [b for b in buckets if _serves(b)]
    _log_others(ctx, "zero_quantized_gradients", [b for b in buckets if b.world > 1], "reduced")
    coder = Coder(ctx.kernels)
    loco = section.zeropp_loco_param
    found = blocks(ctx.mesh, {b.axes for b in served})
    return QuantisedReduce(coder, found, None if loco is None else Feedback(loco, coder))


def _serves(bucket: FlatBucket) -> bool:
    return bucket.weights.sharded and bucket.world > 1 and can_quantise(bucket.dtype)


def _log_others(ctx: Context, key: str, buckets: Sequence[FlatBucket], verb: str) -> None:
    others = [p for b in buckets if not _serves(b) for p in b.params]
    if others and ctx.rank == 0:
        share = sum(p.numel() for p in others) / sum(b.layout.total for b in buckets)
        log.info(
            "zero_optimization.%s: %d of %d parameters (%.2g %% of the elements) are %s as they "
            "are, since they stay unsharded (param_persistence_threshold) or have a dtype of one "
            "byte or of whole numbers",
            *(key, len(others), sum(len(b.params) for b in buckets), 100 * share, verb),
        )
