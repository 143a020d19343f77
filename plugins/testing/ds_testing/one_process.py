"""An engine of one process for a kit's check, of which nothing is left afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def one_process_engine(model: nn.Module, config: Mapping[str, Any]) -> Iterator[Any]:
    """``ds_core.initialize`` of `model`; the engine is destroyed at the end, and so is a process
    group that it made.
    """
    import torch.distributed as dist

    import ds_core
    from ds_core.comm.start import reset

    had_group = dist.is_initialized()
    engine, *_ = ds_core.initialize(model=model, config=dict(config))
    try:
        yield engine
    finally:
        engine.destroy()
        if dist.is_initialized() and not had_group:
            reset()
