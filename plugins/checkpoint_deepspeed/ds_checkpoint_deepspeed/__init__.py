"""Reading checkpoints of DeepSpeed, safetensors and torch state dicts, to go on with them in ds_core.

`import_checkpoint` makes a checkpoint of ds-checkpoint out of them. Nothing is unpickled: torch's weights-only loader
reads tensors and plain values. Names load on first use, so importing this package loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core import names_on_first_use

if TYPE_CHECKING:
    from ds_checkpoint_deepspeed.importing import import_checkpoint

__all__ = ["import_checkpoint"]

__getattr__, __dir__ = names_on_first_use(__name__, {"importing": "import_checkpoint"})
