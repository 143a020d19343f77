"""DeepSpeed's names for random streams (`ds_run_state.random_streams`), on every accelerator."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from ds_run_state.random_streams import MODEL_PARALLEL, STREAMS, RandomStreams
from torch import Tensor

from ds_activation_checkpointing.deepspeed.checkpointing import present_mpu
from ds_core.accelerator import get_accelerator
from ds_core.process import STATE


class CudaRNGStatesTracker:
    """Named states of the random generators.

    streams: None: streams of its own, which checkpoints do not replay.
    """

    def __init__(self, streams: RandomStreams | None = None) -> None:
        self.streams = streams or RandomStreams()

    @property
    def states_(self) -> dict[str, Tensor]:
        """The states by name."""
        return self.streams.states()

    @property
    def seeds_(self) -> set[int]:
        """The seeds in use."""
        return self.streams.seeds

    def reset(self) -> None:
        """Forget all states."""
        self.streams.reset()

    def get_states(self) -> dict[str, Tensor]:
        """A copy of the states, by name."""
        return self.streams.states()

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Replace the states."""
        self.streams.set_states(states)

    def add(self, name: str, seed: int) -> None:
        """Add the state that `seed` gives.

        ValueError for a seed or a name that is there already.
        """
        self.streams.add(name, seed)

    def fork(self, name: str = MODEL_PARALLEL) -> contextlib.AbstractContextManager[None]:
        """Inside, random numbers come from the named state, which goes on; afterwards from the one
        before.
        """
        return self.streams.fork(name)


_TRACKER = CudaRNGStatesTracker(STREAMS)


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker of this process, whose states checkpoints replay and keep."""
    return _TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the generators, and the state ``model-parallel-rng`` by model-parallel rank.

    The rank is that of the mpu given to `configure`, else that along ``tp`` of the newest engine.
    """
    STREAMS.seed_model_parallel(seed, _model_parallel_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Begin the state ``model-parallel-rng`` anew, as after loading at another number of ranks;
    others go on.
    """
    STREAMS.reseed_model_parallel(seed, _model_parallel_rank())


def _set_cuda_rng_state(new_state: Tensor, device: int = -1) -> None:
    """Replace the state of the accelerator's generator."""
    get_accelerator().set_rng_state(new_state)


def _model_parallel_rank() -> int:
    mpu = present_mpu()
    getters = (
        getattr(mpu, f"get_{kind}_parallel_rank", None) for kind in ("tensor_model", "model")
    )
    index = next((int(getter()) for getter in getters if getter is not None), None)
    if index is None:
        meshes = (engine.ctx.mesh for engine in reversed(STATE.engines))
        index = next((mesh.index("tp") for mesh in meshes if mesh.has("tp")), 0)
    return index
