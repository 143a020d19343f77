"""Optimizers for ds_core, by name in the config or as classes.

Nothing heavy is imported here: classes load on first use (PEP 562). `plugin` declares the names,
`config` holds the models of ``optimizer.params``; `base` is what the optimizers on kernels share,
`onebit` the 1-bit family.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
