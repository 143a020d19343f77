"""Sequence parallelism for ds_core: ranks along the mesh axis ``sp`` divide every sequence among
them.

Names load on first use, so importing this package loads no torch.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
