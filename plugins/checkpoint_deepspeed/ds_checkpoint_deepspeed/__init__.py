"""Moving checkpoints between DeepSpeed and ds_core.

`import_checkpoint` makes a checkpoint of ds-checkpoint out of DeepSpeed's, of safetensors or of
torch state dicts. Nothing is unpickled: torch's weights-only loader reads tensors and plain values.
`export_deepspeed` and `export_universal` write DeepSpeed's own forms. Names load on first use, so
importing this package loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core import names_on_first_use

if TYPE_CHECKING:
    from ds_checkpoint_deepspeed.exporting import export_deepspeed, export_universal
    from ds_checkpoint_deepspeed.importing import import_checkpoint

__all__ = ["export_deepspeed", "export_universal", "import_checkpoint"]

__getattr__, __dir__ = names_on_first_use(
    __name__, {"importing": "import_checkpoint", "exporting": "export_deepspeed export_universal"}
)
