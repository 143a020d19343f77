"""Partitioned states for checkpoints: every fragment with its parameter's name and its range of the
unsharded state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state.states import (
    StateSource,
    StateTensor,
    buffer_states,
    check_shape,
    read_state,
    saved_optimizer_states,
)
from ds_state_stores import is_evicted, memory_of
from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_zero.buckets.flat import FlatBucket
from ds_zero.buckets.records import Fragment

if TYPE_CHECKING:
    from ds_state_stores import StateStore
    from torch.optim import Optimizer

    from ds_core.context import Context


def states(
    ctx: Context, module: nn.Module, buckets: Sequence[FlatBucket], optimizer: Optimizer | None
) -> Iterator[StateTensor]:
    """This rank's states: unsharded weights and buffers, then fragments of partitioned weights,
    masters and moments.
    """

    def others(*but: str) -> tuple[str, ...]:
        """The axes along which ranks have the same as this one, so that they can share the
        writing."""
        return tuple(a for a in ctx.mesh.expand(ctx.mesh.names) if a not in but)

    partitioned = {p for b in buckets if b.weights.sharded for p in b.params}
    reader = _Reader()
    # Weights that every replica has, and buffers.
    for name, param in module.named_parameters():
        if param not in partitioned:
            # None: one that came after initialize
            info = ctx.params.get(param)
            shape = tuple(param.shape)
            held, counted = (info.held, info.counted) if info is not None else ((), True)
            yield StateTensor(
                f"module/{name}", param.data, shape, 0, param.numel(), held, counted, others(*held)
            )
    yield from buffer_states(ctx, module)
    for bucket in buckets:
        # The first of the ranks that have the same.
        same = others(*bucket.held, *bucket.axes)
        store = bucket.counted and ctx.mesh.index(*same) == 0
        # Sharded weights: an empty one has no range, so the first rank names it.
        for fragment in bucket.fragments:
            if bucket.weights.sharded and (fragment.numel or 0 in fragment.shape):
                keep = store and bool(fragment.numel or bucket.rank == 0)
                read = reader.of(bucket, bucket.weights.evicts)
                part = bucket.weights.parts[fragment.index]
                yield fragment_state("module", part, bucket, fragment, keep, read)
        # What the optimizer updates, and its states.
        for fragment in bucket.masters.fragments:
            if fragment.numel:
                yield from _updated(bucket, fragment, optimizer, store, reader)
                if optimizer is not None:
                    yield from bucket.masters.saved(fragment, store)


def _updated(
    bucket: FlatBucket,
    fragment: Fragment,
    optimizer: Optimizer | None,
    store: bool,
    reader: _Reader,
) -> Iterator[StateTensor]:
    """The master weights, where they are not the weights themselves, and the optimizer's states of
    one fragment.
    """
    read = reader.of(bucket, bucket.masters.evicts)
    if fragment.master.dtype != bucket.dtype:
        yield fragment_state("master", fragment.master.data, bucket, fragment, store, read)
    state = optimizer.state.get(fragment.master, {}) if optimizer is not None else {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            continue
        kind = f"optimizer/{key}"
        if value.shape == fragment.master.shape:
            yield fragment_state(kind, value, bucket, fragment, store, read)
        elif value.dim() == 0:  # a counter, the same for all fragments of the parameter
            yield param_state(kind, value, bucket, fragment, store and fragment.start == 0)
        elif bucket.masters.full_tensors:
            yield param_state(kind, value, bucket, fragment, store)
        else:
            raise UsageError(
                f"optimizer state {key!r} of parameter {fragment.name!r} has shape "
                f"{tuple(value.shape)}, its fragment on this rank has {fragment.master.numel()} "
                "elements; ZeRO can save states of one value per element, or one value in all"
            )


def fragment_state(
    kind: str,
    values: Tensor,
    bucket: FlatBucket,
    fragment: Fragment,
    store: bool,
    read: Callable[[Tensor], Tensor] | None = None,
) -> StateTensor:
    """The state `kind` of a fragment, with one value per element; see `StateTensor`."""
    place = (fragment.shape, fragment.start, fragment.stop, bucket.held)
    return StateTensor(f"{kind}/{fragment.name}", values, *place, store, read=read)


def param_state(
    kind: str, values: Tensor, bucket: FlatBucket, fragment: Fragment, store: bool
) -> StateTensor:
    """The state `kind` of a parameter, of which `values` are all; see `StateTensor`."""
    place = (tuple(values.shape), 0, values.numel(), bucket.held)
    return StateTensor(f"{kind}/{fragment.name}", values, *place, store)


class _Reader:
    """Reads evicted states.

    Those of a bucket stay in memory until another's are read: fragments share storages.
    """

    def __init__(self) -> None:
        self._bucket: FlatBucket | None = None
        self._open: list[tuple[StateStore, Tensor]] = []

    def of(self, bucket: FlatBucket, store: StateStore | None) -> Callable[[Tensor], Tensor] | None:
        """How to read tensors of `bucket` that `store` has; None when they always are in memory."""
        return None if store is None else lambda tensor: self._read(tensor, bucket, store)

    def _read(self, tensor: Tensor, bucket: FlatBucket, store: StateStore) -> Tensor:
        # One bucket at a time: states on disk may be larger than memory.
        if self._bucket is not bucket:
            for owner, opened in self._open:
                if not is_evicted(opened):
                    owner.evict([opened], changed=False)
            self._bucket = bucket
            self._open = []
        if is_evicted(tensor):
            memory = memory_of(tensor)
            store.fetch(memory)
            store.wait(memory)
            self._open += [(store, part) for part in memory]
        return tensor.detach().clone()


@torch.no_grad()
def load(
    ctx: Context,
    module: nn.Module,
    buckets: Sequence[FlatBucket],
    source: StateSource,
    optimizer: Optimizer | None,
    *,
    strict: bool,
    from_fp32: bool,
) -> None:
    """Read what `states` yields, from a checkpoint of any world size, stage or partitioner; each
    rank its ranges.

    from_fp32: read master weights from the checkpoint's (when it has them), else from its module
    weights.
    """
    known = set(source.names())
    partitioned = {p for b in buckets if b.weights.sharded for p in b.params}
    unsharded = {
        f"module/{n}": p.data for n, p in module.named_parameters() if p not in partitioned
    }
    unsharded |= {state.name: state.tensor for state in buffer_states(ctx, module)}
    for name, tensor in unsharded.items():
        if strict or name in known:
            check_shape(source, name, tuple(tensor.shape))
            tensor.copy_(read_state(source, name, tensor))
    for bucket in buckets:
        given = [p for p in bucket.fragments if strict or f"module/{p.name}" in known]
        if bucket.weights.sharded and given:
            with bucket.weights.in_memory(write=True):
                for fragment in given:
                    part = bucket.weights.parts[fragment.index]
                    part.copy_(_range(source, f"module/{fragment.name}", fragment, part))
        with bucket.masters.in_memory():
            _load_masters(bucket, source, known, from_fp32=from_fp32)
    if optimizer is not None:
        _load_optimizer(buckets, source, optimizer)


def _load_masters(
    bucket: FlatBucket, source: StateSource, known: set[str], *, from_fp32: bool
) -> None:
    """From saved masters or, without them, from the weights.

    No collectives: another rank may fail to read.
    """
    # Full masters of sharded weights could only be made from them by a collective.
    full = bucket.masters.full_tensors and bucket.weights.sharded
    if not full:
        bucket.masters.refresh()
    for fragment in bucket.masters.fragments:
        if full and f"module/{fragment.name}" in known:
            weight = _range(source, f"module/{fragment.name}", fragment).to(bucket.dtype)
            fragment.master.data.copy_(weight.view(fragment.master.shape))
        if (
            fragment.master.dtype != bucket.dtype
            and from_fp32
            and f"master/{fragment.name}" in known
        ):
            master = fragment.master.data
            master.copy_(
                _range(source, f"master/{fragment.name}", fragment, master).view(master.shape)
            )


def _load_optimizer(
    buckets: Sequence[FlatBucket], source: StateSource, optimizer: Optimizer
) -> None:
    saved = saved_optimizer_states(source)
    counters = _counters(saved, source)
    mine = {p for g in optimizer.param_groups for p in g["params"]}
    for bucket in buckets:
        for fragment in bucket.masters.fragments:
            if fragment.master not in mine:
                continue
            values = {}
            replaced = optimizer.state.get(fragment.master, {})
            for key, name in saved.get(fragment.name, {}).items() if fragment.numel else ():
                # Evicted states have no memory to read into.
                old = replaced.get(key) if bucket.masters.evicts is None else None
                if bucket.masters.full_tensors or key in counters:
                    values[key] = read_state(source, name, old)
                else:
                    values[key] = _range(source, name, fragment, old)
            bucket.masters.set_state(optimizer, fragment, values)


def adopt(fragment: Fragment, state: Mapping[str, Any], *, full: bool) -> dict[str, Any]:
    """This rank's range of the `state` that the user's optimizer already has for a parameter.

    full: all of it.
    """
    if not fragment.numel:
        return {}
    kept = dict(state)
    for key, value in state.items():
        if not isinstance(value, Tensor):
            continue
        if value.dim() == 0 and (fragment.shape or key == "step"):
            if fragment.master.device.type == "cpu":  # the step runs on the host
                kept[key] = value.cpu()
            continue
        if full:
            kept[key] = value.to(fragment.master.device)
        elif tuple(value.shape) == fragment.shape:
            kept[key] = value.reshape(-1)[fragment.start : fragment.stop].to(
                fragment.master.device, copy=True
            )
        else:
            raise UsageError(
                f"the optimizer's state {key!r} of parameter {fragment.name!r} has shape "
                f"{tuple(value.shape)}, the parameter {fragment.shape}; ZeRO can take over states "
                "of one value per element, or one value in all"
            )
    return kept


def _counters(by_param: Mapping[str, Mapping[str, str]], source: StateSource) -> set[str]:
    """The keys of states with one value per parameter, such as step.

    The shapes of a parameter without dimensions do not show it; the other parameters decide, and
    "step" is known.
    """
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for entries in by_param.values():
        for key, name in entries.items():
            shapes.setdefault(key, set()).add(source.shape(name))
    only = {key for key, found in shapes.items() if found == {()}}
    return only if only != set(shapes) else only & {"step"}


def _range(source: StateSource, name: str, fragment: Fragment, into: object = None) -> Tensor:
    check_shape(source, name, fragment.shape)
    return source.read(name, fragment.start, fragment.stop, into=into)
