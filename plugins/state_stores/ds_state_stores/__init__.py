"""Where a partitioner keeps optimizer states and weights that it does not need now.

`StateStore` is the contract, `HostStore` the store ``cpu``; `check_store` and `open_store` find a
store by its name. `HostCopies` copies tensors that wait for backward to the host and back, beside
the device's other work. Names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core import names_on_first_use

if TYPE_CHECKING:
    from ds_state_stores.host_copies import HostCopies, HostCopy
    from ds_state_stores.stores import (
        HostStore,
        StateStore,
        check_store,
        is_evicted,
        open_store,
        owns_storage,
    )

__all__ = [
    "HostCopies",
    "HostCopy",
    "HostStore",
    "StateStore",
    "check_store",
    "is_evicted",
    "open_store",
    "owns_storage",
]

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "host_copies": "HostCopies HostCopy",
        "stores": "HostStore StateStore check_store is_evicted open_store owns_storage",
    },
)
