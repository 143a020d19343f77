"""Checkpoints: a manifest and safetensors files, written aside and renamed; see docs/checkpoint-format.md.

Nothing here pickles. Names load on first use, so importing this package loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_core.checkpoint.background import wait
    from ds_core.checkpoint.export import clone_tensors_for_torch_save, save_16bit_model
    from ds_core.checkpoint.loading import load
    from ds_core.checkpoint.offline import (
        convert_zero_checkpoint_to_fp32_state_dict,
        export_weights,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
        open_saved,
        verify,
    )
    from ds_core.checkpoint.saving import save

__all__ = [
    "clone_tensors_for_torch_save",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "export_weights",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load",
    "load_state_dict_from_zero_checkpoint",
    "open_saved",
    "save",
    "save_16bit_model",
    "verify",
    "wait",
]

_HOME = {
    "clone_tensors_for_torch_save": "export",
    "convert_zero_checkpoint_to_fp32_state_dict": "offline",
    "export_weights": "offline",
    "get_fp32_state_dict_from_zero_checkpoint": "offline",
    "load_state_dict_from_zero_checkpoint": "offline",
    "open_saved": "offline",
    "verify": "offline",
    "load": "loading",
    "save": "saving",
    "save_16bit_model": "export",
    "wait": "background",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
