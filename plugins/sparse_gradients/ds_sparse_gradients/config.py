"""The model of the top-level key ``sparse_gradients``."""

from __future__ import annotations

from pydantic import ConfigDict, RootModel


class SparseGradients(RootModel[bool]):
    """Reduce gradients of embeddings row by row, only the rows that a batch has used."""

    model_config = ConfigDict(strict=True, frozen=True)
