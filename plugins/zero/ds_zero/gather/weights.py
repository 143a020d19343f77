"""Access to the weight of one ZeRO-managed parameter: gather it, write it, release it.

There are two kinds of parameters: those that `Init` has sharded, and those of a running engine of
any stage. Methods that move weights are collective over the ranks that share the parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.errors import UsageError
from ds_core.partition import Partitioner
from ds_core.process import STATE
from ds_zero.init.sharded_param import (
    ShardedParam,
    check_not_assigned,
    set_status,
    shard_param,
    sharded_param_of,
    untracked,
)

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_zero.buckets.flat import FlatBucket
    from ds_zero.buckets.records import Fragment
    from ds_zero.config import ZeroConfig
    from ds_zero.gather.unit import BucketUnit

FIRST = -1
"""As a modifier rank: the first of the ranks that share each parameter."""


class WeightOwner(Partitioner):
    """The part of a ZeRO partitioner by which the weights of single parameters are reached."""

    def __init__(self, ctx: Context, section: ZeroConfig) -> None:
        self.ctx = ctx
        self.section = section

        # -- What each parameter belongs to. Frozen ones that stay replicated are in no bucket.

        # Its place in its bucket.
        self.fragments: dict[nn.Parameter, Fragment] = {}
        self.bucket_of: dict[nn.Parameter, FlatBucket] = {}
        # Only parameters that stage 3 shards have a unit.
        self.unit_of: dict[nn.Parameter, BucketUnit] = {}
        # Its index in the model, which is equal on all ranks.
        self.param_index: dict[nn.Parameter, int] = {}

        # The parameters inside a `GatheredParameters`.
        self.in_context: set[nn.Parameter] = set()

    def pin(self, unit: BucketUnit) -> None:
        """Gather `unit` and keep it unsharded until `unpin`.

        Calls nest. Collective when it is sharded now.
        """
        raise NotImplementedError

    def unpin(self, unit: BucketUnit) -> None:
        """Undo one `pin`."""
        raise NotImplementedError

    def add_external(self, module: nn.Module, param: nn.Parameter) -> None:
        """Gather `param`, which another module owns, for `module`. Has an effect in stage 3."""

    def remove_external(self, module: nn.Module, param: nn.Parameter) -> None:
        """Undo `add_external`."""

    def settle(self) -> None:
        """Wait until no copy and no update of masters runs, before they are written."""
        raise NotImplementedError


class WeightHandle(ABC):
    """How to gather, write and release one ZeRO-managed parameter.

    Its attributes stay the same for as long as one owner has the weight.
    """

    param: nn.Parameter
    # The parameter's name in messages.
    name: str
    # Shape and device of the unsharded weight.
    shape: torch.Size
    device: torch.device
    # The global ranks that share the parameter, and their process group.
    ranks: tuple[int, ...]
    group: Any
    # Sort key, equal on all ranks: collectives for several parameters go in this order.
    order: tuple[int, ...]
    # Whether the weight is sharded while it is not in use.
    sharded_at_rest: bool
    # Whether writes that would be lost are errors, see ``enable_sanity_checks``.
    checks: bool
    # The parameters of the same owner that are inside a `GatheredParameters`.
    contexts: set[nn.Parameter]

    @property
    def in_context(self) -> bool:
        """Whether the parameter is inside a `GatheredParameters`."""
        return self.param in self.contexts

    @in_context.setter
    def in_context(self, value: bool) -> None:
        (self.contexts.add if value else self.contexts.discard)(self.param)

    @property
    @abstractmethod
    def is_sharded(self) -> bool:
        """Whether the weight is sharded now, so that the parameter is an empty tensor."""

    @property
    @abstractmethod
    def held(self) -> bool:
        """Whether a caller keeps the weight unsharded now, as `GatheredParameters` does."""

    @abstractmethod
    def unshard(self) -> None:
        """Make the parameter hold the unsharded weight until `reshard`.

        Calls nest. Collective when it is sharded.
        """

    @abstractmethod
    def write_back(self, source: int) -> None:
        """Make the value on global rank `source` the weight on all ranks, masters too.

        Collective.
        """

    @abstractmethod
    def reshard(self) -> None:
        """Undo one `unshard`. Writes to the parameter without `write_back` may be lost."""

    @abstractmethod
    def assign(self, value: Tensor) -> None:
        """Make `value` of the first rank the weight on all ranks, masters too. Collective."""

    def commit(self) -> None:
        """Write back what the first rank holds, and reshard. Collective."""
        self.write_back(self.ranks[0])
        self.reshard()

    def source(self, modifier: int) -> int:
        """The global rank that `modifier` means.

        Raises UsageError when it does not share this parameter.
        """
        if modifier in self.ranks:
            return modifier
        # Rank 0 is what callers name who know nothing of experts, whose ranks may be others.
        if modifier in (FIRST, 0):
            return self.ranks[0]
        raise UsageError(
            f"modifier_rank {modifier} does not share parameter {self.name!r}, which is on ranks "
            f"{list(self.ranks)}; give one of those, or 0 for the first of each parameter's ranks"
        )

    def _check(self) -> None:
        """Check that the parameter still has its device and shape."""
        if self.param.device.type != self.device.type:
            raise UsageError(
                f"parameter {self.name!r} was moved to {self.param.device} inside "
                f"GatheredParameters; leave it on {self.device}"
            )
        if self.param.shape != self.shape:
            raise UsageError(
                f"parameter {self.name!r} of shape {tuple(self.shape)} was given data of shape "
                f"{tuple(self.param.shape)} inside GatheredParameters; keep its shape"
            )


class _InitWeight(WeightHandle):
    """A parameter that `Init` has sharded, and no engine owns yet."""

    def __init__(self, param: nn.Parameter, sharded: ShardedParam) -> None:
        spec = sharded.spec
        self._sharded = sharded
        self.param = param
        self.name = str(getattr(param, "ds_id", "?"))
        self.shape = sharded.shape
        self.device = spec.device
        self.ranks = spec.ranks
        self.group = spec.group
        # Before all engines' parameters, in the order in which they were built.
        self.order = (0, sharded.serial)
        self.sharded_at_rest = True
        self.checks = spec.checks
        self.contexts = spec.in_context

    @property
    def is_sharded(self) -> bool:
        return not self._sharded.users

    @property
    def held(self) -> bool:
        return bool(self._sharded.users)

    @untracked
    def unshard(self) -> None:
        sharded = self._sharded
        # The first user gathers, and further ones find the weight unsharded.
        if not sharded.users:
            check_not_assigned(self.param, sharded)
            self.param.data = sharded.gather().to(self.param.dtype)
        sharded.users += 1
        set_status(self.param, sharded)

    @untracked
    def write_back(self, source: int) -> None:
        self._check()
        shard_param(self.param, self._sharded.spec, source)

    @untracked
    def commit(self) -> None:
        # No check: the constructor that wrote to it may have changed its shape.
        shard_param(self.param, self._sharded.spec)
        self.reshard()

    @untracked
    def reshard(self) -> None:
        sharded = self._sharded
        sharded.users -= 1
        if not sharded.users:
            self.param.data = sharded.placeholder(self.param.dtype)
        # It was written back, which leaves it empty, but another user still needs it.
        elif not self.param.numel():
            self.param.data = sharded.gather().to(self.param.dtype)
        set_status(self.param, sharded)

    @untracked
    def assign(self, value: Tensor) -> None:
        # Sharded as after construction; who has the weight unsharded gets the new values.
        self.param.data = value.to(self.device, self.param.dtype, copy=True)
        shard_param(self.param, self._sharded.spec)
        if self._sharded.users:
            self.param.data = self._sharded.gather().to(self.param.dtype)


class _EngineWeight(WeightHandle):
    """A parameter of an engine of stage 1, 2 or 3."""

    def __init__(self, param: nn.Parameter, owner: WeightOwner, serial: int) -> None:
        info = owner.ctx.params[param]
        mesh = owner.ctx.mesh
        self._owner = owner
        self._unit = owner.unit_of.get(param)
        # Frozen ones that stay replicated are in no bucket, and nobody moves them.
        bucket = self._bucket = owner.bucket_of.get(param)
        fragment = owner.fragments.get(param)
        self.param = param
        self.name = info.name
        self.shape = param.shape if fragment is None else torch.Size(fragment.shape)
        self.device = param.device if bucket is None else bucket.full.device
        self.ranks = tuple(mesh.ranks(*info.replicas))
        self.group = mesh.group(*info.replicas)
        # Of several engines the older one's first.
        self.order = (1, serial, owner.param_index[param])
        self.sharded_at_rest = self._unit is not None
        self.checks = owner.section.enable_sanity_checks
        self.contexts = owner.in_context

    @property
    def is_sharded(self) -> bool:
        return self._unit is not None and not self._unit.is_unsharded

    @property
    def held(self) -> bool:
        return self._unit is not None and bool(self._unit.uses.callers)

    @untracked
    def unshard(self) -> None:
        if self._unit is not None:
            self._owner.pin(self._unit)

    @untracked
    def reshard(self) -> None:
        if self._unit is not None:
            self._owner.unpin(self._unit)

    @untracked
    def write_back(self, source: int) -> None:
        self._check()
        self._spread(self.param.data, source)

    @untracked
    def assign(self, value: Tensor) -> None:
        self._spread(value.to(self.device, self.param.dtype, copy=True), self.ranks[0])

    def _spread(self, value: Tensor, source: int) -> None:
        """Make `value` of rank `source` the weight on all ranks, masters too."""
        value = value.contiguous()
        comm.broadcast(value, src=source, group=self.group)
        bucket = self._bucket
        if bucket is None:
            self.param.data.copy_(value)
            return
        index = self._owner.fragments[self.param].index
        # A sharded weight needs no gather: its shards are written, and the next gather gives them.
        if not self.is_sharded:
            # Code may have assigned another tensor to `param.data`; the weight is in the bucket.
            self.param.data = bucket.view(bucket.full, index)
            self.param.data.copy_(value)
        # Each rank writes its own range into its shard and its master.
        self._owner.settle()
        bucket.write(index, value)


@untracked
def agree(handles: Sequence[WeightHandle], votes: Sequence[int]) -> list[int]:
    """The largest vote of all ranks that share each parameter; votes are 0 to 255.

    Collective over these ranks.
    """
    # One collective for all weights that the same ranks share.
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, handle in enumerate(handles):
        groups.setdefault(handle.ranks, []).append(index)
    agreed = list(votes)
    # In the order of the ranks: a rank in several groups comes to them in the same order as others.
    for ranks, members in sorted(groups.items()):
        first = handles[members[0]]
        if len(ranks) > 1:
            mine = torch.tensor([votes[i] for i in members], dtype=torch.uint8, device=first.device)
            comm.all_reduce(mine, op=torch.distributed.ReduceOp.MAX, group=first.group)
            for index, vote in zip(members, mine.tolist(), strict=True):
                agreed[index] = vote
    return agreed


def owner_of(param: nn.Parameter) -> tuple[WeightOwner, int] | None:
    """The live ZeRO partitioner that owns `param`, and its engine's serial number.

    None for any other parameter.
    """
    # Frozen parameters may be in several engines; the oldest one's answer is equal on all ranks.
    found = [
        (e.partitioner, e.serial)
        for e in STATE.engines
        if isinstance(e.partitioner, WeightOwner) and param in e.ctx.params
    ]
    return min(found, key=lambda item: item[1]) if found else None


def handle_of(param: Any) -> WeightHandle | None:
    """The handle of `param`; None when ZeRO does not manage it."""
    if not isinstance(param, nn.Parameter):
        return None
    # An engine removes the mark of `Init` when it has taken the weight over.
    if (sharded := sharded_param_of(param)) is not None:
        return _InitWeight(param, sharded)
    owner = owner_of(param)
    return None if owner is None else _EngineWeight(param, *owner)


def handles_of(params: Iterable[Any]) -> list[WeightHandle]:
    """The handles of `params`, each once, in an order that is equal on all ranks."""
    found = (handle_of(p) for p in dict.fromkeys(params))
    return sorted((h for h in found if h is not None), key=lambda h: h.order)
