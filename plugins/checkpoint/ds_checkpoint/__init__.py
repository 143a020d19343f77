"""Checkpoints: a manifest and safetensors files, written aside and renamed.

The format is described in docs/checkpoint-format.md. Nothing here pickles. Names load on first use,
so importing this package loads no torch. Other checkpointers and importers may use its parts:
`ds_checkpoint.folder.values` (values as JSON and tensors) and `ds_checkpoint.collective_errors`.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
