"""Random numbers that do not depend on the layout: ``with named_draws(model): model.apply(f)``.

Names load on first use.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
