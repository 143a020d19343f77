"""Who owns which parameters, gradients and optimizer states, and how the owner updates them.

Names load on first use.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
