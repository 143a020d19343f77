"""Moving checkpoints between DeepSpeed and ds_core.

`import_checkpoint` makes a checkpoint of dscore-checkpoint out of DeepSpeed's, of safetensors or of
torch state dicts. Nothing is unpickled: torch's weights-only loader reads tensors and plain values.
`export_deepspeed` and `export_universal` write DeepSpeed's own forms. Names load on first use, so
importing this package loads no torch.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
