"""Tensors on files: the state store ``nvme``, the section ``aio``, and `aio_handle` (names load on
first use).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core import names_on_first_use

if TYPE_CHECKING:
    from ds_nvme.files import DiskError
    from ds_nvme.handle import aio_handle
    from ds_nvme.store import NvmeStore

__all__ = ["DiskError", "NvmeStore", "aio_handle"]

__getattr__, __dir__ = names_on_first_use(
    __name__, {"files": "DiskError", "handle": "aio_handle", "store": "NvmeStore"}
)
