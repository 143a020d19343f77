"""Block-sparse attention for ds_core: the section ``sparse_attention``, and a module for models of
one's own.

Names load on first use, so importing this package loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core import names_on_first_use

if TYPE_CHECKING:
    from ds_sparse_attention.attention import SparseAttention, SparseSelfAttention
    from ds_sparse_attention.config import SparseAttentionConfig
    from ds_sparse_attention.layouts import make_layout

__all__ = ["SparseAttention", "SparseAttentionConfig", "SparseSelfAttention", "make_layout"]

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "attention": "SparseAttention SparseSelfAttention",
        "config": "SparseAttentionConfig",
        "layouts": "make_layout",
    },
)
