"""Optimizers of other packages, and what their arithmetic needs whole: ``measure_grain(make)``.

Names load on first use.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
