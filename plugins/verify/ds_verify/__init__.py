"""Whether a run computes what one process computes: ``dscore verify``, and `compare` for notebooks.

Names load on first use.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
