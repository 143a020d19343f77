"""``deepspeed.checkpointing``: recomputation by torch's checkpoint, with named random states that are replayed too.

Only what torch does is served: partitioned, contiguous and host-memory activations are errors in `configure`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor

from ds_core.accelerator import get_accelerator
from ds_deepspeed_compat.missing import NotBuiltError

__all__ = [
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "reset",
]

MODEL_PARALLEL = "model-parallel-rng"
_OFFSET = 2718  # of the model-parallel seeds, as documented
_settings: dict[str, Any] = {}  # what `configure` was given; empty before


class CudaRNGStatesTracker:
    """Named states of the device's random generator."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all states."""
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, Tensor]:
        """A copy of the states, by name."""
        return dict(self.states_)

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Replace the states."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add the state that `seed` gives. ValueError for a seed or a name that is there already."""
        if seed in self.seeds_ or name in self.states_:
            raise ValueError(f"random state {name!r} with seed {seed}: the seed or the name is in use; choose another")
        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.states_[name] = device.get_rng_state()
        self.seeds_.add(seed)
        device.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Inside, random numbers come from the named state, which goes on; afterwards from the one before."""
        if name not in self.states_:
            raise ValueError(
                f"there is no random state {name!r}; add it first, known: {', '.join(self.states_) or 'none'}"
            )
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(before)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker of this process."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device, and the state ``model-parallel-rng`` with another seed on each model-parallel rank."""
    mpu = _settings.get("mpu")
    getters = (getattr(mpu, f"get_{kind}_parallel_rank", None) for kind in ("tensor_model", "model"))
    rank = next((int(getter()) for getter in getters if getter is not None), 0)
    get_accelerator().manual_seed(seed)
    _tracker.reset()
    _tracker.add(MODEL_PARALLEL, seed + _OFFSET + rank)


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Choose how `checkpoint` keeps activations. Arguments win over the section ``activation_checkpointing``.

    mpu_: a model-parallel unit, for `model_parallel_cuda_manual_seed`. num_checkpoints: of no use without contiguous
    memory. The others are errors when they are true: torch keeps the inputs of each block where they are.
    """
    section = _section(deepspeed_config)
    wanted = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    on = [name for name, value in wanted.items() if (section.get(name) if value is None else value)]
    if on:
        raise NotBuiltError(
            f"activation_checkpointing: {', '.join(on)}: not built; torch's checkpoint recomputes each block without"
        )
    _settings.update(mpu=mpu_, configured=True)


def _section(config: Any) -> Mapping[str, Any]:
    if isinstance(config, str):
        with open(config, encoding="utf-8") as stream:
            config = json.load(stream)
    found = config.get("activation_checkpointing") if isinstance(config, Mapping) else None
    return found or {}


def is_configured() -> bool:
    """Whether `configure` was called."""
    return bool(_settings.get("configured"))


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, whose activations are recomputed in backward with the same random numbers."""
    states = _tracker.get_states()
    return torch_checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), _replayed(states))
    )


non_reentrant_checkpoint = checkpoint


@contextlib.contextmanager
def _replayed(states: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the named random states are those of the forward."""
    now = _tracker.get_states()
    _tracker.set_states(states)
    try:
        yield
    finally:
        _tracker.set_states(now)


def reset() -> None:
    """Nothing is kept between blocks, so there is nothing to clear."""
