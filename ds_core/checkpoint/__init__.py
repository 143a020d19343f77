"""Checkpoints: a manifest and safetensors files, written aside and renamed; see docs/checkpoint-format.md.

Nothing here pickles. Names load on first use, so importing this package loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core.lazy import names_on_first_use

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
    from ds_core.checkpoint.saving import close, save

__all__ = [
    "clone_tensors_for_torch_save",
    "close",
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

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "background": "wait",
        "export": "clone_tensors_for_torch_save save_16bit_model",
        "loading": "load",
        "offline": (
            "convert_zero_checkpoint_to_fp32_state_dict export_weights "
            "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint open_saved verify"
        ),
        "saving": "close save",
    },
)
