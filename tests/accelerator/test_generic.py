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
from ds_testing.kits.devices.accelerator import AcceleratorConformance

from ds_core.accelerator import CpuAccelerator, TorchAccelerator
from ds_core.errors import AcceleratorError
from ds_core.setup.builtin import ds_accelerators

HOST = CpuAccelerator()


class Queue:
    """A queue that does its work at once."""

    def wait_stream(self, other: Queue) -> None:
        """All work of `other` is done."""


class Fakes:
    """A device module of torch's shape: two devices, both of them this host."""

    Stream = Queue

    def __init__(self) -> None:
        self.index = 0
        self.streams = [Queue()]
        self.states = [torch.Generator().manual_seed(i).get_state() for i in range(2)]

    def device_count(self) -> int:
        return 2

    def synchronize(self) -> None:
        """Nothing is queued."""

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

    def memory_allocated(self) -> int:
        return HOST.memory_allocated()

    def max_memory_allocated(self) -> int:
        return HOST.max_memory_allocated()

    def reset_peak_memory_stats(self) -> None:
        HOST.reset_peak_memory_stats()

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(total_memory=HOST.total_memory())

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.states = [torch.get_rng_state() for _ in self.states]

    def get_rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


class FakeAccelerator(TorchAccelerator):
    """All that a vendor with a device module writes, but for `device`: its tensors would carry an
    index.
    """

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
    ("device_count", (), {"device_count": 4}, ("device_count",), 4),
    ("current_index", (), {"current_device": 3}, ("current_device",), 3),
    (
        "set_device",
        (1,),
        {"device_count": 2, "current_device": 0, "set_device": None},
        ("set_device", 1),
        None,
    ),
    ("synchronize", (), {"synchronize": None}, ("synchronize",), None),
    ("new_stream", (), {"Stream": MARK}, ("Stream",), MARK),
    ("current_stream", (), {"current_stream": MARK}, ("current_stream",), MARK),
    ("stream", (MARK,), {"stream": "entered"}, ("stream", MARK), "entered"),
    ("new_event", (), {"Event": MARK}, ("Event",), MARK),
    ("new_event", (True,), {"Event": MARK}, ("Event", ("enable_timing", True)), MARK),
    ("memory_allocated", (), {"memory_allocated": 10}, ("memory_allocated",), 10),
    ("max_memory_allocated", (), {"max_memory_allocated": 12}, ("max_memory_allocated",), 12),
    (
        "reset_peak_memory_stats",
        (),
        {"reset_peak_memory_stats": None},
        ("reset_peak_memory_stats",),
        None,
    ),
    ("available_memory", (), {"mem_get_info": (70, 80)}, ("mem_get_info",), 70),
    ("empty_cache", (), {"empty_cache": None}, ("empty_cache",), None),
    (
        "manual_seed",
        (5,),
        {"manual_seed_all": None, "manual_seed": None},
        ("manual_seed_all", 5),
        None,
    ),
    ("manual_seed", (5,), {"manual_seed": None}, ("manual_seed", 5), None),
    ("get_rng_state", (), {"get_rng_state": STATE}, ("get_rng_state",), STATE),
    ("set_rng_state", (STATE,), {"set_rng_state": None}, ("set_rng_state", STATE), None),
)


@pytest.mark.parametrize(
    ("method", "arguments", "members", "call", "answer"),
    DELEGATED,
    ids=[f"{d[0]}{len(d[1])}" for d in DELEGATED],
)
def test_it_asks_the_devices_module(
    method: str,
    arguments: tuple[Any, ...],
    members: dict[str, Any],
    call: tuple[Any, ...],
    answer: Any,
) -> None:
    module = Recorder(**members)
    result = getattr(TorchAccelerator("xpu", module=module), method)(*arguments)
    # "is" before "==", as two tensors are compared element by element
    assert [
        c
        for c in module.calls
        if len(c) == len(call) and all(map(lambda a, b: a is b or a == b, c, call))
    ]
    assert torch.equal(result, answer) if isinstance(answer, torch.Tensor) else result == answer


def test_total_memory_is_the_devices_own() -> None:
    module = Recorder(get_device_properties=SimpleNamespace(total_memory=80), memory_reserved=30)
    accelerator = TorchAccelerator("cuda", module=module)
    assert accelerator.total_memory() == 80
    assert accelerator.available_memory() == 50


def test_a_driver_that_cannot_tell_free_memory_is_worked_around() -> None:
    def refuse() -> tuple[int, int]:
        raise RuntimeError("the driver cannot tell")

    module = Recorder(get_device_properties=SimpleNamespace(total_memory=80), memory_reserved=30)
    module.mem_get_info = refuse  # type: ignore[attr-defined]
    assert TorchAccelerator("xpu", module=module).available_memory() == 50


def test_a_module_that_only_counts_devices() -> None:
    """One queue, no memory counters; what a run cannot do without is an error that names it."""
    bare = TorchAccelerator("cpu", name="bare", module=Recorder(device_count=1, synchronize=None))
    assert bare.current_index() == 0
    bare.set_device(0)
    assert bare.new_stream() is None
    assert bare.current_stream() is None
    with bare.stream(None):
        event = bare.new_event()
        event.record()
        event.wait()
    assert event.query()
    assert bare.memory_allocated() == bare.max_memory_allocated() == 0
    assert bare.total_memory() == bare.available_memory() == HOST.total_memory()
    bare.reset_peak_memory_stats()
    bare.empty_cache()
    assert bare.pin(tensor := torch.ones(2)) is tensor
    with pytest.raises(AttributeError, match="get_rng_state"):
        bare.get_rng_state()


def test_mps_has_other_names_for_memory() -> None:
    module = Recorder(
        current_allocated_memory=5, driver_allocated_memory=9, recommended_max_memory=100
    )
    mps = TorchAccelerator("mps", module=module)
    assert (mps.memory_allocated(), mps.max_memory_allocated(), mps.total_memory()) == (5, 5, 100)
    assert mps.available_memory() == 91
    assert mps.pin(tensor := torch.ones(2)) is tensor
    assert not mps.supports(torch.float64)
    assert mps.communication_backend == "gloo"


@pytest.mark.parametrize(
    ("count", "index", "words"),
    [
        (
            0,
            0,
            "cuda has 0 devices; there is no number 0 (CUDA_VISIBLE_DEVICES and the like may hide "
            "some)",
        ),
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


def test_a_device_that_torch_does_not_know() -> None:
    with pytest.raises(AcceleratorError, match=r"'privateuseone'"):
        TorchAccelerator("privateuseone")


# -- dtypes ----------------------------------------------------------------------------------------


def test_emulated_bf16_does_not_count() -> None:
    """torch.cuda.is_bf16_supported() says yes of any GPU unless told to leave emulation out."""
    volta = SimpleNamespace(is_bf16_supported=lambda including_emulation=True: including_emulation)
    accelerator = TorchAccelerator("cuda", module=volta)
    assert not accelerator.supports(torch.bfloat16)
    ampere = SimpleNamespace(is_bf16_supported=lambda including_emulation=True: True)
    assert TorchAccelerator("cuda", module=ampere).supports(torch.bfloat16)


def test_what_a_device_declares_for_autocast_counts() -> None:
    vendor = TorchAccelerator("vendor", module=Recorder(get_amp_supported_dtype=[torch.bfloat16]))
    assert vendor.supports(torch.bfloat16)
    assert not vendor.supports(torch.float16)
    assert not vendor.supports(torch.float8_e4m3fn)
    assert not vendor.supports(torch.int8)


# -- communication ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cuda", "nccl"),
        ("xpu", "xccl"),
        ("mps", "gloo"),
    ],
)
def test_the_cores_own_devices(device: str, backend: str) -> None:
    """Made from torch's real modules, which are there even when the device is not."""
    accelerator = TorchAccelerator(device)
    assert accelerator.name == accelerator.device_type == device
    assert accelerator.communication_backend == backend


# -- PrivateUse1 -----------------------------------------------------------------------------------

SETTING = """
import os, sys, types
import torch

torch.utils.rename_privateuse1_backend("fancy")
module = types.ModuleType("torch.fancy")
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
    """Whoever registers a device with torch has it driven: chosen by probing, or by either of its
    names.
    """
    code = """
    for named in ("", "privateuse1", "Fancy"):
        os.environ["DS_ACCELERATOR"] = named
        made = get_accelerator(Plugins())
        print(made.name, made.current_device(), made.communication_backend, made.device_count())
    made.set_device(1)
    print(made.new_stream(), made.current_stream(), made.pin(torch.ones(1)).tolist())
    """
    lines = in_a_process_with_a_fancy_device(code)
    assert lines == ["privateuse1 fancy:1 fccl 2"] * 3 + ["None None [1.0]"]


@pytest.mark.slow
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
    assert "sees no fancy device" in message
