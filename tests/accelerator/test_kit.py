"""The kit notices back ends that break the contract: each of these is the CPU with one thing
wrong."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from ds_testing import AcceleratorConformance
from torch import Tensor

from ds_core.accelerator import CpuAccelerator, HostEvent
from ds_core.entries import AcceleratorEntry


def one_state(self: Any) -> Tensor:
    """Valid, but always the same."""
    return torch.Generator().manual_seed(0).get_state()


class StuckEvent(HostEvent):
    def query(self) -> bool:
        return False


class BackwardEvent(HostEvent):
    def elapsed_time(self, later: HostEvent) -> float:
        return -super().elapsed_time(later)


# (the kit's test, what is wrong: the member and what it is instead)
WRONG: tuple[tuple[str, str, Any], ...] = (
    ("entry", "name", "another"),
    ("description", "name", ""),
    ("description", "name", " padded"),
    ("every_device_can_be_made_current", "current_index", lambda self: 1),
    ("every_device_can_be_made_current", "device", lambda self, index=None: torch.device("meta")),
    ("devices_that_are_not_there", "set_device", lambda self, index: None),
    ("local_rank_chooses_the_device", "local_index", lambda self, local_rank: 1),
    ("streams_are_all_there_or_none", "new_stream", lambda self: object()),
    ("events_can_be_waited_for", "new_event", lambda self, timing: StuckEvent(self.synchronize)),
    ("events_can_be_waited_for", "new_event", lambda self, timing: BackwardEvent(self.synchronize)),
    ("memory_counters", "memory_allocated", lambda self: 1.5),
    ("memory_counters", "available_memory", lambda self: 2**60),
    ("memory_counters", "max_memory_allocated", lambda self: 0),
    ("memory_follows_a_tensor", "memory_allocated", lambda self: 0),
    ("memory_follows_a_tensor", "max_memory_allocated", lambda self: self.memory_allocated()),
    ("pinned_memory", "pin", lambda self, tensor: tensor.clone()),
    ("seeding", "manual_seed", lambda self, seed: None),
    ("seeding", "manual_seed", lambda self, seed: torch.manual_seed(0)),
    ("random_state_comes_back", "get_rng_state", one_state),
    ("random_state_comes_back", "set_rng_state", lambda self, state: None),
    ("supported_dtypes_compute", "supports", lambda self, dtype: False),
    ("autocast", "autocast", lambda self, dtype, enabled=True: contextlib.nullcontext()),
    ("the_backend_carries_its_tensors", "communication_backend", "pigeons"),
)


@pytest.mark.parametrize(
    ("test", "member", "instead"), WRONG, ids=[f"{t}-{m}" for t, m, _ in WRONG]
)
def test_a_fault_is_noticed(
    test: str, member: str, instead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = type("Broken", (CpuAccelerator,), {member: instead})()

    class Kit(AcceleratorConformance):
        entry = AcceleratorEntry("cpu", "cpu", "ds_core.accelerator:CpuAccelerator")

        def accelerator_factory(self) -> CpuAccelerator:
            made: CpuAccelerator = broken
            return made

    check = getattr(Kit(), f"test_{test}")
    wanted = {"accelerator": broken, "monkeypatch": monkeypatch}
    names = check.__code__.co_varnames[1 : check.__code__.co_argcount]
    state = torch.get_rng_state()
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(**{name: wanted[name] for name in names})
    torch.set_rng_state(state)


def test_an_entry_that_says_it_cannot_be_used_is_noticed() -> None:
    class Kit(AcceleratorConformance):
        entry = AcceleratorEntry(
            "cpu", "cpu", "ds_core.accelerator:CpuAccelerator", lambda: "unplugged"
        )

    with pytest.raises(AssertionError, match="unplugged"):
        Kit().test_entry()


def test_a_kit_that_was_told_nothing_says_what_it_needs() -> None:
    class Kit(AcceleratorConformance):
        pass

    with pytest.raises(NotImplementedError, match="Kit needs an entry or an accelerator_factory"):
        Kit().accelerator_factory()
