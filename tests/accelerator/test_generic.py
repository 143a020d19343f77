"""The one back end over torch's device modules: it delegates, and copes with what a module lacks."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from ds_core.accelerator import probes
from ds_core.accelerator.generic import TorchAccelerator
from ds_core.errors import AcceleratorError


class FullModule:
    """A device module with everything; it notes what it is asked."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def answer(*arguments, **keywords):
            self.calls.append((name, arguments))
            return {
                "device_count": 2, "is_available": True, "current_device": 1, "get_device_name": "Chip 9",
                "memory_allocated": 10, "max_memory_allocated": 20, "memory_reserved": 30, "mem_get_info": (40, 50),
                "is_bf16_supported": False, "get_device_capability": (9, 0),
            }.get(name)  # fmt: skip

        return answer


class BareModule:
    """A device module with nothing but a name, as a young back end has."""

    @staticmethod
    def is_available():
        return True


def test_it_asks_the_device_module():
    full = FullModule()
    acc = TorchAccelerator("xpu", full)
    acc.set_device(1)
    acc.synchronize(0)
    acc.manual_seed(3)
    acc.empty_cache()
    assert (acc.device_count(), acc.current_index(), acc.device_name()) == (2, 1, "Chip 9")
    assert (acc.memory_allocated(), acc.max_memory_allocated(1), acc.memory_reserved()) == (10, 20, 30)
    assert acc.available_memory() == 40
    assert not acc.supports(torch.bfloat16)
    assert acc.preferred_dtype() == torch.float16
    for call in (("set_device", (1,)), ("synchronize", (0,)), ("manual_seed_all", (3,)), ("empty_cache", ())):
        assert call in full.calls
    with pytest.raises(AcceleratorError, match="2 devices; there is no number 2"):
        acc.set_device(2)


def test_it_copes_with_a_module_that_lacks_nearly_everything():
    acc = TorchAccelerator("npu", BareModule())
    assert acc.is_available()
    assert acc.device_count() == 1
    acc.set_device(0)
    acc.synchronize()
    acc.empty_cache()
    acc.reset_peak_memory_stats()
    assert acc.memory_allocated() == 0
    assert acc.new_stream() is None
    with acc.stream(None):
        pass
    event = acc.new_event()
    event.record()
    assert event.query()
    assert acc.total_memory() > 0
    assert acc.supports(torch.float32)


def test_backends_and_flags_by_device(monkeypatch):
    assert TorchAccelerator("cuda", FullModule()).communication_backend == "nccl"
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert TorchAccelerator("cuda", FullModule()).build_flags().architectures == ("9.0",)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;8.6+PTX")
    assert TorchAccelerator("cuda", FullModule()).build_flags().architectures == ("8.0", "8.6+PTX")
    assert TorchAccelerator("cuda", FullModule()).kernel_tags[0] == "cuda"
    assert TorchAccelerator("cuda", FullModule()).supports(torch.float8_e4m3fn)


def test_probes_give_a_reason_or_none():
    for probe in (probes.cuda, probes.xpu, probes.mps, probes.privateuse1):
        answer = probe()
        assert answer is None or len(answer) > 10


def test_a_privateuse1_device_is_served_without_a_line_of_its_own():
    code = textwrap.dedent(
        """
        import torch, types
        torch.utils.rename_privateuse1_backend("acme")
        class Module(types.ModuleType):
            def is_available(self): return True
            def device_count(self): return 3
            def current_device(self): return 0
            def get_rng_state(self, i=0): return torch.get_rng_state()
        torch._register_device_module("acme", Module("torch.acme"))
        from ds_core.accelerator import get_accelerator
        a = get_accelerator()
        assert (a.name, a.device_type, a.device_count()) == ("acme", "acme", 3), (a, a.name)
        assert str(a.device(2)) == "acme:2"
        """
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
