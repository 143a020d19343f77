"""Times of phases and steps: on a device that runs behind the program, and in every kind of
training.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from ds_step_log.memory import PhaseMemory, memory_line, see_memory_usage
from ds_step_log.tokens import count_tokens
from ds_testing import run_ranks
from torch import Tensor, nn

import ds_core
from ds_core.accelerator import CpuAccelerator, HostEvent, set_accelerator

WORDS = 16


class Device:
    """A device with a queue.

    Milliseconds: `host` is the program's clock, `busy` when the queue will be empty.
    """

    def __init__(self) -> None:
        self.host = self.busy = 0.0
        self.waits = 0

    def launch(self, milliseconds: float) -> None:
        self.busy = max(self.busy, self.host) + milliseconds
        self.host += 0.125

    def wait(self, until: float) -> None:
        self.waits += until > self.host
        self.host = max(self.host, until)


class Mark:
    """An event: it happens when what was queued before it is done.

    As torch's, it refuses to be read before that.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = 0.0

    def record(self) -> None:
        self.at = max(self.device.busy, self.device.host)

    def query(self) -> bool:
        return self.at <= self.device.host

    def synchronize(self) -> None:
        self.device.wait(self.at)

    def elapsed_time(self, later: Mark) -> float:
        assert self.query() and later.query(), "not ready"
        return later.at - self.at


class Accelerator(CpuAccelerator):
    """The fake device's; its tensors are on the host."""

    def __init__(self, device: Device) -> None:
        self.fake = device

    def new_event(self, timing: bool = False) -> Any:
        assert timing
        return Mark(self.fake)

    def synchronize(self) -> None:
        self.fake.wait(self.fake.busy)


class Model(nn.Module):
    """Token ids of [batch, sequence]; a forward is 5 ms of the device's time and a backward 10."""

    def __init__(self, device: Device | None) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.device = device

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.words(ids).square().mean()
        if self.device is not None:
            device = self.device
            device.launch(5)
            if out.requires_grad:
                out.register_hook(lambda grad: device.launch(10))
        return out


@pytest.mark.usefixtures("clean_ds")
def test_a_device_that_runs_behind(caplog: pytest.LogCaptureFixture) -> None:
    """No step waits for the device; what is printed is the device's time all the same, without
    evaluations.
    """
    device = Device()
    set_accelerator(Accelerator(device))
    model = Model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: device.launch(3))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "wall_clock_breakdown": True,
        "steps_per_print": 4,
    }
    engine, *_ = ds_core.initialize(model=model, optimizer=optimizer, config=config)
    ids = torch.ones(2, 8, dtype=torch.int64)
    caplog.set_level(logging.INFO, "ds_core")
    for step in range(4):
        for _ in range(2):
            engine.backward(engine(ids))
            assert device.waits == 0, "somebody waited for the device"
            assert step == 0 or device.busy > device.host
            engine.step()
        if step == 1:
            engine.eval_batch(iter([ids] * 2))
    assert device.waits == 1, "one line, one wait"
    assert (
        "ms: forward 10.0, backward 20.0, backward_inner 20.0, backward_allreduce 0.0, step 3.0"
        in caplog.text
    )
    samples, tokens = map(float, re.findall(r"([\d.]+) (?:samples|tokens)/s", caplog.text))
    assert samples == pytest.approx(4 / 0.033, rel=0.02)
    assert tokens == pytest.approx(32 / 0.033, rel=0.02)


@pytest.mark.usefixtures("clean_ds")
@pytest.mark.parametrize("synchronized", [True, False])
def test_when_a_step_ends(synchronized: bool, caplog: pytest.LogCaptureFixture) -> None:
    """With timers.throughput.synchronized when its work is done, else when it has been queued."""
    device = Device()
    set_accelerator(Accelerator(device))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "timers": {"throughput": {"synchronized": synchronized, "tokens_per_sample": 100}},
        "steps_per_print": 3,
    }
    engine, *_ = ds_core.initialize(model=Model(device), config=config)
    caplog.set_level(logging.INFO, "ds_core")
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 8, dtype=torch.int64)))
        engine.step()
    samples, tokens = map(float, re.findall(r"([\d.]+) (?:samples|tokens)/s", caplog.text))
    assert (samples == pytest.approx(2 / 0.015, rel=0.02)) is synchronized
    assert device.waits == synchronized
    assert tokens == pytest.approx(100 * samples, rel=0.02)


class Events:
    """A monitor that keeps what it gets; late: it reads numbers when the run is over, as a thread
    would.
    """

    name = "events"

    def __init__(self, late: bool = False) -> None:
        self.takes_tensors = late
        self.got: dict[str, list[Any]] = {}

    def write_events(self, events: Any) -> None:
        for name, value, _ in events:
            self.got.setdefault(name.rsplit("/", 1)[-1], []).append(
                value if self.takes_tensors else float(value)
            )

    def flush(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.usefixtures("clean_ds")
def test_monitors_do_not_make_a_step_wait() -> None:
    """A monitor that works in a thread reads times there; what it reads is the device's time."""
    device = Device()
    events = Events(late=True)
    set_accelerator(Accelerator(device))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "wall_clock_breakdown": True,
    }
    engine, *_ = ds_core.initialize(model=Model(device), config=config)
    engine.monitor.monitors.append(events)
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 8, dtype=torch.int64)))
        engine.step()
    assert device.waits == 1, "for the line of the first step"
    read = {name: [float(v) for v in values] for name, values in events.got.items()}
    assert read["elapsed_time_ms_forward"] == [5, 5, 5]
    assert read["elapsed_time_ms_backward"] == [10, 10, 10]
    assert read["tokens_per_second"][1:] == pytest.approx([16 / 0.015] * 2, rel=0.02)
    assert device.waits > 1


def trained(stage: int) -> dict[str, list[float]] | None:
    """What monitors hear of 3 steps with ZeRO `stage`; 4: a pipeline of two stages, by
    train_batch."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "wall_clock_breakdown": True,
        **({"pipeline": {}} if stage == 4 else {"zero_optimization": {"stage": stage}}),
    }
    events = Events()
    ids = torch.ones(2, 8, dtype=torch.int64)
    model: Any = Model(None)
    if stage == 4:
        from ds_pipeline import PipelineModule

        model = PipelineModule(
            [nn.Embedding(WORDS, 4), nn.Linear(4, 4)],
            num_stages=2,
            loss_fn=nn.functional.mse_loss,
            partition_method="uniform",
        )
    engine, *_ = ds_core.initialize(model=model, config=config)
    if engine.ctx.rank == 0:
        engine.monitor.monitors.append(events)
    for _ in range(3):
        if stage == 4:
            engine.train_batch(iter([(ids, torch.zeros(2, 8, 4))] * 2))
        else:
            for _ in range(2):
                engine.backward(engine(ids))
                engine.step()
    engine.destroy()
    return events.got or None


@pytest.mark.parametrize("stage", [0, 1, 2, 3, 4])
def test_every_kind_of_training(stage: int) -> None:
    """Parts fit into what they are parts of; tokens are those of all ranks."""
    got, nothing = run_ranks(2, trained, stage)
    assert nothing is None and got is not None
    ranks = 1 if stage == 4 else 2
    for step in range(3):
        forward, backward, inner, reduction, update = (
            got[f"elapsed_time_ms_{p}"][step]
            for p in ("forward", "backward", "backward_inner", "backward_allreduce", "step")
        )
        assert min(forward, inner, reduction, update) > 0
        assert inner + reduction <= backward
        assert forward + backward + update <= got["step_time_ms"][step]
        seconds = got["step_time_ms"][step] / 1e3
        assert got["samples_per_second"][step] == pytest.approx(4 * ranks / seconds)
        assert got["tokens_per_second"][step] == pytest.approx(32 * ranks / seconds)


def test_what_counts_as_tokens() -> None:
    ids = torch.ones(2, 5, dtype=torch.int64)
    mask = torch.ones(2, 5, dtype=torch.bool)
    assert count_tokens(((), {"mask": mask, "input_ids": ids})) == 10
    assert count_tokens((([torch.ones(2, 5), ids[0]],), {})) is None


class Counters(CpuAccelerator):
    """Memory that a test sets."""

    device_type = "fake"

    def __init__(self) -> None:
        self.now = self.most = 0

    def use(self, now: int) -> None:
        self.most = max(self.most, now)
        self.now = now

    def memory_allocated(self) -> int:
        return self.now

    def max_memory_allocated(self) -> int:
        return self.most

    def reset_peak_memory_stats(self) -> None:
        self.most = self.now


def test_the_peak_of_a_phase_is_its_own() -> None:
    """Also of one inside another, and over micro-batches; the host's memory is told beside that of
    a device.
    """
    device = Counters()
    memory = PhaseMemory(device)
    for scale in (1, 2):
        device.use(90)  # between phases: nobody's
        device.use(1)
        memory.begin()
        device.use(3 * scale)
        memory.begin()
        device.use(7 * scale)
        device.use(4)
        memory.end("backward_inner")
        memory.end("backward")
    used = memory.end_step()
    assert {phase: (u.in_use, u.peak) for phase, u in used.items()} == {
        "backward_inner": (4, 14),
        "backward": (4, 14),
    }
    assert used["backward"].host > 2**20
    memory.begin()
    memory.end("step")
    assert memory.end_step()["step"].peak == 4
    assert memory.highest == 90


@pytest.mark.usefixtures("clean_ds")
def test_memory_usage_at_any_time(caplog: pytest.LogCaptureFixture) -> None:
    device = Counters()
    device.use(3 * 2**30)
    device.use(2**30)
    assert memory_line("x", device).startswith("x: 1.00 GiB in use, 3.00 GiB at peak, ")
    assert "; host: " in memory_line("x", device)
    set_accelerator(device)
    caplog.set_level(logging.INFO, "ds_core")
    see_memory_usage("after loading", reset_peak=True)
    see_memory_usage("again", all_ranks=True)
    assert "after loading: 1.00 GiB in use, 3.00 GiB at peak" in caplog.text
    assert "rank 0: again: 1.00 GiB in use, 1.00 GiB at peak" in caplog.text


def test_a_device_without_events_is_waited_for() -> None:
    drained = []
    begin, end = (HostEvent(lambda: drained.append(1)) for _ in range(2))
    begin.record()
    end.record()
    assert drained == [1, 1] and begin.elapsed_time(end) >= 0
