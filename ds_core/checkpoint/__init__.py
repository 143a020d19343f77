"""Checkpoints: a manifest and safetensors files, written aside and renamed; see docs/checkpoint-format.md.

Nothing here pickles. Names load on first use, so importing this package loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_core.checkpoint.export import clone_tensors_for_torch_save, save_16bit_model
    from ds_core.checkpoint.load import load
    from ds_core.checkpoint.save import save

_WHERE = {"clone_tensors_for_torch_save": "export", "load": "load", "save": "save", "save_16bit_model": "export"}

__all__ = ["clone_tensors_for_torch_save", "load", "save", "save_16bit_model"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Not kept in globals(): the submodules `load` and `save` share their functions' names, and importing a submodule
    # puts the module there. The functions are put back over it at every look-up that gets here, and right below.
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
