"""What this distribution offers to ds_core: the key ``sparse_gradients`` and its partitioner
(torch-free).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ds_core.config import Trait
from ds_core.errors import Problem

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.partition import Partitioner


def ds_config() -> type[BaseModel]:
    """The model of ``sparse_gradients``."""
    from ds_sparse_gradients.config import SparseGradients

    return SparseGradients


def ds_check(config: RunConfig) -> Iterable[Problem]:
    """ZeRO cuts gradients into flat shards, which have no rows."""
    if not _is_on(config) or not config.has(Trait.PARTITIONS_STATES):
        return []
    why = "does not go with zero_optimization.stage 1 to 3: their shards of gradients have no rows"
    return [
        Problem(
            "sparse_gradients",
            why,
            "set zero_optimization.stage to 0, or leave sparse_gradients out",
        )
    ]


def ds_partitioner(ctx: Context) -> Partitioner | None:
    """Data parallelism that reduces gradients of embeddings by rows."""
    if not _is_on(ctx.config):
        return None
    from ds_sparse_gradients.partitioner import ReducedByRows

    return ReducedByRows(ctx)


def _is_on(config: RunConfig) -> bool:
    from ds_sparse_gradients.config import SparseGradients

    section = config.section(SparseGradients)
    return section is not None and section.root
