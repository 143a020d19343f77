"""`AcceleratorConformance`: the whole accelerator contract, checked on one device.

Subclass it and give `make_accelerator`. The kit asks nothing of the hardware but what `is_available` promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

    from ds_core.accelerator import Accelerator

__all__ = ["AcceleratorConformance"]


class AcceleratorConformance:
    """Subclass me; see the module's docstring."""

    def make_accelerator(self) -> Accelerator:
        """A fresh accelerator."""
        raise NotImplementedError

    @pytest.fixture
    def accelerator(self) -> Accelerator:
        """The accelerator under test, on its first device."""
        made = self.make_accelerator()
        made.set_device(0)
        return made

    def test_it_says_what_it_is(self, accelerator: Accelerator) -> None:
        """Names are non-empty, the device has the type, and the backend is one that torch.distributed knows."""
        from torch.distributed import Backend

        assert accelerator.name
        assert accelerator.is_available()
        assert accelerator.device_count() >= 1
        assert accelerator.device(0).type == accelerator.device_type
        assert accelerator.current_device().type == accelerator.device_type
        assert accelerator.device_name()
        known = [*Backend.backend_list, *Backend.default_device_backend_map.values()]
        assert accelerator.communication_backend in known
        assert accelerator.kernel_tags[-1] == "reference"

    def test_devices_are_chosen_by_index(self, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
        """set_device is seen by current_index; one too many is an error; local ranks wrap around."""
        count = accelerator.device_count()
        accelerator.set_device(count - 1)
        assert accelerator.current_index() == count - 1
        with pytest.raises((ValueError, RuntimeError)):
            accelerator.set_device(count)
        monkeypatch.setenv("LOCAL_RANK", str(count + 1))
        assert accelerator.local_index() == (count + 1) % count

    def test_tensors_live_there(self, accelerator: Accelerator) -> None:
        """A tensor made on the device is recognised, and one elsewhere is not."""
        import torch

        assert accelerator.on_device(torch.ones(2, device=accelerator.device()))
        assert not accelerator.on_device(torch.ones(2, device="meta"))

    def test_streams_and_events_order_work(self, accelerator: Accelerator) -> None:
        """Work on a new stream is seen after waiting for its event; time passes forwards."""
        import torch

        stream = accelerator.new_stream()
        begin, end = accelerator.new_event(timing=True), accelerator.new_event(timing=True)
        x = torch.ones(64, 64, device=accelerator.device())
        accelerator.synchronize()
        begin.record(accelerator.current_stream())
        with accelerator.stream(stream):
            y = x @ x
            end.record(stream if stream is not None else accelerator.current_stream())
        end.synchronize()
        assert end.query()
        accelerator.synchronize()
        assert begin.elapsed_time(end) >= 0
        assert float(y.sum()) == 64.0**3

    def test_memory_is_counted_in_bytes(self, accelerator: Accelerator) -> None:
        """Counters are whole, ordered, and a large tensor shows in the peak."""
        import torch

        accelerator.reset_peak_memory_stats()
        before = accelerator.memory_allocated()
        block = torch.ones(16 * 2**20, device=accelerator.device())  # 64 MiB
        held, peak = accelerator.memory_allocated(), accelerator.max_memory_allocated()
        assert all(isinstance(n, int) for n in (before, held, peak))
        assert held - before >= block.numel() * 4 * 0.9
        assert peak >= held * 0.99
        assert 0 < accelerator.available_memory() <= accelerator.total_memory()
        assert accelerator.memory_reserved() >= 0
        del block
        accelerator.empty_cache()

    def test_random_state_round_trip(self, accelerator: Accelerator) -> None:
        """The same seed and the same restored state give the same numbers."""
        import torch

        def draw() -> torch.Tensor:
            return torch.rand(5, device=accelerator.device()).cpu()

        accelerator.manual_seed(7)
        first = draw()
        state = accelerator.get_rng_state()
        assert state.dtype == torch.uint8
        assert state.device.type == "cpu"
        second = draw()
        accelerator.set_rng_state(state)
        assert torch.equal(draw(), second)
        accelerator.manual_seed(7)
        assert torch.equal(draw(), first)

    def test_dtypes_are_supported_as_said(self, accelerator: Accelerator) -> None:
        """A matrix product runs in every dtype that it claims, and the preferred one is among them."""
        import torch

        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            if accelerator.supports(dtype):
                x = torch.ones(4, 4, dtype=dtype, device=accelerator.device())
                assert float((x @ x).sum()) == 64.0
        assert accelerator.supports(torch.float32)
        assert accelerator.supports(accelerator.preferred_dtype())
        assert not accelerator.supports(torch.complex64)

    def test_autocast_changes_the_compute_dtype(self, accelerator: Accelerator) -> None:
        """Inside autocast a product is in the lower dtype; disabled, it is not."""
        import torch

        dtype = accelerator.preferred_dtype()
        x = torch.ones(4, 4, device=accelerator.device())
        with accelerator.autocast(dtype):
            assert (x @ x).dtype == dtype
        with accelerator.autocast(dtype, enabled=False):
            assert (x @ x).dtype == torch.float32

    def test_pinning_keeps_the_values(self, accelerator: Accelerator) -> None:
        """A pinned tensor equals the original and answers is_pinned without error."""
        import torch

        x = torch.arange(5.0)
        pinned = accelerator.pin(x)
        assert torch.equal(pinned, x)
        assert isinstance(accelerator.is_pinned(pinned), bool)

    def test_build_flags_are_plain_strings(self, accelerator: Accelerator) -> None:
        """What a compiler is given: tuples of strings."""
        flags = accelerator.build_flags()
        for part in (flags.cxx, flags.device, flags.link, flags.architectures):
            assert all(isinstance(f, str) for f in part)
