"""Checkpoints: a manifest and safetensors files, written aside and renamed; see
docs/checkpoint-format.md.

Nothing here pickles. Names load on first use, so importing this package loads no torch. Other
checkpointers and importers may use its parts: `ds_checkpoint.values` (values as JSON and tensors)
and `ds_checkpoint.collective_errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core import names_on_first_use

if TYPE_CHECKING:
    from ds_checkpoint.checkpointer import FolderCheckpointer
    from ds_checkpoint.export import clone_tensors_for_torch_save
    from ds_checkpoint.offline import (
        convert_zero_checkpoint_to_fp32_state_dict,
        export_weights,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
        open_saved,
        verify,
    )

__all__ = [
    "FolderCheckpointer",
    "clone_tensors_for_torch_save",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "export_weights",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "open_saved",
    "verify",
]

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "checkpointer": "FolderCheckpointer",
        "export": "clone_tensors_for_torch_save",
        "offline": (
            "convert_zero_checkpoint_to_fp32_state_dict export_weights "
            "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint "
            "open_saved verify"
        ),
    },
)
