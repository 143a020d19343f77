"""Where a partitioner keeps optimizer states and weights that it does not need now.

`StateStore` is the contract, `HostStore` the store ``cpu``; `check_store` and `open_store` find a
store by its name. `HostCopies` copies tensors that wait for backward to the host and back, beside
the device's other work. Names load on first use.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
