"""ds-sparse-gradients: gradients of embeddings are reduced row by row, only the rows that a batch
has used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core import names_on_first_use

if TYPE_CHECKING:
    from ds_sparse_gradients.rows import RowTensor

__version__ = "0.1.0"
__all__ = ["RowTensor"]

__getattr__, __dir__ = names_on_first_use(__name__, {"rows": "RowTensor"})
