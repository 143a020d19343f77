"""Tensor parallelism: layers whose weights are divided over the ranks along ``tp``.

With the section ``tensor_parallel`` models of transformers are divided without a changed line;
models of one's own are written with the layers of this package. Names load on first use, so that
this package loads no torch when imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core import names_on_first_use

if TYPE_CHECKING:
    from ds_tensor_parallel.cross_entropy import parallel_cross_entropy
    from ds_tensor_parallel.embedding import HiddenParallelEmbedding, VocabParallelEmbedding
    from ds_tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "HiddenParallelEmbedding",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "parallel_cross_entropy",
]

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "cross_entropy": "parallel_cross_entropy",
        "embedding": "HiddenParallelEmbedding VocabParallelEmbedding",
        "layers": "ColumnParallelLinear RowParallelLinear",
    },
)
