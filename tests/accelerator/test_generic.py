"""The generic back end asks the device's module, and copes with what a module lacks."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ds_testing.accelerator import AcceleratorConformance

from ds_core.accelerator import CpuAccelerator, TorchAccelerator
from ds_core.builtin import ds_accelerators
from ds_core.errors import AcceleratorError

HOST = CpuAccelerator()


class Queue:
    """A queue that does its work at once."""

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority

    def wait_stream(self, other: Queue) -> None:
        """All work of `other` is done."""


class Fakes:
    """A device module of torch's shape: two devices, both of them this host."""

    Stream = Queue

    def __init__(self) -> None:
        self.index = 0
        self.streams = [Queue()]
        self.states = [torch.Generator().manual_seed(i).get_state() for i in range(2)]

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return self.index

    def set_device(self, index: int) -> None:
        self.states[self.index] = torch.get_rng_state()
        self.index = index
        torch.set_rng_state(self.states[index])

    def current_stream(self) -> Queue:
        return self.streams[-1]

    @contextlib.contextmanager
    def stream(self, stream: Queue) -> Iterator[None]:
        self.streams.append(stream)
        yield
        self.streams.pop()

    def memory_allocated(self, index: int | None = None) -> int:
        return HOST.memory_allocated()

    def max_memory_allocated(self, index: int | None = None) -> int:
        return HOST.max_memory_allocated()

    def reset_peak_memory_stats(self, index: int | None = None) -> None:
        HOST.reset_peak_memory_stats()

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(total_memory=HOST.total_memory())

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.states = [torch.get_rng_state() for _ in self.states]

    def get_rng_state(self, index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, index: int | None = None) -> None:
        torch.set_rng_state(state)


class FakeAccelerator(TorchAccelerator):
    """All that a vendor with a device module writes, but for `device`: its tensors would carry an index."""

    def device(self, index: int | None = None) -> torch.device:
        return torch.device("cpu")


class TestTheGenericBackEnd(AcceleratorConformance):
    resets_peak = False  # whether it can be is tested where it belongs, with the CPU

    def accelerator_factory(self) -> TorchAccelerator:
        return FakeAccelerator("cpu", name="fake", module=Fakes())


@pytest.mark.gpu
class TestCuda(AcceleratorConformance):
    entry = next(entry for entry in tuple(ds_accelerators()) if entry.name == "cuda")


class Recorder:
    """A module that has the members it was given, and notes how they are called."""

    def __init__(self, **members: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        for name, answer in members.items():
            setattr(self, name, self._noting(name, answer))

    def _noting(self, name: str, answer: Any) -> Any:
        def member(*arguments: Any, **keywords: Any) -> Any:
            self.calls.append((name, *arguments, *keywords.items()))
            return answer

        return member


# (method, its arguments, the module's answers, the call that must reach it, what must come back)
STATE = torch.arange(3, dtype=torch.uint8)
MARK = object()
DELEGATED: tuple[tuple[str, tuple[Any, ...], dict[str, Any], tuple[Any, ...], Any], ...] = (
    ("is_available", (), {"is_available": True}, ("is_available",), True),
    ("device_count", (), {"device_count": 4}, ("device_count",), 4),
    ("current_index", (), {"current_device": 3}, ("current_device",), 3),
    ("set_device", (1,), {"device_count": 2, "set_device": None}, ("set_device", 1), None),
    ("synchronize", (1,), {"synchronize": None}, ("synchronize", 1), None),
    ("synchronize", (), {"synchronize": None}, ("synchronize",), None),
    ("new_stream", (), {"Stream": MARK}, ("Stream",), MARK),
    ("new_stream", (-1,), {"Stream": MARK}, ("Stream", ("priority", -1)), MARK),
    ("current_stream", (), {"Stream": None, "current_stream": MARK}, ("current_stream",), MARK),
    ("stream", (MARK,), {"stream": "entered"}, ("stream", MARK), "entered"),
    ("new_event", (True,), {"Event": MARK}, ("Event", ("enable_timing", True)), MARK),
    ("new_graph", (), {"CUDAGraph": MARK}, ("CUDAGraph",), MARK),
    ("capture", (MARK,), {"graph": "capturing"}, ("graph", MARK), "capturing"),
    ("memory_allocated", (1,), {"memory_allocated": 10}, ("memory_allocated", 1), 10),
    ("max_memory_allocated", (), {"max_memory_allocated": 12}, ("max_memory_allocated",), 12),
    ("reset_peak_memory_stats", (1,), {"reset_peak_memory_stats": None}, ("reset_peak_memory_stats", 1), None),
    ("memory_reserved", (1,), {"memory_reserved": 20}, ("memory_reserved", 1), 20),
    ("available_memory", (1,), {"mem_get_info": (70, 80)}, ("mem_get_info", 1), 70),
    ("empty_cache", (), {"empty_cache": None}, ("empty_cache",), None),
    ("manual_seed", (5,), {"manual_seed_all": None, "manual_seed": None}, ("manual_seed_all", 5), None),
    ("manual_seed", (5,), {"manual_seed": None}, ("manual_seed", 5), None),
    ("get_rng_state", (1,), {"get_rng_state": STATE}, ("get_rng_state", 1), STATE),
    ("set_rng_state", (STATE, 1), {"set_rng_state": None}, ("set_rng_state", STATE, 1), None),
)


@pytest.mark.parametrize(
    ("method", "arguments", "members", "call", "answer"), DELEGATED, ids=[f"{d[0]}{len(d[1])}" for d in DELEGATED]
)
def test_it_asks_the_devices_module(
    method: str, arguments: tuple[Any, ...], members: dict[str, Any], call: tuple[Any, ...], answer: Any
) -> None:
    module = Recorder(**members)
    result = getattr(TorchAccelerator("xpu", module=module), method)(*arguments)
    # "is" before "==", as two tensors are compared element by element
    assert [c for c in module.calls if len(c) == len(call) and all(map(lambda a, b: a is b or a == b, c, call))]
    assert torch.equal(result, answer) if isinstance(answer, torch.Tensor) else result == answer


def test_total_memory_is_the_devices_own() -> None:
    module = Recorder(get_device_properties=SimpleNamespace(total_memory=80), memory_reserved=30)
    accelerator = TorchAccelerator("cuda", module=module)
    assert accelerator.total_memory(1) == 80
    assert accelerator.available_memory(1) == 50


def test_a_driver_that_cannot_tell_free_memory_is_worked_around() -> None:
    def refuse(index: int) -> tuple[int, int]:
        raise RuntimeError("the driver cannot tell")

    module = Recorder(get_device_properties=SimpleNamespace(total_memory=80), memory_reserved=30)
    module.mem_get_info = refuse  # type: ignore[attr-defined]
    assert TorchAccelerator("xpu", module=module).available_memory(0) == 50


def test_a_module_that_has_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """One device, one queue, no memory counters; that random numbers will not come back is said, once."""
    bare = TorchAccelerator("cpu", name="bare", module=object())
    assert bare.is_available()
    assert bare.device_count() == 1
    assert bare.current_index() == 0
    bare.set_device(0)
    bare.synchronize(0)
    assert bare.new_stream() is None
    assert bare.current_stream() is None
    with bare.stream(None):
        event = bare.new_event(timing=True)
        event.record()
        event.wait()
    assert event.query()
    assert not bare.supports_graphs
    assert bare.memory_allocated() == bare.max_memory_allocated() == bare.memory_reserved() == 0
    assert bare.total_memory() == bare.available_memory() == HOST.total_memory()
    bare.reset_peak_memory_stats()
    bare.empty_cache()
    assert bare.pin(tensor := torch.ones(2)) is tensor
    assert bare.visible_devices_env == ""
    with caplog.at_level("WARNING", "ds_core.accelerator"):
        bare.manual_seed(1)
        bare.set_rng_state(bare.get_rng_state())
    assert [r.getMessage() for r in caplog.records] == [
        "torch.cpu has no manual_seed_all: random numbers drawn on the device cannot be reproduced"
    ]


def test_mps_takes_no_indices() -> None:
    """Its module's functions have no parameters, and memory goes by other names."""
    module = Recorder(
        synchronize=None, current_allocated_memory=5, driver_allocated_memory=9, recommended_max_memory=100
    )
    for name in ("get_rng_state", "set_rng_state"):
        setattr(module, name, module._noting(name, STATE))
    mps = TorchAccelerator("mps", module=module)
    mps.synchronize(0)
    mps.set_rng_state(mps.get_rng_state(0), 0)
    assert module.calls[0] == ("synchronize",)
    assert module.calls[1] == ("get_rng_state",)
    assert len(module.calls[2]) == 2  # the name and the state
    assert (mps.memory_allocated(0), mps.memory_reserved(0), mps.total_memory(0)) == (5, 9, 100)
    assert mps.max_memory_allocated(0) == 5
    assert mps.available_memory(0) == 91
    assert mps.pin(tensor := torch.ones(2)) is tensor
    assert not mps.supports(torch.float64)
    assert mps.communication_backend == "gloo"


@pytest.mark.parametrize(
    ("count", "index", "words"),
    [
        (0, 0, "cuda has 0 devices; there is no number 0; CUDA_VISIBLE_DEVICES may hide some"),
        (1, 1, "cuda has 1 device; there is no number 1"),
        (4, 4, "cuda has 4 devices, numbers 0 to 3; there is no number 4"),
        (4, -1, "there is no number -1"),
    ],
)
def test_a_device_that_is_not_there(count: int, index: int, words: str) -> None:
    module = Recorder(device_count=count, set_device=None)
    with pytest.raises(AcceleratorError) as caught:
        TorchAccelerator("cuda", module=module).set_device(index)
    assert words in str(caught.value)
    assert not [call for call in module.calls if call[0] == "set_device"]


def test_devices_that_cannot_be_changed_between() -> None:
    """Never a silent stay on the first one."""
    accelerator = TorchAccelerator("cpu", name="bare", module=Recorder(device_count=2))
    accelerator.set_device(0)
    with pytest.raises(AcceleratorError, match="torch.cpu has no set_device"):
        accelerator.set_device(1)


def test_torch_accelerator_stands_in_for_what_the_module_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """But only for the device that it drives itself."""
    general = Recorder(
        current_accelerator=torch.device("xpu"),
        current_device_index=1,
        device_count=2,
        set_device_index=None,
        synchronize=None,
    )
    monkeypatch.setattr(torch, "accelerator", general)
    accelerator = TorchAccelerator("xpu", module=object())
    accelerator.set_device(1)
    accelerator.synchronize(1)
    assert accelerator.current_index() == 1
    assert {("set_device_index", 1), ("synchronize", 1)} <= set(general.calls)
    other = TorchAccelerator("mps", module=object())
    assert (other.device_count(), other.current_index()) == (1, 0)


def test_a_device_that_torch_does_not_know() -> None:
    with pytest.raises(AcceleratorError, match=r"'privateuseone'"):
        TorchAccelerator("privateuseone")


# -- dtypes --------------------------------------------------------------------------------------------------


def test_emulated_bf16_does_not_count() -> None:
    """torch.cuda.is_bf16_supported() says yes of any GPU unless told to leave emulation out."""
    volta = SimpleNamespace(is_bf16_supported=lambda including_emulation=True: including_emulation)
    accelerator = TorchAccelerator("cuda", module=volta)
    assert not accelerator.supports(torch.bfloat16)
    ampere = SimpleNamespace(is_bf16_supported=lambda including_emulation=True: True)
    assert TorchAccelerator("cuda", module=ampere).supports(torch.bfloat16)


@pytest.mark.parametrize(("capability", "supported"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_fp8_goes_by_the_compute_capability(capability: tuple[int, int], supported: bool) -> None:
    accelerator = TorchAccelerator("cuda", module=Recorder(get_device_capability=capability))
    assert accelerator.supports(torch.float8_e4m3fn) is supported
    assert accelerator.supports(torch.float8_e5m2) is supported
    assert accelerator.supports(torch.float8_e4m3fnuz) is False


def test_what_a_device_declares_for_autocast_counts() -> None:
    vendor = TorchAccelerator("vendor", module=Recorder(get_amp_supported_dtype=[torch.bfloat16]))
    assert vendor.supports(torch.bfloat16)
    assert not vendor.supports(torch.float16)
    assert not vendor.supports(torch.float8_e4m3fn)
    assert not vendor.supports(torch.int8)


def test_fp8_of_rocm_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first formats are e4m3fnuz and e5m2fnuz."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    module = Recorder(get_device_capability=(9, 4))
    assert not TorchAccelerator("cuda", module=module).supports(torch.float8_e4m3fn)


# -- communication -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "backend", "hides"),
    [
        ("cuda", "nccl", "CUDA_VISIBLE_DEVICES"),
        ("xpu", "xccl", "ZE_AFFINITY_MASK"),
        ("mps", "gloo", ""),
    ],
)
def test_the_cores_own_devices(device: str, backend: str, hides: str) -> None:
    """Made from torch's real modules, which are there even when the device is not."""
    accelerator = TorchAccelerator(device)
    assert accelerator.name == accelerator.device_type == device
    assert accelerator.communication_backend == backend
    assert accelerator.visible_devices_env == hides


# -- PrivateUse1 ---------------------------------------------------------------------------------------------

SETTING = """
import os, sys, types
import torch

torch.utils.rename_privateuse1_backend("fancy")
module = types.ModuleType("torch.fancy")
module.is_available = lambda: os.environ["FANCY_DEVICES"] != "0"
module.device_count = lambda: int(os.environ["FANCY_DEVICES"])
module.current_device = lambda: 1
module.set_device = lambda index: None
torch._register_device_module("fancy", module)
torch.distributed.Backend.register_backend("fccl", lambda *a: None, devices=["fancy"])

from ds_core.accelerator import candidates, get_accelerator
from ds_core.errors import AcceleratorError
from ds_core.plugins import Plugins
"""


def in_a_process_with_a_fancy_device(code: str, **environment: str) -> list[str]:
    """What `code` prints; in a process of its own, for torch lets the device be named only once."""
    done = subprocess.run(
        [sys.executable, "-c", SETTING + textwrap.dedent(code)],
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), "FANCY_DEVICES": "2", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_privateuse1_device_needs_no_plugin() -> None:
    """Whoever registers a device with torch has it driven: chosen by probing, or by either of its names."""
    code = """
    for named in ("", "privateuse1", "Fancy"):
        os.environ["DS_ACCELERATOR"] = named
        made = get_accelerator(Plugins())
        print(made.name, made.current_device(), made.communication_backend, made.device_count(), made.device_name(1))
    made.set_device(1)
    print(made.new_stream(), made.current_stream(), made.pin(torch.ones(1)).tolist())
    """
    lines = in_a_process_with_a_fancy_device(code)
    assert lines == ["privateuse1 fancy:1 fccl 2 fancy:1"] * 3 + ["None None [1.0]"]


def test_a_privateuse1_device_that_is_away_is_told() -> None:
    code = """
    print(get_accelerator(Plugins()).name)
    os.environ["DS_ACCELERATOR"] = "fancy"
    try:
        get_accelerator(Plugins())
    except AcceleratorError as error:
        print(error)
    """
    chosen, message = in_a_process_with_a_fancy_device(code, FANCY_DEVICES="0")
    assert chosen == "cpu"
    assert "fancy is registered with torch but says that no device is available" in message
