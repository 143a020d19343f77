"""What this distribution offers to ds_core: the section ``sparse_attention`` and its transform
(torch-free).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ds_core.entries import Phase, Transform

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.context import Context


def ds_config() -> type[BaseModel]:
    """The section ``sparse_attention``."""
    from ds_sparse_attention.config import SparseAttentionConfig

    return SparseAttentionConfig


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """Attention of the model looks at the blocks of the pattern only."""

    def make_sparse(model):  # type: ignore[no-untyped-def]
        from ds_sparse_attention.transform import make_sparse

        return make_sparse(model, ctx)

    return [Transform(Phase.SUBSTITUTE, make_sparse)]
