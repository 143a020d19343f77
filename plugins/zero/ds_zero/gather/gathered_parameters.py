"""`GatheredParameters`, which unshards weights to be read or written, and what is built on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.errors import UsageError
from ds_core.process import STATE
from ds_zero.gather.external import register_external_parameter
from ds_zero.gather.weights import WeightHandle, handles_of
from ds_zero.init.sharded_param import untracked


class GatheredParameters:
    """Inside the context the parameters are unsharded on every rank.

    Collective: every rank enters and leaves.

    params: a parameter, an iterable of them (a mapping gives its values), or a module, which means
        all below it. Parameters that ZeRO does not partition are left alone.
    modifier_rank: None if they are only read; else the global rank whose values at the end become
        the weight on all ranks, master weights included. For a parameter that rank 0 does not share
        (an expert's), 0 means the first of its ranks.
    fwd_module: its forward will use the parameters, see `register_external_parameter`.
    enabled: False does nothing.

    Writes without a modifier_rank are lost, or an error under ``enable_sanity_checks``. After an
    exception nothing is written back. A backward after the context through operations that ran
    inside it, outside of modules, fails.

    Raises UsageError when contexts overlap, when a parameter has been moved to another device or
    shape inside, or when modifier_rank does not share a parameter.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        # What the caller named, ZeRO's or not.
        self._params = _flat(params) if enabled else []
        # The rank whose values count; None: the weights are only read.
        self._modifier = modifier_rank
        if (
            modifier_rank is not None
            and comm.is_initialized()
            and not 0 <= modifier_rank < comm.world_size()
        ):
            raise UsageError(
                f"modifier_rank {modifier_rank} is not a rank; this run has 0 to "
                f"{comm.world_size() - 1}"
            )
        # ZeRO's of the parameters, while the context is open.
        self._handles: list[WeightHandle] = []
        # Copies by which `enable_sanity_checks` finds writes that would be lost.
        self._before: dict[nn.Parameter, Tensor] = {}
        # A module gathers its own parameters anyway.
        if fwd_module is not None:
            own = set(fwd_module.parameters(recurse=False))
            for handle in handles_of(self._params):
                if handle.param not in own:
                    register_external_parameter(fwd_module, handle.param)

    @untracked
    def __enter__(self) -> None:
        handles = handles_of(self._params)
        # All are checked before the first is gathered, so that an error leaves nothing unsharded.
        for handle in handles:
            if handle.in_context:
                raise UsageError(
                    f"parameter {handle.name!r} is in an outer GatheredParameters already; "
                    "contexts must not overlap"
                )
            if self._modifier is not None:
                handle.source(self._modifier)
        self._handles = handles
        # `handles_of` sorts them, so all ranks gather in the same order.
        for handle in handles:
            handle.unshard()
            handle.in_context = True
            if self._modifier is None and handle.checks:
                self._before[handle.param] = handle.param.detach().clone()

    @untracked
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        handles, self._handles = self._handles, []
        # Compared before anything is resharded, which frees the values.
        written = [
            h
            for h in handles
            if h.param in self._before and not _same(h.param, self._before[h.param])
        ]
        for handle in handles:
            handle.in_context = False
        try:
            # After an exception the writes may be incomplete, so none is written back.
            for handle in handles:
                if self._modifier is not None and kind is None:
                    handle.write_back(handle.source(self._modifier))
        finally:
            # Where weights stay unsharded (stage 1, or a second user) the write would survive on
            # this rank alone. A parameter whose shape or device was changed cannot be restored.
            for handle in written:
                with contextlib.suppress(RuntimeError):
                    handle.param.copy_(self._before[handle.param])
            self._before.clear()
            for handle in handles:
                handle.reshard()
        if written and kind is None:
            raise UsageError(
                f"parameter {written[0].name!r} was written inside GatheredParameters without "
                "modifier_rank, so the write is dropped; name the rank whose value counts: "
                "GatheredParameters(..., modifier_rank=0)"
            )


def _flat(params: Any) -> list[Any]:
    # A tensor is an iterable too, of its rows; so it is asked for first.
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if isinstance(params, Mapping):
        params = params.values()
    if not isinstance(params, Iterable):
        raise UsageError(
            f"GatheredParameters takes parameters or a module, not {type(params).__name__}"
        )
    return list(params)


def _same(param: Tensor, before: Tensor) -> bool:
    if param.shape != before.shape or param.device != before.device:
        return False
    # NaN differs from itself, but a weight with NaN that nobody wrote to is the same.
    return torch.equal(torch.nan_to_num(param.detach()), torch.nan_to_num(before))


def is_zero_param(param: Any) -> bool:
    """Whether stage 3 (or `Init`) manages `param`.

    Then it has ``ds_id``, ``ds_shape`` and ``ds_tensor``.
    """
    return isinstance(param, Tensor) and hasattr(param, "ds_id")


def empty_partition_cache(engine: Any) -> None:
    """Release weights that `engine` has prefetched or kept for reuse.

    Does nothing in stages 0 to 2.
    """
    release = getattr(engine.partitioner, "release_idle", None)
    if release is not None:
        release()


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """Inside, all weights are unsharded and stage 3's hooks are off, for a generation loop.

    Collective; no gradients. Yields the module. Training may go on after the context.

    model: an engine or its module.
    """
    module: nn.Module = model if isinstance(model, nn.Module) else model.module
    with GatheredParameters(module), torch.no_grad(), contextlib.ExitStack() as stack:
        # All weights are unsharded, so hooks would have nothing to gather, for each token again.
        # `module` may be a part of an engine's model, or contain it.
        mine = set(module.modules())
        for engine in STATE.engines:
            pause = getattr(engine.partitioner, "without_hooks", None)
            if pause is not None and not mine.isdisjoint(engine.module.modules()):
                stack.enter_context(pause())
        yield module
