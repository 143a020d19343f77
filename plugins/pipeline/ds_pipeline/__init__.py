"""Pipeline parallelism for ds_core.

Names load on first use, so that importing the package brings in no torch.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
