"""`AcceleratorConformance`: does a device kind keep the contract of
`ds_core.accelerator.Accelerator`?

Subclass it in a test module and name your entry, or make the accelerator yourself. It runs on the
real device, for a contract is about what the device does: values after a stream's work, draws after
a restored random state, the dtype that comes out of a product. Device state that a test changes is
put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from ds_core import entries as offered
from ds_core.accelerator import Accelerator
from ds_core.entries import AcceleratorEntry, resolve
from ds_core.errors import AcceleratorError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MIB = 2**20
# of a memory test: what it takes, and what else the process may do
BLOCK = 64 * MIB
SLACK = 16 * MIB


class AcceleratorConformance:
    """Inherit, and set `entry` or implement `accelerator_factory`.

    ``class TestMine(AcceleratorConformance)``: the name must start with Test, so that pytest
    collects it.
    """

    entry: ClassVar[AcceleratorEntry | None] = None
    """What your plugin's `ds_accelerators` announces."""

    resets_peak: ClassVar[bool] = True
    """False where the system keeps a peak of memory that cannot be reset."""

    def accelerator_factory(self) -> Accelerator:
        """A new accelerator; by default the one that `entry` loads."""
        if self.entry is None:
            raise NotImplementedError(
                f"{type(self).__name__} needs an entry or an accelerator_factory"
            )
        made: Accelerator = resolve(self.entry.load)()
        return made

    @pytest.fixture
    def accelerator(self) -> Iterator[Accelerator]:
        """The accelerator under test; the current device and random states are put back
        afterwards."""
        import torch

        made = self.accelerator_factory()
        assert made.device_count() > 0, f"{made.name}: this kit needs a device to run on"
        index = made.current_index()
        host = torch.get_rng_state()
        state = made.get_rng_state()
        yield made
        made.set_device(index)
        made.set_rng_state(state)
        torch.set_rng_state(host)

    # First, while the process may not have touched the device yet.
    def test_looking_initialises_no_device(self) -> None:
        """Making one and `device_count` leave the device alone: forking must stay possible."""
        import torch

        def initialized() -> bool:
            module = getattr(torch, made.device_type, None)
            return bool(getattr(module, "is_initialized", bool)())

        made = self.accelerator_factory()
        before = initialized()
        self.accelerator_factory()
        made.device_count()
        assert initialized() == before, f"{made.name}: only looking at the device initialised it"

    def test_entry(self) -> None:
        """The entry's name is the accelerator's, and its probe says that it can be used here."""
        made = self.accelerator_factory()
        if self.entry is not None:
            assert self.entry.name == made.name
            assert offered.ask(self.entry.probe) is None

    def test_description(self, accelerator: Accelerator) -> None:
        """Names and tags have the types that the core relies on."""
        import torch

        assert isinstance(accelerator, Accelerator)
        assert accelerator.name.strip() == accelerator.name != ""
        assert torch.device(accelerator.device_type).type == accelerator.device_type

    # -- devices -----------------------------------------------------------------------------------

    def test_every_device_can_be_made_current(self, accelerator: Accelerator) -> None:
        """`set_device`, `current_index`, `device` and where tensors then go all agree."""
        import torch

        count = accelerator.device_count()
        assert type(count) is int and count >= 1
        for index in range(count):
            accelerator.set_device(index)
            assert accelerator.current_index() == index
            assert accelerator.current_device() == accelerator.device() == accelerator.device(index)
            tensor = torch.ones(2, device=accelerator.current_device())
            assert tensor.device == accelerator.current_device()
            assert tensor.device.type == accelerator.device_type

    def test_devices_that_are_not_there(self, accelerator: Accelerator) -> None:
        """An index out of range is an AcceleratorError that says how many there are, and changes
        nothing.
        """
        before = accelerator.current_index()
        count = accelerator.device_count()
        for index in (count, -1):
            with pytest.raises(AcceleratorError, match=rf"\b{count}\b"):
                accelerator.set_device(index)
        assert accelerator.current_index() == before

    def test_local_rank_chooses_the_device(self, accelerator: Accelerator) -> None:
        """Local ranks count through the devices and start again."""
        count = accelerator.device_count()
        assert [accelerator.local_index(rank) for rank in range(2 * count)] == [*range(count)] * 2

    # -- order of work -----------------------------------------------------------------------------

    def test_streams_are_all_there_or_none(self, accelerator: Accelerator) -> None:
        """`new_stream` and `current_stream` agree on whether there are queues; `stream` enters and
        leaves.
        """
        before = accelerator.current_stream()
        new = accelerator.new_stream()
        assert (before is None) == (new is None)
        with accelerator.stream(None):
            assert accelerator.current_stream() == before
        with accelerator.stream(new):
            assert accelerator.current_stream() == new
        assert accelerator.current_stream() == before

    def test_an_event_orders_two_streams(self, accelerator: Accelerator) -> None:
        """What is queued after `wait` sees all that was queued on the other stream before
        `record`."""
        import torch

        data = torch.eye(256, device=accelerator.current_device())
        side = accelerator.new_stream()
        done = accelerator.new_event()
        if side is not None:
            side.wait_stream(accelerator.current_stream())
        with accelerator.stream(side):
            for _ in range(20):
                # (I I + I) / 2 = I exactly, so a difference means that work was out of order. Many
                # products, so that the stream is still busy when `seen` is queued.
                data.copy_((data @ data + data) * 0.5)
            done.record()
        done.wait()
        seen = data + 1
        accelerator.synchronize()
        assert torch.equal(seen.cpu(), torch.eye(256) + 1)

    def test_events_can_be_waited_for(self, accelerator: Accelerator) -> None:
        """After `synchronize`, an event is done, and so is all before it."""
        import torch

        begin = accelerator.new_event(timing=True)
        end = accelerator.new_event(timing=True)
        data = torch.ones(256, 256, device=accelerator.current_device())
        begin.record()
        data @ data
        end.record()
        end.synchronize()
        assert begin.query() is True and end.query() is True
        assert 0 <= begin.elapsed_time(end) < 60e3, "elapsed_time is in milliseconds"

    # -- memory ------------------------------------------------------------------------------------

    def test_memory_counters(self, accelerator: Accelerator) -> None:
        """All are ints in bytes that fit each other, on every device."""
        for index in range(accelerator.device_count()):
            accelerator.set_device(index)
            allocated = accelerator.memory_allocated()
            peak = accelerator.max_memory_allocated()
            total = accelerator.total_memory()
            available = accelerator.available_memory()
            assert {type(n) for n in (allocated, total, available, peak)} == {int}
            assert 0 <= allocated <= peak + SLACK
            assert 0 <= available <= total
            assert total > BLOCK

    def test_memory_follows_a_tensor(self, accelerator: Accelerator) -> None:
        """A tensor shows in what is allocated and in the peak; a reset forgets the peak."""
        import torch

        accelerator.reset_peak_memory_stats()
        before = accelerator.memory_allocated()
        block = torch.ones(BLOCK, dtype=torch.uint8, device=accelerator.current_device())
        accelerator.synchronize()
        with_block = accelerator.memory_allocated()
        assert with_block - before >= BLOCK - SLACK
        del block
        assert accelerator.memory_allocated() <= with_block - BLOCK + SLACK
        peak = accelerator.max_memory_allocated()
        assert peak >= with_block - SLACK
        accelerator.reset_peak_memory_stats()
        if self.resets_peak:
            assert accelerator.max_memory_allocated() <= peak - BLOCK + SLACK

    def test_emptying_the_cache_keeps_tensors(self, accelerator: Accelerator) -> None:
        """Only unused memory is given back."""
        import torch

        kept = torch.arange(1000, device=accelerator.current_device())
        accelerator.empty_cache()
        assert torch.equal(kept.cpu(), torch.arange(1000))

    def test_pinned_memory(self, accelerator: Accelerator) -> None:
        """`pin` keeps the values on the host, gives the tensor itself where it cannot, and the copy
        arrives.
        """
        import torch

        plain = torch.arange(1000.0)
        pinned = accelerator.pin(plain)
        assert pinned is plain or pinned.is_pinned()
        assert pinned.device.type == "cpu" and torch.equal(pinned, plain)
        copy = pinned.to(accelerator.current_device(), non_blocking=True)
        accelerator.synchronize()
        assert torch.equal(copy.cpu(), plain)

    # -- random numbers ----------------------------------------------------------------------------

    def test_seeding(self, accelerator: Accelerator) -> None:
        """One seed gives one sequence on every device, another seed another."""
        for index in range(accelerator.device_count()):
            accelerator.set_device(index)
            draws = []
            for seed in (7, 7, 8):
                accelerator.manual_seed(seed)
                draws.append(_draw(accelerator))
            assert draws[0] == draws[1] != draws[2]

    def test_random_state_comes_back(self, accelerator: Accelerator) -> None:
        """A state is a copy that repeats what followed it, also after a checkpoint took it apart to
        bytes.
        """
        import torch

        for index in range(accelerator.device_count()):
            accelerator.set_device(index)
            state = accelerator.get_rng_state()
            assert state.dtype == torch.uint8 and state.dim() == 1 and state.device.type == "cpu"
            # A copy by value, as a checkpoint makes: the next draw must not change it.
            kept = torch.tensor(state.tolist(), dtype=torch.uint8)
            first = _draw(accelerator)
            assert torch.equal(state, kept), (
                "the state changed with the generator: it must be a copy"
            )
            assert _draw(accelerator) != first
            accelerator.set_rng_state(kept)
            assert _draw(accelerator) == first

    # -- dtypes ------------------------------------------------------------------------------------

    def test_supported_dtypes_compute(self, accelerator: Accelerator) -> None:
        """Where `supports` says yes, a product and its gradient come out right, in that dtype."""
        import torch

        assert accelerator.supports(torch.float32) is True
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            if accelerator.supports(dtype):
                left, right = _factors(accelerator, dtype)
                left.requires_grad_()
                product = left @ right
                product.sum().backward()
                assert product.dtype == dtype
                assert product.detach().cpu().double().tolist() == [[19.0, 22.0], [43.0, 50.0]]
                assert (
                    left.grad is not None
                    and left.grad.cpu().double().tolist() == [[11.0, 15.0]] * 2
                )

    def test_autocast(self, accelerator: Accelerator) -> None:
        """Inside, fp32 factors give a product in the dtype asked for; switched off and outside,
        fp32.
        """
        import torch

        left, right = _factors(accelerator, torch.float32)
        for dtype in (torch.bfloat16, torch.float16):
            if accelerator.supports(dtype):
                with accelerator.autocast(dtype):
                    assert (left @ right).dtype == dtype
                    with accelerator.autocast(dtype, enabled=False):
                        assert (left @ right).dtype == torch.float32
                assert (left @ right).dtype == torch.float32

    # -- communication ---------------------------------------------------------------------------

    def test_the_backend_carries_its_tensors(self, accelerator: Accelerator) -> None:
        """torch.distributed has the backend, and a group of one rank reduces a tensor of the
        device.
        """
        import torch
        import torch.distributed as dist

        backend = accelerator.communication_backend
        assert dist.is_backend_available(backend), (
            f"{backend!r} is not a backend of this torch.distributed"
        )
        assert not dist.is_initialized(), "a process group of another test is still there"
        device = accelerator.current_device()
        bound: Any = {} if device.index is None else {"device_id": device}
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch does not declare this export
        dist.init_process_group(backend, store=store, rank=0, world_size=1, **bound)
        try:
            data = torch.arange(4.0, device=device)
            dist.all_reduce(data)
            accelerator.synchronize()
            assert data.tolist() == [0.0, 1.0, 2.0, 3.0]
        finally:
            dist.destroy_process_group()


def _draw(accelerator: Accelerator) -> list[float]:
    import torch

    drawn: list[float] = torch.rand(8, device=accelerator.current_device()).tolist()
    return drawn


def _factors(accelerator: Accelerator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[[1, 2], [3, 4]] and [[5, 6], [7, 8]]: every sum on the way is exact in 8 bits of
    mantissa."""
    import torch

    device = accelerator.current_device()
    left = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=dtype, device=device)
    return left, torch.tensor([[5.0, 6.0], [7.0, 8.0]], dtype=dtype, device=device)
