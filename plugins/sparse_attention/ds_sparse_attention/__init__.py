"""Block-sparse attention for ds_core: the section ``sparse_attention``, and a module for models of
one's own.

Names load on first use, so importing this package loads no torch.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
