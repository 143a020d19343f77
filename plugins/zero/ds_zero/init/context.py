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
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from ds_core.errors import UsageError
from ds_zero.gather.module_hooks import install_hooks
from ds_zero.gather.on_access import GatherOnAccess
from ds_zero.gather.weights import owner_of
from ds_zero.init.arguments import (
    check_arguments,
    choose_config,
    choose_dtype,
    choose_group,
    choose_store,
    make_spec,
    read_config,
    warn_without_effect,
    zero_section,
)
from ds_zero.init.sharded_param import (
    ShardSpec,
    cast_param,
    fill_alias,
    shard_param,
    sharded_param_of,
)

log = logging.getLogger("ds_zero")

_INNERMOST: contextvars.ContextVar[Init | None] = contextvars.ContextVar(
    "ds_zero.Init", default=None
)


class Init:
    """Shard the parameters of each module built inside the context, right after its construction.

    What is sharded, and over which ranks:

    module: an existing model, which is sharded at once; no context is needed.
    data_parallel_group: the ranks to shard over, whose first rank's weights count; None: all ranks,
        or those of `mpu`.
    mpu: has ``get_data_parallel_group``.
    enabled: False does nothing.

    How shards are kept:

    remote_device: "cpu" keeps them in host memory, "nvme" on disk, as offload_param says.
    pin_memory: host memory is page-locked.
    dtype: of floating-point weights (float16, bfloat16, float32, float64); None: the config's, or
        as built.

    The config:

    config_dict_or_path: the run's config, for dtype, offload_param and override_module_apply. With
        a stage below 3 nothing is sharded, with ``mics_shard_size`` each shard group has all
        weights. Values that are still "auto" do not count.
    config: its deprecated name.

    Without effect, which is noted in the log: mem_efficient_linear, zero_param_parallel_group,
    zero_quantized_weights and zero_quantized_nontrainable_weights.

    Weights are bit-identical to plain construction with the first rank's random state. Modules on
    the meta device get values from their ``reset_parameters``; without that method they must be
    loaded or written before `initialize`.

    Collective: all ranks build the same modules in the same order. Starts torch.distributed if it
    is not running.

    Raises UsageError or ConfigError for arguments that are invalid, contradict each other or are
    not supported yet.
    """

    _for_mics = False
    """Whether the config must set ``mics_shard_size``."""

    # Over which ranks and where; made when the context opens, since that starts torch.distributed.
    _spec: ShardSpec | None = None
    # The `Init` around this one, which sees nothing until this one is closed.
    _outer: Init | None = None
    # The thread that opened the context: modules that others build are not affected.
    _thread = 0

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

        # -- What is under construction.

        # Modules with parameters that are to be sharded, in the order in which they were seen.
        self._pending: dict[nn.Module, None] = {}
        # What was sharded, and is cast when construction is over.
        self._sharded: list[nn.Parameter] = []

        # -- The open context.

        # Torch's handles of the registration hooks.
        self._handles: list[Any] = []
        self._on_access = GatherOnAccess()

        if not enabled:
            return
        check_arguments(remote_device, dtype)
        quantised = zero_quantized_weights or zero_quantized_nontrainable_weights
        source = choose_config(config_dict_or_path, config, quantised)
        warn_without_effect(mem_efficient_linear, zero_param_parallel_group)
        run, plugins = read_config(source)
        section = zero_section(run)
        if section.stage != 3:
            log.info("ds_zero.Init shards nothing: the config's ZeRO stage is %d", section.stage)
            self._enabled = False
            return
        self._check_mics(section.mics_shard_size)

        # -- How parameters are sharded.

        # Whether `module.apply` gathers.
        self._apply = section.override_module_apply
        # What `_spec` is made of.
        self._arguments = (
            choose_group(data_parallel_group, mpu),
            remote_device,
            pin_memory,
            choose_dtype(dtype, run, plugins),
            section,
            choose_store(remote_device, section, run, plugins),
        )
        if module is not None:
            self._convert(module)

    def _check_mics(self, shard_size: int) -> None:
        if self._for_mics and shard_size < 1:
            raise UsageError(
                "ds_zero.MiCS_Init: the config has no zero_optimization.mics_shard_size; give it "
                "with config_dict_or_path, or use ds_zero.Init"
            )

    # -- the context -------------------------------------------------------------------------------

    def __enter__(self) -> Init:
        if not self._enabled:
            return self
        if self._handles:
            raise UsageError("ds_zero.Init: this object is in use already; create another one")
        # An object that is used again keeps its ranks, and its store with what that has.
        self._spec = self._spec or make_spec(*self._arguments)
        self._thread = threading.get_ident()
        self._handles = [
            register_module_parameter_registration_hook(self._on_parameter),
            register_module_module_registration_hook(self._on_module),
        ]
        # A module is sharded by the innermost `Init` alone.
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
        # After an error modules may be half built on this rank, and not on others.
        try:
            if kind is None:
                self._finish(all_weights=True)
        finally:
            outer, self._outer = self._outer, None
            _INNERMOST.set(outer)
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            # A context opened inside a constructor ends before the constructor does.
            if outer is not None:
                outer._pending.update(self._pending)
            self._pending.clear()
            self._on_access.__exit__(kind or sys.exc_info()[0], error, trace)
            self._cast()

    # -- construction ------------------------------------------------------------------------------

    def _is_active(self) -> bool:
        """Whether this is the `Init` of a module that this thread is building."""
        return threading.get_ident() == self._thread and _INNERMOST.get() is self

    def _on_parameter(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        if not self._is_active():
            return
        if sharded_param_of(param) is None:
            fill_alias(param)
        self._finish()
        # Only now: the parameter is not in its place yet, so `_finish` would not find it.
        self._pending[module] = None

    def _on_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if not self._is_active():
            return
        # The child may have been built outside the context, and then is sharded as well.
        for part in child.modules() if child is not None else ():
            if any(_to_shard(p) for p in part._parameters.values()):
                self._pending[part] = None
        # A constructor may call `self.apply` before it ends, when `_shard` has not come to the
        # module.
        if self._apply:
            install_hooks(module, apply=True, engine=False)
        self._finish()

    def _finish(self, *, all_weights: bool = False) -> None:
        """Shard the modules that are not under construction any more."""
        running = _under_construction() if self._pending else set()
        done = [m for m in self._pending if id(m) not in running]
        # Removed first: what `_shard` calls (``reset_parameters``) may register parameters, and so
        # come here again.
        for module in done:
            del self._pending[module]
        for module in done:
            self._shard(module)
        self._on_access.release(all_weights=all_weights)

    def _shard(self, module: nn.Module) -> None:
        """Shard the module's own parameters."""
        assert self._spec is not None
        params = [p for p in module._parameters.values() if p is not None and _to_shard(p)]
        # ``reset_parameters`` sets all tensors of a module, so one without a value calls for it.
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
        self._spec = make_spec(*self._arguments)
        for part in module.modules():
            if any(p is not None and owner_of(p) is not None for p in part._parameters.values()):
                raise UsageError("ds_zero.Init: this module is already in an engine")
            self._shard(part)
        self._cast()


def _to_shard(param: nn.Parameter | None) -> bool:
    return param is not None and sharded_param_of(param) is None and not is_lazy(param)


def _under_construction() -> set[int]:
    """The ids of the objects whose ``__init__`` runs on this thread."""
    # The first argument of each frame's ``__init__`` is its object, whatever its name is.
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
    """Give a module on the meta device its values by ``reset_parameters``.

    Returns its own parameters, to be sharded. Those that it does not initialize (all, without such
    a method) stay without a value.
    """
    reset = getattr(module, "reset_parameters", None)
    params = [p for p in module._parameters.values() if p is not None and _to_shard(p)]
    if not callable(reset):
        return params
    # Memory filled with NaN shows afterwards which parameters were initialized.
    on_meta = [p for p in params if p.is_meta]
    for param in on_meta:
        fresh = nn.Parameter(
            torch.empty_like(param, device="cpu"), requires_grad=param.requires_grad
        )
        if fresh.is_floating_point():
            fresh.fill_(float("nan"))
        # The same object, since others (a tied module, say) may refer to it; with its attributes.
        fresh.__dict__.update(param.__dict__)
        torch.utils.swap_tensors(param, fresh)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
    reset()
    # Not initialized: back to the meta device, so that `initialize` finds that a value is missing.
    for param in on_meta:
        if param.is_floating_point() and bool(param.isnan().any()):
            torch.utils.swap_tensors(
                param, nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
            )
    return params


class MiCS_Init(Init):
    """`Init` for MiCS: its config must set ``zero_optimization.mics_shard_size``."""

    _for_mics = True
