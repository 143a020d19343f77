from ds_activation_checkpointing.deepspeed.checkpointing import (
    CheckpointFunction as CheckpointFunction,
)
from ds_activation_checkpointing.deepspeed.checkpointing import checkpoint as checkpoint
from ds_activation_checkpointing.deepspeed.checkpointing import configure as configure
from ds_activation_checkpointing.deepspeed.checkpointing import is_configured as is_configured
from ds_activation_checkpointing.deepspeed.checkpointing import (
    non_reentrant_checkpoint as non_reentrant_checkpoint,
)
from ds_activation_checkpointing.deepspeed.checkpointing import reset as reset
from ds_activation_checkpointing.deepspeed.random_tracker import (
    CudaRNGStatesTracker as CudaRNGStatesTracker,
)
from ds_activation_checkpointing.deepspeed.random_tracker import (
    get_cuda_rng_tracker as get_cuda_rng_tracker,
)
from ds_activation_checkpointing.deepspeed.random_tracker import (
    model_parallel_cuda_manual_seed as model_parallel_cuda_manual_seed,
)
