"""The CPU passes the kit that every accelerator must pass."""

from __future__ import annotations

from ds_core.accelerator.cpu import CpuAccelerator
from ds_core.testing.accelerator import AcceleratorConformance


class TestCpu(AcceleratorConformance):
    def make_accelerator(self):
        return CpuAccelerator()


def test_memory_of_the_host_is_read_from_the_system():
    cpu = CpuAccelerator()
    assert cpu.total_memory() > 2**28
    assert cpu.available_memory() <= cpu.total_memory()
