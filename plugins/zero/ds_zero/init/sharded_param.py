"""Parameters that `Init` has sharded before there is an engine.

Such a parameter is an empty tensor. Its weight is divided into equal shards over the ranks of one
group. The engine's partitioner later gathers them into its flat buffers, one bucket at a time.

[Note: bits] Plain code builds a model in fp32 and casts it at the end, and constructors may change
a weight several times. So a weight is sharded in the dtype in which it was built, and cast when
construction is over.

[Note: aliases] A tensor that was made of an empty parameter without a call that a function mode
sees (``nn.Parameter(linear.weight)``) gets its values by a gather, so all ranks must agree on which
tensors these are. An address is not enough: the memory of a freed tensor is reused, on one rank and
not on the next. So the mark is an attribute of the storage itself, which torch keeps for as long as
the storage lives. The storage also keeps the sharded weight alive, so that no garbage collector
decides whether a gather takes place.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from ds_run_state.lazy import LAZY
from torch import Tensor, nn

from ds_core import comm
from ds_core.accelerator import get_accelerator
from ds_core.errors import UsageError
from ds_zero.init.status import ZeroParamStatus

if TYPE_CHECKING:
    from ds_state_stores import StateStore

    from ds_core.context import Context

log = logging.getLogger("ds_zero")

_ATTRIBUTES = (
    *(
        "ds_id",
        "ds_shape",
        "ds_numel",
        "ds_tensor",
        "ds_secondary_tensor",
        "ds_status",
        "ds_persist",
    ),
    "ds_active_sub_modules",
)
"""The documented attributes of a parameter of stage 3."""

_IN_PLACE = "_ds_in_place"
"""The attribute of a frozen parameter that no engine has moved, so that several may have it."""

STORED = 1 << 16
"""The least bytes of a shard that a store keeps; smaller ones stay in memory."""

P = ParamSpec("P")
R = TypeVar("R")
_SERIAL = itertools.count()
_MARK = LAZY
"""The attribute of a parameter, and of the storage of an empty tensor, that leads to the weight."""


@dataclass(frozen=True, eq=False)
class ShardSpec:
    """Over which ranks parameters are sharded, and how."""

    # -- The ranks that share the parameters.

    # Their process group; None for one rank alone.
    group: Any
    # Their global ranks; the weights of the first count.
    ranks: tuple[int, ...]

    # -- The ranks over which a weight is divided: all of them, or with MiCS a block of them.

    # Their process group.
    over: Any
    # How many they are.
    block: int
    # This rank's index among them.
    index: int

    # -- Where weights are.

    # The device of unsharded weights.
    device: torch.device
    # The device of shards.
    shard_device: torch.device
    # Whether shards are in page-locked memory.
    pin: bool = False
    # The dtype of floating-point weights; None keeps their own.
    dtype: torch.dtype | None = None
    # Whether writes that would be lost are errors, see ``enable_sanity_checks``.
    checks: bool = False
    # Keeps the shards, in place of memory, except for small ones.
    store: StateStore | None = None
    # The parameters that are inside a `GatheredParameters`.
    in_context: set[nn.Parameter] = field(default_factory=set)


def untracked(function: Callable[P, R]) -> Callable[P, R]:
    """`function` without autograd and without torch function modes.

    Neither ours (see `ds_zero.gather.on_access`) nor others'.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


class ShardedParam:
    """The sharded weight of one parameter."""

    def __init__(self, spec: ShardSpec, shape: torch.Size, dtype: torch.dtype, serial: int) -> None:
        self.spec = spec
        # Of the unsharded weight.
        self.shape = shape
        self.dtype = dtype
        # Equal on all ranks, since all build the same parameters in the same order.
        self.serial = serial
        # This rank's; None while the weight has no value yet (it was on the meta device).
        self.shard: Tensor | None = None
        # Whether the spec's store has it, which frees its memory.
        self._stored = False

        # -- Who uses the weight.

        # How many callers need the parameter unsharded now.
        self.users = 0
        # Whether the weight was handed on, usually to an engine.
        self.consumed = False

    @property
    def shard_numel(self) -> int:
        """Elements of each rank's shard, padding included."""
        return -(-self.shape.numel() // self.spec.block)

    def keep_shard(self, flat: Tensor) -> None:
        """Keep this rank's shard of the flat unsharded weight."""
        size = self.shard_numel
        index = self.spec.index
        # The last ranks' ranges may be shorter, or empty: their shards are padded.
        mine = flat[size * index : size * (index + 1)]
        shard = torch.zeros(size, dtype=self.dtype, device=self.spec.shard_device)
        if self.spec.pin:
            shard = get_accelerator().pin(shard)
        shard[: mine.numel()].copy_(mine)
        self._keep(shard)

    def _keep(self, shard: Tensor | None) -> None:
        """Make this the shard, in the store if it is to have it; the old one is forgotten."""
        store = self.spec.store
        self._stored = False
        # The store would keep the space of a tensor that nobody refers to.
        if store is not None and self.shard is not None:
            store.discard([self.shard])
        self.shard = shard
        if store is not None and shard is not None and shard.nbytes >= STORED:
            self.shard = store.copy_in(shard)
            self._stored = True
            store.evict([self.shard])

    @contextlib.contextmanager
    def in_memory(self) -> Iterator[Tensor]:
        """The shard, which is in memory inside."""
        assert self.shard is not None
        if self._stored and self.spec.store is not None:
            self.spec.store.fetch([self.shard])
            self.spec.store.wait([self.shard])
            yield self.shard
            # It was only read, so the store need not write it.
            self.spec.store.evict([self.shard], changed=False)
        else:
            yield self.shard

    def cast(self, dtype: torch.dtype) -> None:
        """Have the weight in another dtype."""
        self.dtype = dtype
        if self.shard is not None:
            with self.in_memory() as shard:
                shard = shard.to(dtype)
            # A cast makes a new tensor, which is not page-locked.
            self._keep(get_accelerator().pin(shard) if self.spec.pin else shard)

    def consume(self) -> None:
        """The weight was handed on."""
        self._keep(None)
        self.consumed = True

    def gather(self) -> Tensor:
        """The unsharded weight on the device; NaN (or zero, for integers) if it has no value yet.

        Collective.
        """
        numel = self.shape.numel()
        world = self.spec.block
        # Without a value on this rank it has none on the others: no collective is needed.
        if self.shard is None:
            fill = float("nan") if self.dtype.is_floating_point else 0
            return torch.full(self.shape, fill, dtype=self.dtype, device=self.spec.device)
        # A copy where the shard itself would be handed out, or its memory is freed after this.
        with self.in_memory() as found:
            shard = found.to(self.spec.device, copy=world == 1 or self._stored)
        if world == 1:
            return shard.view(self.shape)
        full = torch.empty(world * shard.numel(), dtype=self.dtype, device=self.spec.device)
        if shard.numel():
            comm.all_gather_into_tensor(full, shard, group=self.spec.over)
        # Without the padding.
        return full[:numel].view(self.shape)

    @property
    def ranks(self) -> tuple[int, ...]:
        """See `ds_run_state.lazy.LazyWeight`."""
        return self.spec.ranks

    @untracked
    def show_shape(self, param: nn.Parameter) -> None:
        """See `ds_run_state.lazy.LazyWeight`."""
        check_not_assigned(param, self)
        # One element, that all indices refer to.
        if not self.users:
            param.data = torch.empty((), dtype=param.dtype, device=param.device).expand(self.shape)

    def hide_shape(self, param: nn.Parameter) -> None:
        """See `ds_run_state.lazy.LazyWeight`."""
        if not self.users:
            param.data = self.placeholder(param.dtype)

    def take(self, param: nn.Parameter) -> Tensor:
        """See `ds_run_state.lazy.LazyWeight`. Raises UsageError for a weight without a value."""
        if self.shard is None and self.shape.numel():
            raise UsageError(
                f"{getattr(param, 'ds_id', 'a parameter')} of shape {tuple(self.shape)} was built "
                "on the meta device and has no value yet; load weights before initialize"
            )
        found = pop_weight(param, [])
        assert found is not None
        return found[0]

    def placeholder(self, dtype: torch.dtype | None = None) -> Tensor:
        """The empty tensor that the parameter is while its weight is sharded.

        Its storage has the mark, see [Note: aliases].
        """
        placeholder = torch.empty(0, dtype=dtype or self.dtype, device=self.spec.device)
        setattr(placeholder.untyped_storage(), _MARK, self)
        return placeholder


def sharded_param_of(param: Any) -> ShardedParam | None:
    """The sharded weight of `param`, or of a storage; None if there is none."""
    found = getattr(param, _MARK, None)
    return found if isinstance(found, ShardedParam) else None


@untracked
def fill_alias(tensor: Tensor) -> None:
    """Fill a tensor that was made of an empty parameter with the weight's values.

    Such as ``nn.Parameter(linear.weight)``. Does nothing for other tensors, else collective. Raises
    UsageError when the weight has gone to an engine.
    """
    # Only what looks like a placeholder, so that other tensors cost little. Some have no storage.
    if (
        tensor.dim() == 1
        and not tensor.numel()
        and tensor.layout is torch.strided
        and not tensor.is_meta
    ):
        sharded = sharded_param_of(tensor.untyped_storage())
        if sharded is None:
            return
        # The values have gone to the engine, which lays them out anew.
        if sharded.consumed:
            raise UsageError(
                f"this tensor was made of parameter 'init.{sharded.serial}' of shape "
                f"{tuple(sharded.shape)} while that was sharded, and had no values when an "
                "engine took over the weight; make it inside ds_zero.GatheredParameters(param), "
                "or put it into a module in the same ds_zero.Init"
            )
        tensor.data = sharded.gather().to(tensor.dtype)


@untracked
def shard_param(param: nn.Parameter, spec: ShardSpec, source: int | None = None) -> None:
    """Keep only this rank's shard of the weight in `param`, as global rank `source` has it.

    Collective. A parameter on the meta device has no value yet.

    source: None: the group's first rank.
    """
    # One that is sharded already keeps its serial number and its users.
    old = sharded_param_of(param)
    sharded = ShardedParam(spec, param.shape, param.dtype, next(_SERIAL)) if old is None else old
    sharded.shape = param.shape
    sharded.dtype = param.dtype
    if not param.is_meta:
        # Ranks may have drawn other random values: one rank's count.
        flat = param.data.to(spec.device).contiguous().reshape(-1)
        if len(spec.ranks) > 1 and flat.numel():
            comm.broadcast(flat, src=spec.ranks[0] if source is None else source, group=spec.group)
        sharded.keep_shard(flat)
        param.data = sharded.placeholder()
    else:
        _replace_meta(param, sharded.placeholder())
    _set_attributes(param, sharded)


def describe(
    param: Any, name: str, shape: torch.Size, part: Tensor, *, unsharded: bool = False
) -> None:
    """Set the documented attributes of a parameter of stage 3.

    part: what this rank has of it, or would have.
    unsharded: whether it always has its weight; the status of any other is set by what gathers it.
    """
    param.ds_id = name
    param.ds_tensor = part
    param.ds_shape = shape
    param.ds_numel = shape.numel()
    param.ds_persist = unsharded
    if unsharded:
        param.ds_status = ZeroParamStatus.AVAILABLE
    # For code that clears it: modules that need the weight are in its unit.
    param.ds_active_sub_modules = set()


def _set_attributes(param: Any, sharded: ShardedParam) -> None:
    part = sharded.shard if sharded.shard is not None else sharded.placeholder()
    describe(param, f"init.{sharded.serial}", sharded.shape, part)
    setattr(param, _MARK, sharded)
    set_status(param, sharded)


def set_status(param: Any, sharded: ShardedParam) -> None:
    """Set ``ds_status``: whether the parameter is unsharded now."""
    param.ds_status = ZeroParamStatus.AVAILABLE if sharded.users else ZeroParamStatus.NOT_AVAILABLE


@untracked
def cast_param(param: nn.Parameter) -> None:
    """Cast a sharded weight to the dtype of its spec, after construction: see [Note: bits]."""
    # A module may have been given to an engine inside the context: its weights are not ours now.
    sharded = sharded_param_of(param)
    dtype = None if sharded is None else sharded.spec.dtype
    if sharded is None or dtype is None or not sharded.dtype.is_floating_point:
        return
    if sharded.dtype != dtype:
        sharded.cast(dtype)
        param.data = sharded.placeholder()
        _set_attributes(param, sharded)


def _replace_meta(param: nn.Parameter, data: Tensor) -> None:
    """``param.data = data`` for a parameter on the meta device, where torch refuses it.

    The object stays the same.
    """
    # Attributes that the user has set on the parameter stay, too.
    new = nn.Parameter(data, requires_grad=param.requires_grad)
    new.__dict__.update(param.__dict__)
    torch.utils.swap_tensors(param, new)


def mark_in_place(param: nn.Parameter) -> None:
    """Record that no partitioner has moved the weight of `param`, though it has the attributes."""
    setattr(param, _IN_PLACE, True)


def remove_attributes(param: nn.Parameter) -> None:
    """Remove what was set on `param`; its data stays as it is."""
    for name in (_MARK, _IN_PLACE, *_ATTRIBUTES):
        if hasattr(param, name):
            delattr(param, name)


@untracked
def check_not_assigned(param: nn.Parameter, sharded: ShardedParam, name: str = "") -> None:
    """Raise UsageError if ``param.data`` was assigned while the weight is sharded.

    The assigned values would be lost.
    """
    if not sharded.users and param.numel():
        raise UsageError(
            f"parameter {name or getattr(param, 'ds_id', '')!r} of shape {tuple(sharded.shape)} "
            f"was given data of shape {tuple(param.shape)} while it is sharded; write to it "
            "inside ds_zero.GatheredParameters(param, modifier_rank=0)"
        )


@untracked
def pop_weight(param: nn.Parameter, ranks: list[int]) -> tuple[Tensor, bool] | None:
    """Remove and return the unsharded weight of `param`, and whether all `ranks` got the same one.

    None for a parameter that is not sharded. The weight has the dtype to which `param` was cast
    meanwhile. Collective over the group over which it was sharded.
    """
    sharded = sharded_param_of(param)
    if sharded is None:
        return None
    # `sharded` is forgotten only after the gather, which needs its shard.
    full = param.data if sharded.users else sharded.gather().to(param.device, param.dtype)
    remove_attributes(param)
    sharded.consume()
    return full, set(ranks) <= set(sharded.spec.ranks)


def prepare_module(module: nn.Module, ctx: Context) -> None:
    """Check the parameters of `module` before a partitioner lays them out.

    Sharded ones get their shapes, without values. Raises UsageError for a weight without a value,
    one that was assigned while it was sharded, or one that another engine owns.
    """
    lacking = []
    for param, info in ctx.params.items():
        sharded = sharded_param_of(param)
        if sharded is None:
            # Attributes of stage 3 without the mark of `Init`: an engine has taken the weight over.
            if hasattr(param, "ds_id") and not hasattr(param, _IN_PLACE):
                raise UsageError(
                    f"parameter {info.name!r} is sharded by another engine; call that engine's "
                    "destroy() first, or initialize the complete model once"
                )
            continue
        check_not_assigned(param, sharded, info.name)
        if sharded.shard is None and sharded.shape.numel():
            lacking.append(info.name)
        # Experts, say, should start with other values on each rank of their axis, but `Init` has
        # made those of one rank the values of all.
        if info.held and set(ctx.mesh.ranks(*info.held)) & set(sharded.spec.ranks) != {ctx.rank}:
            log.warning(
                "%s differs over the mesh axes %s, but was built by ds_zero.Init over ranks that "
                "differ there, so all start with the same values; give Init a "
                "data_parallel_group, or build it outside",
                info.name,
                list(info.held),
            )
    if lacking:
        more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
        raise UsageError(
            f"{', '.join(lacking[:5])}{more}: built on the meta device and still without a value: "
            "their modules have no reset_parameters. Load weights (load_state_dict), or write "
            "them inside ds_zero.GatheredParameters(..., modifier_rank=0), before initialize"
        )
    # After all checks, so that an error leaves every parameter as it was.
    for param in ctx.params:
        if (sharded := sharded_param_of(param)) is not None:
            sharded.show_shape(param)


@untracked
def unshard_module(module: nn.Module) -> None:
    """Unshard all parameters of `module` for good. Collective."""
    for param in module.parameters():
        if (found := pop_weight(param, [])) is not None:
            param.data = found[0]
