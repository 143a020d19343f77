"""ZeRO for ds_core: model states partitioned over the ranks that would hold the same ones.

``import ds_zero`` loads no torch; names load on first use (PEP 562).
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
