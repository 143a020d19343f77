"""Tensors on files: the state store ``nvme``, the section ``aio``, and `aio_handle` (names load on
first use).
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
