"""Partitioned states for checkpoints: every piece with its parameter's name and its range of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_core.partition import StateSource, StateTensor
from ds_zero.flat import FlatBucket, Piece, Share

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_core.context import Context

__all__ = ["load", "states"]


def states(
    ctx: Context, module: nn.Module, buckets: Sequence[FlatBucket], optimizer: Optimizer | None
) -> Iterator[StateTensor]:
    """This rank's states: whole weights and buffers, then pieces of partitioned weights, masters and moments."""

    def first(*but: str) -> bool:
        """Whether this rank is the first along all axes but these."""
        return all(ctx.mesh.coord[a] == 0 for a in ctx.mesh.expand(ctx.mesh.names) if a not in but)

    def others(*but: str) -> tuple[str, ...]:
        """The axes along which ranks hold the same as this one, so that they can share the writing."""
        return tuple(a for a in ctx.mesh.expand(ctx.mesh.names) if a not in but)

    parted = {p for b in buckets if b.share is Share.PART for p in b.params}
    for name, param in module.named_parameters():
        if param not in parted:
            held = ctx.params[param].held
            shape = tuple(param.shape)
            yield StateTensor(f"module/{name}", param.data, shape, 0, param.numel(), held, True, others(*held))
    for name, buffer in _persistent_buffers(module):
        yield StateTensor(f"module/{name}", buffer, tuple(buffer.shape), 0, buffer.numel(), (), first())
    for bucket in buckets:
        store = first(*bucket.held, *bucket.axes)
        for piece in bucket.pieces:
            place = (piece.shape, piece.start, piece.stop, bucket.held)
            if bucket.share is Share.PART and (piece.stop > piece.start or 0 in piece.shape):
                keep = store and (piece.stop > piece.start or bucket.rank == 0)
                yield StateTensor(f"module/{piece.name}", bucket.part[piece.within], *place, keep)
            if piece.stop == piece.start:
                continue
            if bucket.master is not bucket.part:
                yield StateTensor(f"master/{piece.name}", piece.master.data, *place, store)
            state = optimizer.state.get(piece.master, {}) if optimizer is not None else {}
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    continue
                name = f"optimizer/{key}/{piece.name}"
                if value.shape == piece.master.shape:
                    yield StateTensor(name, value, *place, store)
                elif value.dim() == 0:  # a counter, the same for all pieces of the parameter
                    yield StateTensor(name, value, (), 0, 1, bucket.held, store and piece.start == 0)
                else:
                    raise UsageError(
                        f"optimizer state {key!r} of parameter {piece.name!r} has shape {tuple(value.shape)}, its "
                        f"piece on this rank has {piece.master.numel()} elements; ZeRO can save states of one "
                        "value per element, or of one value alone"
                    )


@torch.no_grad()
def load(
    module: nn.Module,
    buckets: Sequence[FlatBucket],
    source: StateSource,
    optimizer: Optimizer | None,
    *,
    strict: bool,
    from_fp32: bool,
) -> None:
    """Read what `states` yields, from a checkpoint of any world size, stage or partitioner; each rank its ranges.

    from_fp32: take master weights from the checkpoint's (when it has them), else from its module weights.
    """
    known = set(source.names())
    parted = {p for b in buckets if b.share is Share.PART for p in b.params}
    whole = [(n, p.data) for n, p in module.named_parameters() if p not in parted] + list(_persistent_buffers(module))
    for name, tensor in whole:
        if strict or f"module/{name}" in known:
            _check(source, f"module/{name}", tuple(tensor.shape))
            tensor.copy_(source.read(f"module/{name}").view(tensor.shape))
    for bucket in buckets:
        for piece in bucket.pieces:
            if bucket.share is Share.PART and (strict or f"module/{piece.name}" in known):
                bucket.part[piece.within].copy_(_range(source, f"module/{piece.name}", piece))
        if bucket.master is bucket.part:
            continue
        bucket.master.copy_(bucket.part)
        for piece in bucket.pieces:
            if from_fp32 and f"master/{piece.name}" in known:
                piece.master.data.copy_(_range(source, f"master/{piece.name}", piece))
    if optimizer is not None:
        _load_optimizer([p for b in buckets for p in b.pieces], source, optimizer)


def _load_optimizer(pieces: Iterable[Piece], source: StateSource, optimizer: Optimizer) -> None:
    by_param: dict[str, list[tuple[str, str]]] = {}
    for name in source.names():
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            key, _, param = rest.partition("/")
            by_param.setdefault(param, []).append((key, name))
    counters = _counters(by_param, source)
    on_device = any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)
    mine = {p for g in optimizer.param_groups for p in g["params"]}
    for piece in pieces:
        if piece.master not in mine:
            continue
        saved = by_param.get(piece.name, [])
        if not saved or piece.stop == piece.start:  # its state had not begun when the checkpoint was saved
            optimizer.state.pop(piece.master, None)
            continue
        state: dict[str, Any] = optimizer.state[piece.master]
        for key, name in saved:
            device = piece.master.device
            if key in counters:
                old = state.get(key)
                kept = old.device if isinstance(old, Tensor) else device if on_device else torch.device("cpu")
                state[key] = source.read(name).view(()).to(kept)
            else:
                state[key] = _range(source, name, piece).to(device)


def _counters(by_param: dict[str, list[tuple[str, str]]], source: StateSource) -> set[str]:
    """The keys that hold one value per parameter, such as step.

    For a parameter without dimensions shapes cannot tell; then what the others say counts, and "step" by itself.
    """
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for entries in by_param.values():
        for key, name in entries:
            shapes.setdefault(key, set()).add(source.shape(name))
    only = {key for key, found in shapes.items() if found == {()}}
    return only if only != set(shapes) else only & {"step"}


def _range(source: StateSource, name: str, piece: Piece) -> Tensor:
    _check(source, name, piece.shape)
    return source.read(name, piece.start, piece.stop)


def _check(source: StateSource, name: str, shape: tuple[int, ...]) -> None:
    saved = source.shape(name)
    if saved != shape:
        raise UsageError(
            f"checkpoint state {name!r} has shape {saved}, the model's is {shape}; was it saved by another model?"
        )


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    kept = module.state_dict(keep_vars=True)
    return ((name, buffer) for name, buffer in module.named_buffers() if name in kept)
