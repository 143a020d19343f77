"""The CPU keeps the contract, and its numbers are the operating system's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ds_testing.kits.devices.accelerator import AcceleratorConformance

from ds_core.accelerator import Accelerator, CpuAccelerator, HostEvent
from ds_core.setup.builtin import ds_accelerators


def _peak_can_be_reset() -> bool:
    """Not in every container, and a permission alone does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


class TestCpu(AcceleratorConformance):
    entry = tuple(ds_accelerators())[-1]
    resets_peak = _peak_can_be_reset()


def test_the_host_has_one_queue_and_a_device_without_index() -> None:
    cpu = CpuAccelerator()
    assert cpu.current_stream() is None
    assert isinstance(cpu.new_event(), HostEvent)
    assert str(cpu.device(0)) == str(torch.empty(1).device) == "cpu"
    assert cpu.communication_backend == "gloo"
    assert cpu.pin(tensor := torch.ones(1)) is tensor


def test_without_proc_the_numbers_still_make_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS: the peak comes from getrusage, and what is available is what this process did
    not take.
    """

    def refuse(self: Path, *arguments: object, **keywords: object) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(Path, "write_text", refuse)
    cpu = CpuAccelerator()
    cpu.reset_peak_memory_stats()
    assert cpu.max_memory_allocated() == cpu.memory_allocated() > 2**20
    assert cpu.available_memory() == cpu.total_memory() - cpu.memory_allocated()


def test_a_back_end_is_small() -> None:
    """What the contract leaves open: a guard against it growing without a thought for other
    people's back ends.
    """
    assert Accelerator.__abstractmethods__ == {
        "communication_backend",
        "current_index",
        "device_count",
        "get_rng_state",
        "manual_seed",
        "max_memory_allocated",
        "memory_allocated",
        "reset_peak_memory_stats",
        "set_device",
        "set_rng_state",
        "supports",
        "synchronize",
        "total_memory",
    }


def test_a_host_event_waits_for_the_device() -> None:
    drained = []
    HostEvent(lambda: drained.append(True)).record()
    assert drained == [True]
