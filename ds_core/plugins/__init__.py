"""Plugins: what is installed, who takes part in a run, and the one way to ask them.

Names load on first use, so that a module of the core which asks nothing imports nothing.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
