"""Inference: trained models answer, through programs of dscore-inference-kit where their family is
known.

Names load on first use, so that this package loads no torch when imported.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
