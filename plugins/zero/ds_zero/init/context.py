"""`Init`: shard a model that is larger than one device's memory while it is built.

[Note: when a module is finished] A module's parameters are sharded when the ``__init__`` of its
outermost class has returned. Torch has no hook for that moment, and wrapping ``__init__`` of every
class would change classes that are not ours. But torch has hooks that are called when a parameter
or a module is registered anywhere. What was registered before, and has no ``__init__`` running on
this thread (seen from its frames), is finished, whether it is in a list, in a parent, or nowhere
yet. So only the module under construction and the one finished last are unsharded. Other threads,
and modules built outside the context, are not affected.
"""

from __future__ import annotations

import contextvars
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType, SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any

import torch
from ds_state_stores import open_store
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from ds_core import comm
from ds_core.accelerator import get_accelerator
from ds_core.errors import AcceleratorError, ConfigError, UsageError
from ds_core.process import log_once
from ds_zero.gather.module_hooks import install_hooks
from ds_zero.gather.on_access import GatherOnAccess
from ds_zero.gather.weights import owner_of
from ds_zero.init.sharded_param import (
    ShardSpec,
    cast_param,
    fill_alias,
    shard_param,
    sharded_param_of,
)

if TYPE_CHECKING:
    from ds_state_stores import StateStore

    from ds_core.accelerator import Accelerator
    from ds_core.config import RunConfig
    from ds_core.plugins import Plugins
    from ds_zero.config import ZeroConfig

log = logging.getLogger("ds_zero")

_INNERMOST: contextvars.ContextVar[Init | None] = contextvars.ContextVar(
    "ds_zero.Init", default=None
)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Init:
    """Shard the parameters of each module that is built inside the context, right after its
    construction.

    module: an existing model, which is sharded at once; no context is needed. data_parallel_group:
        the ranks to shard over, whose first rank's weights count; None: all ranks, or those of
        `mpu`. remote_device: "cpu" keeps the shards in host memory, page-locked with `pin_memory`;
        "nvme" keeps them on disk, as offload_param says.
    config_dict_or_path: the run's config, for dtype, offload_param and override_module_apply; with
        a stage below 3 nothing is sharded, and values that are still "auto" do not count.
    config: deprecated name of config_dict_or_path.
    dtype: of floating-point weights (float16, bfloat16, float32, float64); None: the config's, or
        as built.
    mem_efficient_linear, zero_param_parallel_group: have no effect, which is noted in the log.
        enabled=False does nothing. With ``mics_shard_size`` in the config each shard group has all
        weights.

    Weights are bit-identical to plain construction with the first rank's random state. Modules on
    the meta device get values from their ``reset_parameters``; without that method they must be
    loaded or written before `initialize`.
    Collective: all ranks build the same modules in the same order. Starts torch.distributed if it
        is not running.

    Raises UsageError or ConfigError for arguments that are invalid, contradict each other or are
    not supported yet.
    """

    _for_mics = False

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
    ) -> None:
        self._enabled = enabled
        self._pending: dict[nn.Module, None] = {}
        self._sharded: list[nn.Parameter] = []
        self._handles: list[Any] = []
        if not enabled:
            return
        _check_arguments(remote_device, dtype)
        if (zero_quantized_weights or zero_quantized_nontrainable_weights) and comm.rank() == 0:
            log.warning(
                "ds_zero.Init: zero_quantized_* have no effect here: set them in "
                "zero_optimization, for training"
            )
        if config is not None:
            log.warning("ds_zero.Init: config= is deprecated; use config_dict_or_path=")
            if config_dict_or_path is not None:
                raise UsageError(
                    "ds_zero.Init: config and config_dict_or_path are both given; give one"
                )
        if not mem_efficient_linear and comm.rank() == 0:
            text = (
                "ds_zero.Init: mem_efficient_linear has no effect: no module keeps a gathered "
                "weight"
            )
            log_once(log, logging.WARNING, text)
        if zero_param_parallel_group is not None and comm.rank() == 0:
            text = (
                "ds_zero.Init: zero_param_parallel_group has no effect: hpZ's groups follow "
                "from "
                "the config"
            )
            log_once(log, logging.WARNING, text)
        run, plugins = _read(config if config_dict_or_path is None else config_dict_or_path)
        section = _section(run)
        if run is not None and (section is None or section.stage != 3):
            log.info(
                "ds_zero.Init shards nothing: the config's ZeRO stage is %d",
                section.stage if section else 0,
            )
            self._enabled = False
            return
        if self._for_mics and (section is None or section.mics_shard_size < 1):
            raise UsageError(
                "ds_zero.MiCS_Init: the config has no zero_optimization.mics_shard_size; give it "
                "with "
                "config_dict_or_path, or use ds_zero.Init"
            )
        self._apply = section is None or section.override_module_apply
        group = (
            mpu.get_data_parallel_group()
            if data_parallel_group is None and mpu is not None
            else None
        )
        self._arguments = (
            data_parallel_group or group,
            remote_device,
            pin_memory,
            _dtype(dtype, run, plugins),
            section,
            _store(remote_device, section, run, plugins),
        )
        self._spec: ShardSpec | None = None
        self._on_access = GatherOnAccess()
        self._outer: Any = None
        self._thread = 0
        if module is not None:
            self._convert(module)

    # -- the context -------------------------------------------------------------------------------

    def __enter__(self) -> Init:
        if not self._enabled:
            return self
        if self._handles:
            raise UsageError("ds_zero.Init: this object is in use already; create another one")
        self._spec = self._spec or _shard_spec(*self._arguments)
        self._thread = threading.get_ident()
        self._handles = [
            register_module_parameter_registration_hook(self._on_parameter),
            register_module_module_registration_hook(self._on_module),
        ]
        self._outer = _INNERMOST.get()
        _INNERMOST.set(self)
        self._on_access.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._enabled:
            return
        try:
            if kind is None:
                self._finish(all_weights=True)
        finally:
            outer, self._outer = self._outer, None
            _INNERMOST.set(outer)
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            if outer is not None:
                outer._pending.update(self._pending)  # still under construction
            self._pending.clear()
            self._on_access.__exit__(kind or sys.exc_info()[0], error, trace)
            self._cast()

    # -- construction ------------------------------------------------------------------------------

    def _mine(self) -> bool:
        return threading.get_ident() == self._thread and _INNERMOST.get() is self

    def _on_parameter(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        if self._mine():
            if sharded_param_of(param) is None:
                fill_alias(param)
            self._finish()
            self._pending[module] = None  # only now: the parameter is not in its place yet

    def _on_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if not self._mine():
            return
        for part in child.modules() if child is not None else ():
            if any(_to_shard(p) for p in part._parameters.values()):
                self._pending[part] = None
        if self._apply:
            install_hooks(module, apply=True, engine=False)
        self._finish()

    def _finish(self, *, all_weights: bool = False) -> None:
        """Shard the modules that are not under construction any more."""
        running = _under_construction() if self._pending else set()
        done = [m for m in self._pending if id(m) not in running]
        for module in done:
            del self._pending[module]
        for module in done:
            self._shard(module)
        self._on_access.release(all_weights=all_weights)

    def _shard(self, module: nn.Module) -> None:
        """Shard the module's own parameters."""
        assert self._spec is not None
        params = [p for p in module._parameters.values() if p is not None and _to_shard(p)]
        if any(t is not None and t.is_meta for t in (*params, *module._buffers.values())):
            params = _materialise(module)
        for param in params:
            shard_param(param, self._spec)
        self._sharded += params
        install_hooks(module, apply=self._apply, engine=False)

    def _cast(self) -> None:
        for param in self._sharded:
            cast_param(param)
        self._sharded.clear()

    def _convert(self, module: nn.Module) -> None:
        """Shard an existing model."""
        self._spec = _shard_spec(*self._arguments)
        for part in module.modules():
            if any(p is not None and owner_of(p) is not None for p in part._parameters.values()):
                raise UsageError("ds_zero.Init: this module is already in an engine")
            self._shard(part)
        self._cast()


def _to_shard(param: nn.Parameter | None) -> bool:
    return param is not None and sharded_param_of(param) is None and not is_lazy(param)


def _under_construction() -> set[int]:
    """The ids of the objects whose ``__init__`` runs on this thread."""
    found = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount:
            found.add(id(frame.f_locals.get(code.co_varnames[0])))
        frame = frame.f_back
    return found


@torch.no_grad()
def _materialise(module: nn.Module) -> list[nn.Parameter]:
    """Give a module on the meta device its values by ``reset_parameters``; return its own
    parameters, to be sharded.

    Parameters that it does not initialize (all, without such a method) stay without a value.
    """
    reset = getattr(module, "reset_parameters", None)
    params = [p for p in module._parameters.values() if p is not None and _to_shard(p)]
    if not callable(reset):
        return params
    on_meta = [p for p in params if p.is_meta]
    for param in on_meta:
        fresh = nn.Parameter(
            torch.empty_like(param, device="cpu"), requires_grad=param.requires_grad
        )
        if fresh.is_floating_point():
            fresh.fill_(float("nan"))
        fresh.__dict__.update(param.__dict__)
        torch.utils.swap_tensors(param, fresh)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
    reset()
    for param in on_meta:
        if param.is_floating_point() and bool(param.isnan().any()):
            torch.utils.swap_tensors(
                param, nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
            )
    return params


# -- arguments -------------------------------------------------------------------------------------


def _check_arguments(remote: str | None, dtype: torch.dtype | None) -> None:
    if remote not in (None, "none", "cpu", "nvme"):
        raise UsageError(
            f"ds_zero.Init: remote_device is {remote!r}; use 'cpu', 'nvme', or None for the "
            "accelerator"
        )
    if dtype is not None and dtype not in _DTYPES:
        raise UsageError(
            f"ds_zero.Init: dtype is {dtype}; use torch.float16, bfloat16, float32 or float64"
        )


def _read(source: Any) -> tuple[RunConfig | None, Plugins | None]:
    from ds_core.compose import compose
    from ds_core.config import RunConfig

    if source is None or isinstance(source, RunConfig):
        return source, None
    # Front-ends fill in "auto" before `initialize`; what `Init` reads is never left to them.
    chosen = compose(source, fill_later=True)
    return chosen.config, chosen.plugins


def _section(run: RunConfig | None) -> ZeroConfig | None:
    from ds_zero.config import ZeroConfig

    return run.section(ZeroConfig) if run is not None else None


def _dtype(
    given: torch.dtype | None, run: RunConfig | None, plugins: Plugins | None
) -> torch.dtype | None:
    if run is None:
        return given
    from ds_core.precision import make_precision

    wanted = make_precision(run, plugins).param
    if given is not None and wanted is not None and wanted != given:
        raise ConfigError(
            f"ds_zero.Init: dtype is {given}, but the config trains in {wanted}; leave dtype out"
        )
    return given or wanted


def _store(
    remote: str | None, section: ZeroConfig | None, run: RunConfig | None, plugins: Plugins | None
) -> Callable[[Accelerator], StateStore] | None:
    """What opens the store of shards; None: they are in memory."""
    offload = section.weights_offload if section is not None else None
    device = offload.device.lower() if offload is not None and remote is None else remote or "none"
    if device in ("none", "cpu"):
        return None
    if offload is None or plugins is None or (offload.nvme_path is None and device == "nvme"):
        raise UsageError(
            f"ds_zero.Init: remote_device {device!r} needs the folder; give config_dict_or_path= "
            "with "
            "zero_optimization.offload_param.nvme_path"
        )

    def opened(accelerator: Accelerator) -> StateStore:
        # There is no engine yet, and stores need no more of one than this.
        like: Any = SimpleNamespace(
            accelerator=accelerator, config=run, plugins=plugins, rank=comm.rank()
        )
        return open_store(like, device, {**offload.options, "max_in_cpu": 0})

    return opened


def _shard_spec(
    group: Any,
    remote: str | None,
    pin: bool,
    dtype: torch.dtype | None,
    section: ZeroConfig | None,
    store: Callable[[Accelerator], StateStore] | None,
) -> ShardSpec:
    """Start torch.distributed if it is not running, and choose the ranks and the device of
    shards."""
    accelerator = get_accelerator()
    comm.init_distributed(accelerator.communication_backend)
    accelerator.set_device(accelerator.local_index(comm.local_rank()))
    if dtype is torch.float16 and not accelerator.supports(torch.float16):
        raise AcceleratorError(
            f"ds_zero.Init: {accelerator.name} cannot compute in float16; use torch.bfloat16"
        )
    ranks = list(range(comm.world_size()))
    if group is not None:
        ranks = torch.distributed.get_process_group_ranks(group)
        if comm.rank() not in ranks:
            raise UsageError(
                f"ds_zero.Init: rank {comm.rank()} is not in data_parallel_group, which has {ranks}"
            )
    elif len(ranks) > 1:
        group = torch.distributed.group.WORLD
    size = (
        section.mics_shard_size
        if section is not None and section.mics_shard_size > 0
        else len(ranks)
    )
    over, index = _block(group, ranks, size)
    device = accelerator.current_device()
    offload = section.weights_offload if section is not None else None
    if offload is not None and remote is None and offload.device == "cpu":
        remote = "cpu"
        pin = pin or offload.pin_memory
    kept = store(accelerator) if store is not None else None
    shard_device = torch.device("cpu") if remote == "cpu" or kept is not None else device
    spec = ShardSpec(
        group=group if len(ranks) > 1 else None,
        ranks=tuple(ranks),
        over=over,
        block=size,
        index=index,
        device=device,
        shard_device=shard_device,
        # Where the device is the CPU itself there is nothing to copy to, so nothing to lock pages
        # for.
        pin=pin and kept is None and shard_device.type == "cpu" and device.type != "cpu",
        dtype=dtype,
        checks=section is not None and section.enable_sanity_checks,
        store=kept,
    )
    if kept is not None:
        weakref.finalize(spec, kept.close)  # when an engine has all weights; else at exit
    return spec


def _block(group: Any, ranks: list[int], size: int) -> tuple[Any, int]:
    """The group of this rank's block of `size` consecutive `ranks`, and its index there.

    Collective over the block.
    """
    if len(ranks) % size:
        good = ", ".join(str(d) for d in range(1, len(ranks) + 1) if len(ranks) % d == 0)
        raise ConfigError(
            f"zero_optimization.mics_shard_size: {size} does not divide the {len(ranks)} ranks of "
            "ds_zero.Init; "
            f"use {good}"
        )
    place = ranks.index(comm.rank())
    if size in (1, len(ranks)):
        return (group if size > 1 else None), place % size
    block = ranks[place - place % size :][:size]
    over = torch.distributed.new_group(block, use_local_synchronization=True)
    comm.open_transport(over)
    return over, place % size


class MiCS_Init(Init):
    """`Init` for MiCS: its config must set ``zero_optimization.mics_shard_size``."""

    _for_mics = True
