"""Activation checkpointing for ds_core: activations are computed again in backward instead of being
kept.

By config with the section ``activation_checkpointing``, by hand with `checkpoint`. `configure` and
its kin have the names and the meaning of ``deepspeed.checkpointing``. Names load on first use, so
importing this package loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core import names_on_first_use

if TYPE_CHECKING:
    from ds_activation_checkpointing.checkpointing import (
        CheckpointFunction,
        checkpoint,
        configure,
        is_configured,
        non_reentrant_checkpoint,
        reset,
    )
    from ds_activation_checkpointing.random_tracker import (
        CudaRNGStatesTracker,
        get_cuda_rng_tracker,
        model_parallel_cuda_manual_seed,
    )

__all__ = [
    "CheckpointFunction",
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "reset",
]

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "checkpointing": "CheckpointFunction checkpoint configure is_configured "
        "non_reentrant_checkpoint reset",
        "random_tracker": "CudaRNGStatesTracker get_cuda_rng_tracker "
        "model_parallel_cuda_manual_seed",
    },
)
