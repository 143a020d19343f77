"""The weights and optimizer states of an engine as DTensors, for torch's own tools.

Names load on first use, so importing this package loads no torch.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
