"""Gradients between backward and step: hooks on parameters, accumulation, buckets, their reduction.

Names load on first use.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
