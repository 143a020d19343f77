"""Copies to the host on a device whose side streams run as late as events allow: what is not waited
for is stale.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from ds_state_stores.host_copies import HostCopies
from ds_testing.kits.devices.late_device import LateDevice
from torch import Tensor

from ds_core.accelerator import CpuAccelerator


class Copies(HostCopies):
    """Treats tensors of the CPU as a device's."""

    def stays(self, tensor: Tensor) -> bool:
        return False


def test_values_layouts_and_memory() -> None:
    copies = Copies(LateDevice())
    shapes = [
        torch.randn(3, 4),
        torch.randn(5, 2).t(),
        torch.randn(4, 6)[:, ::2],
        torch.randn(3, 1).expand(3, 4),
    ]
    shapes += [
        torch.arange(6).view(1, 2, 3).permute(2, 0, 1),
        torch.randn(7, dtype=torch.bfloat16),
        torch.tensor(2.0),
    ]
    for _ in range(3):
        wanted = [t.clone() for t in shapes]
        made = [copies.out(t) for t in shapes]
        for copy, tensor, values in zip(made, shapes, wanted, strict=True):
            for _ in range(2):  # a graph that is kept asks twice
                found = copies.back(copy)
                torch.testing.assert_close(found, values, rtol=0, atol=0)
                assert found.data_ptr() != tensor.data_ptr()
        assert copies.back(made[1]).stride() == (1, 2)  # as it was
        del made, copy
        gc.collect()
    assert copies.held == copies.peak == copies.moved / 3  # the same memory in each round
    assert copies.used == 0


def test_what_leaves_is_held_until_it_is_copied() -> None:
    """And a source whose memory is used again, once it is dropped, is no longer read."""
    copies = Copies(LateDevice(), in_flight=2)
    sources = [torch.full((4,), float(i)) for i in range(5)]
    alive = [weakref.ref(t) for t in sources]
    made = []
    while sources:
        tensor = sources.pop(0)
        made.append(copies.out(tensor))
        del tensor
    assert [ref() is not None for ref in alive] == [False, False, False, True, True]
    copies.settle()
    assert not any(ref() is not None for ref in alive)
    for i in reversed(range(5)):
        if i:
            copies.prefetch(made[i - 1])
        assert copies.back(made[i]).tolist() == [float(i)] * 4


def test_memory_that_is_still_read_is_not_written() -> None:
    copies = Copies(LateDevice())
    first = copies.out(torch.ones(8))
    copies.prefetch(first)
    device = first._back
    assert device is not None
    del first  # nobody wants it; its buffer goes to the next, while the copy back has not run
    gc.collect()
    second = copies.out(torch.zeros(8))
    assert copies.held == 32
    assert device.tolist() == [1.0] * 8
    assert copies.back(second).tolist() == [0.0] * 8


@pytest.mark.slow
def test_sizes_that_change_hold_no_more_than_was_ever_used() -> None:
    copies = Copies(LateDevice())
    for size in (100, 7, 300, 20, 5, 1000, 450):
        made = [copies.out(torch.zeros(size, dtype=torch.uint8)) for _ in range(2)]
        assert copies.held <= 2 * max(size, copies.peak)
        del made
        gc.collect()
    assert copies.peak <= 2000


@pytest.mark.usefixtures("clean_ds")
def test_tensors_of_the_host_stay(caplog: pytest.LogCaptureFixture) -> None:
    copies = HostCopies(CpuAccelerator())
    tensor = torch.ones(3)
    with caplog.at_level("INFO"):
        copy = copies.out(copies.back(copies.out(tensor)))
    copies.prefetch(copy)
    assert copies.back(copy).data_ptr() == tensor.data_ptr()
    assert (copies.held, copies.moved, copy.nbytes) == (0, 0, 0)
    assert caplog.text.count("frees no memory") == 1
