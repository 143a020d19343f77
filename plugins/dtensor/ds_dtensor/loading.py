"""`load_state_dict` of an engine: weights, masters and their copies from what torch's tools give.

A value is one of `Given`. Ranks agree on all of them first, so that an error is one on every rank,
before anything has changed.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from ds_access.states import locate
from ds_access.unshard import put_together
from ds_run_state import some
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ds_core import comm
from ds_core.errors import UsageError
from ds_core.process import log_once
from ds_dtensor.places import check, full_shape, take
from ds_dtensor.tensor import PieceTensor, whole
from ds_dtensor.weights import named_values, views_of, weights_at_rest

if TYPE_CHECKING:
    from ds_access.param_shard import ParamShard

    from ds_core.context import Context
    from ds_core.engine import Engine, RunningEngine
    from ds_dtensor.weights import Rest


log = logging.getLogger("ds_dtensor")

_GATHERED = (
    "load_state_dict() of the module was given DTensors (the first is %r): full tensors are made "
    "of them, one after the other; engine.load_state_dict takes them as they are"
)


class Keys(NamedTuple):
    """What did not fit, as a module's ``load_state_dict`` returns it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Given(enum.Enum):
    """What a state dict has for a tensor on this rank."""

    MISSING = "missing"
    EMPTY = "a tensor without values"
    """As `module.state_dict()` has it for a weight that is sharded."""
    WHOLE = "the full tensor"
    HERE = "this rank's elements"
    """A view of the same layout: of this engine, or of one like it."""
    SPREAD = "a DTensor of another layout"
    MISFIT = "a tensor of another shape"


def given(value: Any, shape: Sequence[int], view: Tensor) -> Given:
    """What `value` is, for a tensor of `shape` whose `view` is ours."""
    if value is None:
        return Given.MISSING
    if not isinstance(value, Tensor):
        return Given.MISFIT
    if tuple(value.shape) != tuple(shape):
        return Given.EMPTY if tuple(value.shape) == (0,) else Given.MISFIT
    if isinstance(value, DTensor):
        here = isinstance(view, PieceTensor) and view.same_layout(value)
        return Given.HERE if here else Given.SPREAD
    return Given.EMPTY if value.is_meta else Given.WHOLE


@dataclass(frozen=True, slots=True)
class Source:
    """What all ranks have for one tensor, as they have agreed.

    kind: of this rank, which is that of the others unless one has `WHOLE` values for all.
    first: the rank whose values those that have none get; None: each has them.
    """

    value: Any
    kind: Given
    first: int | None = None

    def full(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The full tensor. Collective but where each rank has it.

        dtype: of what it is for; device: from which ranks send.
        """
        if self.first is None or isinstance(self.value, DTensor):
            return whole(self.value)
        # Ranks without values need a dtype, too; fp32 holds what is rounded to a narrower one.
        wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
        out = torch.empty(tuple(shape), dtype=wide, device=device)
        if comm.rank() == self.first:
            out.copy_(self.value)
        comm.broadcast(out, src=self.first)
        return out


def agree(rows: Mapping[str, tuple[Any, Given]]) -> tuple[dict[str, Source], list[str]]:
    """Of each name, a source; and what is wrong, the same on all ranks.

    Names of which no rank has a value are in neither. Collective.
    """
    ranks = comm.all_gather_json([kind.name for _, kind in rows.values()])
    found: dict[str, Source] = {}
    wrong: list[str] = []
    for place, (name, (value, kind)) in enumerate(rows.items()):
        kinds = [Given[rank[place]] for rank in ranks]
        known = set(kinds)
        if Given.MISFIT in known:
            wrong.append(f"size mismatch for {name}, on rank {kinds.index(Given.MISFIT)}")
        elif known <= {Given.MISSING, Given.EMPTY}:
            continue
        elif known <= {Given.MISSING, Given.EMPTY, Given.WHOLE}:
            first = None if len(known) == 1 else kinds.index(Given.WHOLE)
            found[name] = Source(value, kind, first)
        elif known in ({Given.HERE}, {Given.SPREAD}, {Given.HERE, Given.SPREAD}):
            # One that has another layout makes it another on all.
            found[name] = Source(value, kind if len(known) == 1 else Given.SPREAD)
        else:
            texts = ", ".join(f"rank {r} {k.value}" for r, k in enumerate(kinds))
            wrong.append(f"{name}: ranks have different kinds of values ({texts})")
    return found, wrong


@torch.no_grad()
def load_state_dict(
    engine: Engine, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> Keys:
    """Make the values of `state_dict` the weights, their masters, and all copies of both.

    Values may be full tensors, DTensors of any layout (those of `state_dict`, of FSDP2), or empty
    on all ranks but one, whose values count then. 16-bit weights are rounded from the values, and
    masters have them as they are.

    strict: keys that are missing, or that the model does not have, are an error; else returned.
    assign: has no effect, since an engine's weights keep their memory.

    Collective. RuntimeError, as a module's own method gives it, for what does not fit, on every
    rank and before anything has changed.
    """
    check(engine)
    entries = list(named_values(engine))
    rests = weights_at_rest(engine, masters=True)
    views = views_of(engine, rests, wraps=True)
    rows = {
        name: (value, given(value, views[param].shape, views[param]))
        for name, param, value in _parameters(engine, entries, state_dict)
    }
    others = {key: old for key, old in entries if isinstance(old, Tensor) and old not in views}
    rows |= {
        key: (state_dict.get(key), given(state_dict.get(key), old.shape, old))
        for key, old in others.items()
    }
    sources, wrong = agree(rows)
    keys = _compare(entries, state_dict)
    if strict:
        wrong += [f"missing key(s): {some(keys.missing_keys)}"] if keys.missing_keys else []
        wrong += (
            [f"unexpected key(s): {some(keys.unexpected_keys)}"] if keys.unexpected_keys else []
        )
    if wrong:
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(engine.module).__name__}:\n\t"
            + "\n\t".join(wrong)
        )
    _release(engine)
    for key, old in others.items():
        if (source := sources.get(key)) is not None:
            old.detach().copy_(source.full(old.shape, old.dtype, _device(engine)))
    for param, info in engine.ctx.params.items():
        if param not in rests and (source := sources.get(info.name)) is not None:
            held = locate(engine, param)
            assert held is not None
            _load_trained(engine, held, source)
    # Last, since a module that loads makes masters from weights where they differ.
    _load_rests(engine, entries, rests, sources)
    _load_extras(engine, entries, state_dict)
    return keys


def _parameters(
    engine: RunningEngine, entries: Iterable[tuple[str, Any]], state_dict: Mapping[str, Any]
) -> Iterable[tuple[str, nn.Parameter, Any]]:
    """(name, parameter, its value): a shared one may be there under any of its keys."""
    keys: dict[Any, list[str]] = {}
    for key, value in entries:
        if isinstance(value, Tensor):
            keys.setdefault(value, []).append(key)
    for param, info in engine.ctx.params.items():
        value = next((state_dict[k] for k in keys.get(param, ()) if k in state_dict), None)
        yield info.name, param, value


def _compare(entries: Sequence[tuple[str, Any]], state_dict: Mapping[str, Any]) -> Keys:
    """The keys that no rank has a value for, and those that the model does not have."""
    ranks = comm.all_gather_json(list(state_dict))
    there = {key for rank in ranks for key in rank}
    alike: dict[Any, list[str]] = {}
    for key, value in entries:
        alike.setdefault(value if isinstance(value, Tensor) else key, []).append(key)
    missing = [k for keys in alike.values() if there.isdisjoint(keys) for k in keys]
    return Keys(missing, sorted(there - {key for key, _ in entries}))


def _device(engine: RunningEngine) -> torch.device:
    return engine.ctx.accelerator.current_device()


def _release(engine: RunningEngine) -> None:
    """Gathered weights are outdated now: none is kept for reuse."""
    release = getattr(engine.partitioner, "release_idle", None)
    if release is not None:
        release()


def _load_trained(engine: RunningEngine, held: ParamShard, source: Source) -> None:
    """First the master, which the optimizer updates; then the weight, which is rounded from it."""
    start, stop = held.updated_ranges[held.index]
    if source.kind is Given.HERE:
        values = source.value._local_tensor
    else:
        shape = full_shape(engine.ctx, held.name, held.shape)
        full = source.full(shape, held.updated.dtype, _device(engine))
        values = take(engine.ctx, held.name, full).reshape(-1)[start:stop]
    held.write(held.updated, values.reshape(-1).to(held.updated.dtype))
    torch.autograd.graph.increment_version(held.param)
    if held.local and held.ranges == held.updated_ranges and _writable(held):
        held.round()
        return
    master = held.read(held.updated).reshape(-1)
    held.set_weight(put_together([held], [master], [held.updated_ranges])[0])


def _writable(held: ParamShard) -> bool:
    """Whether other ranks see what this one writes to its range of the weight."""
    try:
        held.check_local_write()
    except UsageError:
        return False
    return True


def _load_rests(
    engine: RunningEngine,
    entries: Iterable[tuple[str, Any]],
    rests: Mapping[nn.Parameter, Rest],
    sources: Mapping[str, Source],
) -> None:
    """Weights that no optimizer updates. Those that are sharded are loaded by their modules."""
    # Extra states of modules may be lists, which are no keys.
    names = {value: key for key, value in entries if isinstance(value, Tensor) and value in rests}
    for param, rest in rests.items():
        name = engine.ctx.params[param].name
        if (source := sources.get(name)) is None:
            continue
        shape = full_shape(engine.ctx, name, rest.shape)
        full = source.full(shape, param.dtype, _device(engine))
        local = take(engine.ctx, name, full)
        if rest.whole and rest.state is not None and rest.state.read is None:
            rest.state.tensor.view(rest.shape).copy_(local)
        else:
            engine.module.load_state_dict({names[param]: local}, strict=False)


def _load_extras(
    engine: RunningEngine, entries: Iterable[tuple[str, Any]], state_dict: Mapping[str, Any]
) -> None:
    """What modules keep by themselves, where this rank has it."""
    for key, value in entries:
        name, _, last = key.rpartition(".")
        if last == "_extra_state" and not isinstance(value, Tensor) and key in state_dict:
            engine.module.get_submodule(name).set_extra_state(state_dict[key])


def load_by_module(ctx: Context) -> None:
    """Let the module's own ``load_state_dict`` take DTensors: it is given full tensors.

    Undone with the engine. Every rank loads; `load_state_dict` gathers nothing that is here.
    """
    module = ctx.module
    assert module is not None

    def gather(module: nn.Module, state_dict: dict[str, Any], *_: Any) -> None:
        for key, value in state_dict.items():
            if isinstance(value, DTensor):
                log_once(log, logging.INFO, _GATHERED, key)
                state_dict[key] = take(ctx, key, whole(value))

    handle = module.register_load_state_dict_pre_hook(gather)
    # Before those that load sharded weights, and the hooks of children.
    hooks: Any = module._load_state_dict_pre_hooks
    hooks.move_to_end(handle.id, last=False)
    ctx.undo(handle.remove)
