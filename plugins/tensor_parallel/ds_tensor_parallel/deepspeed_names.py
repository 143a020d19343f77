"""DeepSpeed's functions, with its names and arguments, for scripts that were written for it.

A model records what it asks for in ``ds_sections``, which `ds_core.initialize` merges with the
config: what the config leaves out is filled in, and another value there is a ConfigError that names
the key.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from ds_run_state.changes import gather_slices, reshape
from ds_run_state.slices import SLICES, Slice
from torch import Tensor, nn

from ds_core.config import read_config
from ds_core.errors import UsageError
from ds_core.process import STATE, log_once
from ds_tensor_parallel.planning.autotp_config import AutoTPConfig

log = logging.getLogger("ds_tensor_parallel")

_WHOLE = Slice((), (), ())
_MODES = {torch.float32: None, torch.float16: "fp16", torch.bfloat16: "bf16"}


def set_autotp_mode(training: bool = False) -> None:
    """``training=True`` has no effect: models are divided for training.

    False, for inference, is a UsageError.
    """
    if not training:
        raise UsageError(
            "set_autotp_mode(training=False): init_inference divides by itself; leave the call out"
        )
    log_once(
        log,
        logging.INFO,
        "set_autotp_mode(training=True) has no effect: initialize divides models for training",
    )


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype | None,
    config: Mapping[str, Any] | None = None,
    *,
    tp_group: None = None,
) -> nn.Module:
    """Record in `model` that `initialize` divides it over `tp_size` ranks and trains in `dtype`;
    returns the model.

    The weights are converted to `dtype` now: fp32, or that of ``fp16`` or ``bf16``, which it
    switches on; None records nothing.

    config: other keys of the section ``tensor_parallel``, or an `AutoTPConfig`, which is its
        ``partition_config``.
    tp_group: use ``initialize(mpu=...)``.
    """
    if tp_group is not None:
        raise UsageError(
            "tp_model_init: the mesh makes the groups, leave tp_group out; initialize(mpu=...) "
            "takes yours"
        )
    if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1:
        raise UsageError(
            f"tp_model_init: tp_size is {tp_size!r}; give the number of ranks that divide each "
            "layer"
        )
    if dtype is not None and dtype not in _MODES:
        raise UsageError(
            f"tp_model_init: dtype is {dtype}; training knows torch.float32, torch.float16, "
            "torch.bfloat16"
        )
    given = read_config(
        {"partition_config": config} if isinstance(config, AutoTPConfig) else config or {}
    ).raw
    if given.get("autotp_size", tp_size) != tp_size:
        raise UsageError(
            f"tp_model_init: tp_size is {tp_size}, and autotp_size in its config "
            f"{given['autotp_size']}; give one of them"
        )
    # Recorded on the model, as initialize has not been called yet.
    asked: dict[str, dict[str, Any]] = {"tensor_parallel": {**given, "autotp_size": tp_size}}
    if tp_size > 1:
        asked["tensor_parallel"]["enabled"] = True
    if dtype is not None:
        asked |= {
            mode: {"enabled": mode == _MODES[dtype]} for mode in _MODES.values() if mode is not None
        }
    _record(model, asked)
    return model if dtype is None else model.to(dtype)


def _record(model: nn.Module, asked: Mapping[str, Mapping[str, Any]]) -> None:
    """Add to what `model` asks for. UsageError where it asked for something else before."""
    if isinstance(getattr(type(model), "ds_sections", None), property):
        why = f"{type(model).__name__} works out by itself what it asks of the config"
        raise UsageError(
            f"tp_model_init: {why}; set tensor_parallel.autotp_size in the config instead"
        )
    known: dict[str, dict[str, Any]] = {
        k: dict(v) for k, v in getattr(model, "ds_sections", {}).items()
    }
    for section, keys in asked.items():
        before = known.setdefault(section, {})
        for key, value in keys.items():
            if before.setdefault(key, value) != value:
                found = f"{section}.{key} would be {value!r}, and was recorded as {before[key]!r}"
                raise UsageError(f"tp_model_init: {found}; call it once")
    model.ds_sections = known  # type: ignore[assignment]


class GatherReplacedLayerParams:
    """Inside, the parameters that tensor parallelism divided are whole; what is written into them
    then stays.

    Collective along the axis ``tp``. Parameters that are not divided, and those of no live engine,
    are as they are.

    params: one or several.
    module: whose they are.
    """

    def __init__(
        self, params: Iterable[nn.Parameter] | nn.Parameter, module: nn.Module, enabled: bool = True
    ) -> None:
        self.module = module
        self.params = [params] if isinstance(params, Tensor) else list(params)
        self.enabled = enabled
        self._open: list[dict[nn.Parameter, Slice]] = []

    def __enter__(self) -> None:
        # A parameter may belong to any live engine; only those that are cut along tp alone can be
        # gathered here.
        wanted = set(self.params) if self.enabled else set()
        for engine in STATE.engines if wanted else ():
            model = engine.ctx.module
            assert model is not None
            slices = engine.ctx.stash.get(SLICES) or {}
            named = {name: param for name, param in model.named_parameters() if param in wanted}
            pieces = {
                param: slices[name]
                for name, param in named.items()
                if slices.get(name, _WHOLE).axes == ("tp",)
            }
            if pieces:
                gather_slices(pieces, engine.ctx.mesh, "tp")
                self._open.append(pieces)

    def __exit__(self, *_: object) -> None:
        for pieces in self._open:
            for param, piece in pieces.items():
                # Whatever was written stays: each rank cuts its part from the full tensor.
                reshape(param, piece.take(param.data).clone())
        self._open.clear()
