"""Named random streams: states of the random generators that code switches to by name, and later
goes on with.

Ranks that hold parts of one layer need other random numbers than what they compute alike, so both
have streams. A stream is the state of torch's CPU generator and, where there is one, of the
accelerator's: some kernels on a device draw their seed on the host. Checkpoints keep the streams of
the process, `STREAMS`, with the other random states.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ds_core.accelerator import get_accelerator
from ds_core.context import StashKey
from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_core.accelerator import Accelerator

log = logging.getLogger("ds_run_state")

MODEL_PARALLEL = "model-parallel-rng"
"""The stream that differs along ``tp``, for what a rank computes of its part of a layer."""
_OFFSET = 2718  # from the seed of the run to those of model-parallel ranks


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All random states at one moment.

    current: that of the generators.
    inside: the stream that is being used.
    own: what the generators go on with when no stream is used any more.
    """

    current: Tensor
    states: Mapping[str, Tensor]
    inside: str | None
    own: Tensor | None


class RandomStreams:
    """Random states by name, of the CPU and one accelerator.

    accelerator: None: the one of the process.
    """

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self._given = accelerator
        self._host = torch.get_rng_state().numel()
        self.reset()

    def reset(self) -> None:
        """Forget all streams."""
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()
        self._inside: str | None = None
        self._own: Tensor | None = None

    def add(self, name: str, seed: int) -> None:
        """Add the stream that `seed` begins. ValueError for a seed or a name that is in use."""
        if seed in self._seeds or name in self._states:
            raise ValueError(
                f"random state {name!r} with seed {seed}: the seed or the name is in use; choose "
                "another"
            )
        state = torch.Generator().manual_seed(seed).get_state()
        device = self._device
        if device.device_type != "cpu":
            before = device.get_rng_state()
            device.manual_seed(seed)
            state = torch.cat([state, device.get_rng_state()])
            device.set_rng_state(before)
        self._states[name] = state
        self._seeds.add(seed)

    def begin(self, name: str, seed: int) -> None:
        """As `add`, but a stream of that name is replaced."""
        self._states.pop(name, None)
        self._seeds.discard(seed)
        self.add(name, seed)

    def seed_model_parallel(self, seed: int, index: int) -> None:
        """Seed the generators with `seed`, forget all streams, and begin `MODEL_PARALLEL` with a
        seed of its own.

        index: the place of this rank among those that share the model's layers (along ``tp``).
        """
        torch.manual_seed(seed)
        self._device.manual_seed(seed)
        self.reset()
        self.add(MODEL_PARALLEL, seed + _OFFSET + index)

    def reseed_model_parallel(self, seed: int, index: int) -> None:
        """Begin `MODEL_PARALLEL` as `seed_model_parallel` does; all else goes on.

        UsageError while it is in use.
        """
        if self._inside == MODEL_PARALLEL:
            raise UsageError(
                f"the random state {MODEL_PARALLEL!r} is in use; seed it again outside of its fork"
            )
        self.begin(MODEL_PARALLEL, seed + _OFFSET + index)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Inside, random numbers come from the stream `name`, which goes on; afterwards from the
        one before.

        ValueError for a name that was not added. Forks nest; a stream goes on where it was left,
        whoever uses it.
        """
        before = self._inside
        self.switch(name)
        try:
            yield
        finally:
            self.switch(before)

    def switch(self, name: str | None) -> None:
        """Draw from the stream `name` from now on; None: from the generators' own.

        ValueError as `fork`.
        """
        if name is not None and name not in self._states:
            raise ValueError(
                f"there is no random state {name!r}; add it first, known: "
                f"{', '.join(self._states) or 'none'}"
            )
        if name == self._inside:
            return
        left = self._read()
        if self._inside is None:
            self._own = left
        else:
            self._states[self._inside] = left
        state = self._own if name is None else self._states[name]
        assert state is not None  # kept when the first stream was switched to
        self._write(state)
        self._inside = name

    @property
    def inside(self) -> str | None:
        """The stream that random numbers come from; None: from the generators' own."""
        return self._inside

    # -- all states --------------------------------------------------------------------------------

    @property
    def seeds(self) -> set[int]:
        """The seeds that were given to `add`."""
        return set(self._seeds)

    def states(self) -> dict[str, Tensor]:
        """The streams by name: 1-d uint8 tensors, the CPU generator's state and then the
        accelerator's.
        """
        return dict(self._states)

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Replace all streams by what `states` gave."""
        self._states = dict(states)

    def snapshot(self) -> Snapshot:
        """All random states as they are now, those of the generators too."""
        return Snapshot(self._read(), dict(self._states), self._inside, self._own)

    @contextlib.contextmanager
    def replay(self, snapshot: Snapshot) -> Iterator[None]:
        """Inside, all random states begin as in `snapshot`; afterwards they are as before."""
        now = self.snapshot()
        self.go_on_from(snapshot)
        try:
            yield
        finally:
            self.go_on_from(now)

    def go_on_from(self, snapshot: Snapshot) -> None:
        """Make all random states what they were in `snapshot`."""
        self._write(snapshot.current)
        self._states = dict(snapshot.states)
        self._inside = snapshot.inside
        self._own = snapshot.own

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "device": self._device.device_type,
            "states": self.states(),
            "seeds": sorted(self._seeds),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the saved streams; those that only this run has stay.

        Another kind of device: all stay.
        """
        if state["device"] != self._device.device_type:
            log.warning(
                "the checkpoint has random streams of %s: those of %s start from the seed",
                state["device"],
                self._device.device_type,
            )
            return
        self._states |= state["states"]
        self._seeds |= set(state["seeds"])

    # -- the generators ----------------------------------------------------------------------------

    @property
    def _device(self) -> Accelerator:
        return self._given or get_accelerator()

    def _read(self) -> Tensor:
        host = torch.get_rng_state()
        device = self._device
        return host if device.device_type == "cpu" else torch.cat([host, device.get_rng_state()])

    def _write(self, state: Tensor) -> None:
        # torch 2.13 crashes on a view that begins later
        torch.set_rng_state(state[: self._host].clone())
        if self._device.device_type != "cpu":
            self._device.set_rng_state(state[self._host :].clone())


STREAMS = RandomStreams()
"""The streams of this process."""


class RandomSource(Protocol):
    """What random numbers of a model depend on beside the generators: forwards that are counted."""

    def state(self) -> Any:
        """What the next forward, or the running one, draws by."""

    def go_on_from(self, state: Any) -> None:
        """Let the next forward draw by what `state` gave, in the same optimizer step."""

    def stand_for(self, micro: int, index: int, parts: int) -> None:
        """The next forward is that of a micro-batch of the step, as one of `parts` data-parallel
        ranks has it, that of `index`.
        """


SOURCES: StashKey[list[RandomSource]] = StashKey("random sources beside the generators")
"""Those of an engine, for whoever runs a forward again."""
