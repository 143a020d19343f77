"""Sequence parallelism for ds_core: ranks along the mesh axis ``sp`` divide every sequence among
them.

Names load on first use, so importing this package loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core import names_on_first_use

if TYPE_CHECKING:
    from ds_sequence_parallel.autosp import prepare_autosp_inputs
    from ds_sequence_parallel.batches import UlyssesSPDataLoaderAdapter, cut_batches
    from ds_sequence_parallel.layout import Layout, cut, joined
    from ds_sequence_parallel.losses import CrossEntropy, cross_entropy, token_mean
    from ds_sequence_parallel.offload import Offload
    from ds_sequence_parallel.ring import RingAttention, ring_attention
    from ds_sequence_parallel.tiled import TileBytes, TiledFusedLogitsLoss, TiledMLP
    from ds_sequence_parallel.ulysses import DistributedAttention

__all__ = [
    "CrossEntropy",
    "DistributedAttention",
    "Layout",
    "Offload",
    "RingAttention",
    "TileBytes",
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "UlyssesSPDataLoaderAdapter",
    "cross_entropy",
    "cut",
    "cut_batches",
    "joined",
    "prepare_autosp_inputs",
    "ring_attention",
    "token_mean",
]

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "batches": "UlyssesSPDataLoaderAdapter cut_batches",
        "autosp": "prepare_autosp_inputs",
        "layout": "Layout cut joined",
        "losses": "CrossEntropy cross_entropy token_mean",
        "offload": "Offload",
        "ring": "RingAttention ring_attention",
        "tiled": "TileBytes TiledFusedLogitsLoss TiledMLP",
        "ulysses": "DistributedAttention",
    },
)
