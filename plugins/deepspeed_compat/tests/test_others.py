"""The accelerator, builders of operations, logs, helpers and the report, as scripts call them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_deepspeed_compat.engines.loader import DeepSpeedDataLoader
from ds_deepspeed_compat.files import dict_raise_error_on_duplicate_keys
from ds_deepspeed_compat.report import cli_main
from ds_deepspeed_compat.services import op_builder
from ds_deepspeed_compat.services.accelerator import get_accelerator, set_accelerator
from ds_deepspeed_compat.utils import helpers, logs, norms
from ds_deepspeed_compat.utils.devices import OnDevice
from ds_deepspeed_compat.utils.enums import DtypeEnum, ZeroStageEnum
from ds_deepspeed_compat.utils.timers import (
    NoopTimer,
    SynchronizedWallClockTimer,
    ThroughputTimer,
    trim_mean,
)

import ds_core
from ds_core.errors import UsageError

on_cpu = pytest.mark.skipif(torch.accelerator.is_available(), reason="the answers are a CPU's")


@on_cpu
def test_the_accelerator_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    device = get_accelerator()
    assert device is get_accelerator()
    device.set_device(3)
    assert (device.device_name(), device.device_name(1), device.current_device_name()) == (
        "cpu",
        "cpu",
        "cpu",
    )
    assert (device.current_device(), device.device_count()) == (1, 2)
    assert device.communication_backend_name() == "gloo"
    assert device.is_synchronized_device()
    assert device.Stream is None
    with device.stream(None), device.device(0), device.capture_to_graph(device.create_graph()):
        event = device.Event(enable_timing=True)
        event.record()
        device.synchronize()
    device.manual_seed_all(4)
    state = device.get_rng_state()
    drawn = torch.rand(1)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(1), drawn)
    assert device.total_memory() >= device.memory_allocated() > 0
    assert device.memory_stats()["allocated_bytes.all.peak"] >= device.max_memory_reserved() > 0
    assert device.LongTensor([3]).dtype == torch.int64
    assert not hasattr(device, "NothingTensor")
    tensor = torch.ones(1)
    assert device.pin_memory(tensor) is tensor
    assert device.on_accelerator(tensor)
    assert device.is_bf16_supported()
    assert torch.float32 in device.supported_dtypes()
    assert device.lazy_call(lambda: 5) == 5
    assert device.get_op_builder("CPUAdamBuilder") is op_builder.BUILDERS["CPUAdamBuilder"]
    assert device.create_op_builder("Nothing") is None
    set_accelerator(device)
    assert get_accelerator().inner is device.inner
    with pytest.raises(TypeError, match="takes what get_accelerator gives"):
        set_accelerator(ds_core.get_accelerator())  # type: ignore[arg-type]
    ds_core.reset()


def test_builders_answer_from_the_kernel_table() -> None:
    builder: Any = op_builder.CPUAdamBuilder()
    assert builder.NAME == "cpu_adam"
    assert op_builder.compatible_ops.keys() - {"async_io"} == {
        b.NAME for b in op_builder.BUILDERS.values()
    }
    if builder.is_compatible():
        assert callable(builder.load())
    unknown = type("X", (op_builder.OpBuilder,), {"op": "nothing", "device": "cpu"})()
    assert not unknown.is_compatible()


def test_logs_and_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logs.logger.addHandler(handler)
    monkeypatch.setattr(logs.logger, "level", logging.INFO)
    for ranks in (None, [0], [-1], [3]):
        logs.log_dist("here", ranks)
    logs.log_dist_once("once", [0])
    logs.log_dist_once("once", [0])
    logs.logger.removeHandler(handler)
    assert seen == ["[Rank 0] here"] * 3 + ["[Rank 0] once"]
    logs.set_log_level_from_string("error")
    assert (logs.get_current_level(), logs.should_log_le("warning")) == (logging.ERROR, False)
    logs.set_log_level_from_string("warning")
    with pytest.raises(ValueError, match="'loud' is not a log level"):
        logs.set_log_level_from_string("loud")


def test_helpers(tmp_path: Path) -> None:
    batch = {"a": [torch.ones(1), 2], "b": (torch.ones(1),)}
    moved = helpers.move_to_device(batch, "meta")
    assert (moved["a"][0].device.type, moved["a"][1], moved["b"][0].device.type) == (
        "meta",
        2,
        "meta",
    )
    helpers.ensure_directory_exists(str(tmp_path / "a" / "file"))
    assert (tmp_path / "a").is_dir()
    assert helpers.required_torch_version(min_version=2.0)
    assert not helpers.required_torch_version(max_version=1.13)
    param = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    param.grad = torch.tensor([6.0, 8.0])
    assert (norms.get_weight_norm(param), norms.get_grad_norm([param])) == (5.0, 10.0)
    assert norms.get_global_norm([3.0, 4.0]) == 5.0
    assert norms.clip_grad_norm_([param], 1.0) == 10.0
    helpers.set_random_seed(1)
    helpers.see_memory_usage("here", force=True)
    assert helpers.partition_uniform(num_items=10, num_parts=4) == [0, 3, 6, 8, 10]
    assert helpers.partition_balanced([1, 1, 1, 1, 10, 1], 3) == [0, 4, 5, 6]
    assert helpers.call_to_str("f", 1, b="x") == "f(1, b='x')"
    assert helpers.instrument_w_nvtx(lambda: 3)() == 3


def test_the_loader_takes_deepspeeds_arguments() -> None:
    data = list(torch.arange(8))
    loaders = [
        DeepSpeedDataLoader(
            data, 2, False, -1, None, data_parallel_world_size=2, data_parallel_rank=rank
        )
        for rank in range(2)
    ]
    epochs = [[int(i) for loader in loaders for batch in loader for i in batch] for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(8))] * 2
    assert epochs[0] != epochs[1]
    assert len(DeepSpeedDataLoader(data[:3], 2, dataloader_drop_last=True)) == 1


def test_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(
        "ds_deepspeed_compat.utils.timers.time.perf_counter", lambda: float(next(clock))
    )
    said: list[str] = []
    monkeypatch.setattr(
        "ds_deepspeed_compat.utils.timers.log_dist",
        lambda text, ranks: said.append(f"{ranks} {text}"),
    )
    timers = SynchronizedWallClockTimer()
    for _ in range(2):
        timers("forward").start()
        timers("forward").stop()
    assert timers.get_mean(["forward", "nothing"], reset=False) == {"forward": 1000.0}
    timers.log(["forward", "nothing"], normalizer=2, reset=False, memory_breakdown=True)
    assert said.pop().startswith("[0] time (ms) | forward: 1000.00 | mem_allocated: ")
    timers.log(["forward", "nothing"], normalizer=2)
    assert said == ["[0] time (ms) | forward: 1000.00"]
    assert [trim_mean([1, 2, 3, 100], cut) for cut in (0, 0.25, 1)] == [26.5, 2.5, 2.5]
    assert timers("forward").elapsed() == 0.0
    assert timers.has_timer("forward")
    with pytest.raises(RuntimeError, match="does not run; start it first"):
        timers("forward").stop()
    throughput = ThroughputTimer(
        None, batch_size=8, start_step=1, steps_per_output=1, logging_fn=said.append
    )
    assert throughput.avg_samples_per_sec() == float("-inf")
    for _ in range(3):
        throughput.start()
        throughput.stop(global_step=True)
    assert throughput.avg_samples_per_sec() == 8.0
    assert said[-1] == "step 3: 8.00 samples/s"
    NoopTimer()("x").start()


def test_models_on_the_meta_device() -> None:
    with OnDevice(dtype=torch.bfloat16, device="meta"):
        layer = torch.nn.Linear(2, 2)
    assert (layer.weight.device.type, layer.weight.dtype) == ("meta", torch.bfloat16)
    with OnDevice(dtype=None, device="meta", enabled=False):
        assert torch.nn.Linear(2, 2).weight.device.type == "cpu"
    assert torch.ones(1).dtype == torch.float32


def test_enumerations() -> None:
    assert ZeroStageEnum(3) == 3 == ZeroStageEnum.weights
    assert DtypeEnum.from_str("half").dtype is torch.float16
    assert DtypeEnum("bf16") is DtypeEnum.bf16
    with pytest.raises(ValueError, match="is not a dtype"):
        DtypeEnum.from_str("fp7")


def test_keys_that_are_there_twice() -> None:
    assert dict_raise_error_on_duplicate_keys([("a", 1), ("b", 2)]) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="duplicate keys in the config: a;"):
        dict_raise_error_on_duplicate_keys([("a", 1), ("a", 2)])


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    cli_main([])
    shown = capsys.readouterr().out
    assert "cpu_adam..." in shown
    assert "deepspeed" in shown.partition("\n\n")[2]
    cli_main(["--hide_operator_status"])
    assert "cpu_adam" not in capsys.readouterr().out


def test_monitors_are_made_of_their_sections_alone(tmp_path: Path) -> None:
    from ds_deepspeed_compat.configs.section_defaults import get_monitor_config
    from ds_deepspeed_compat.services.monitors import MonitorMaster, csvMonitor

    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    master = MonitorMaster(get_monitor_config({"train_batch_size": 4, "csv_monitor": section}))
    assert master.enabled
    assert master.csv_monitor is not None
    assert master.csv_monitor.enabled
    assert master.tb_monitor is master.wandb_monitor is master.comet_monitor is None
    master.write_events([("Train/loss", 0.5, 8)])
    master.close()
    (file,) = (tmp_path / "job").rglob("*.csv")
    assert "8,0.5" in file.read_text()
    alone = csvMonitor(
        get_monitor_config({"csv_monitor": {**section, "job_name": "alone"}}).csv_monitor
    )
    alone.write_events([("Train/loss", 0.25, 4)])
    alone.close()
    assert any("4,0.25" in file.read_text() for file in (tmp_path / "alone").rglob("*.csv"))
    off = MonitorMaster(get_monitor_config({}))
    off.write_events([("Train/loss", 0.5, 8)])
    assert not off.enabled
    with pytest.raises(UsageError, match=r"MonitorMaster takes the sections of monitors"):
        MonitorMaster([])
    with pytest.raises(UsageError, match=r"csvMonitor takes the section 'csv_monitor'"):
        csvMonitor(tmp_path)
