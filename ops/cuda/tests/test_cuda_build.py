"""The sources compile with nvcc for every chip that is promised; what is said where there is no
nvcc or no device.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ds_kernel_kit import build
from ds_ops_cuda import extension, native
from ds_ops_cuda.extension import EXTENSION
from ds_ops_cuda.plugin import FUSED, OPS, PROGRAM, ds_kernels

from ds_core.errors import KernelError
from ds_core.kernels import Kernels
from ds_core.plugins import Plugins

NVCC = shutil.which("nvcc")


def without_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PATH with g++ and ninja only, and nothing built before."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("g++", "ninja"):
        found = shutil.which(tool) or shutil.which(tool, path=str(Path(sys.executable).parent))
        (tools / tool).symlink_to(found or "/usr/bin/true")
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("DS_CORE_CACHE", str(tmp_path / "cache"))


def test_one_file_compiles_or_the_error_names_the_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if NVCC is None:
        without_nvcc(monkeypatch, tmp_path)
        with pytest.raises(KernelError, match="nvcc not found; install the CUDA toolkit"):
            build.build(EXTENSION)
        return
    command = [NVCC, "-std=c++17", "-arch=sm_80", "-Werror", "all-warnings", "-c"]
    done = subprocess.run(
        [*command, str(EXTENSION.folder / "steps.cu"), "-o", str(tmp_path / "steps.o")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert b"step_kernel" in (tmp_path / "steps.o").read_bytes()


LOADED = """
import sys, torch
from ds_kernel_kit import build
from ds_ops_cuda.extension import EXTENSION

module = build.load(EXTENSION)
assert module.CHUNK % 4 == 0 and module.versions()[1] >= 12000
assert set(sys.argv[1:]) <= set(dir(module))
if not torch.cuda.is_available():
    try:
        module.accumulate(0, 0, [8], 0, [[0], [0]], 1.0)
        raise SystemExit("it ran without a device")
    except RuntimeError as error:
        assert "device 0: CUDA: " in str(error), error
"""


@pytest.mark.slow
def test_everything_compiles_and_loads() -> None:
    """Into the cache, so that later runs take the finished library.

    Without nvcc the error says what is missing.
    """
    if NVCC is None:
        with pytest.raises(KernelError, match="nvcc not found"):
            build.build(EXTENSION)
        return
    data = build.build(EXTENSION).read_bytes()
    assert b"sm_80" in data and b"sm_90" in data
    # Elsewhere: two libraries of one source in one process share what C++ keeps once, and the
    # emulated one comes later.
    functions = {*OPS, "run_program"} - {"requantize_sum"}  # which dequantize_sum does
    subprocess.run([sys.executable, "-c", LOADED, *functions], check=True, timeout=300)


def test_without_nvcc_the_reason_is_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_nvcc(monkeypatch, tmp_path)
    monkeypatch.setattr(extension, "_no_device", lambda: None)
    monkeypatch.setattr(build, "_LOADED", {})
    assert "nvcc not found; install the CUDA toolkit" in (extension.available() or "")


@pytest.mark.parametrize(
    "cuda, there, capability, reason",
    [
        (None, False, (8, 0), "is built without CUDA; install a CUDA build of torch"),
        (
            "13.0",
            False,
            (8, 0),
            "torch sees no CUDA device; see nvidia-smi and CUDA_VISIBLE_DEVICES",
        ),
        (
            "13.0",
            True,
            (7, 5),
            r"compute capability 8\.0 is needed \(A100 or later\), and a device here has 7\.5",
        ),
    ],
)
def test_what_a_device_lacks_is_said(
    cuda: str | None,
    there: bool,
    capability: tuple[int, int],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda i: (9, 0) if i == 0 else capability
    )
    extension._no_device.cache_clear()
    try:
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(extension.available())
    finally:
        extension._no_device.cache_clear()


def test_a_driver_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def versions() -> tuple[int, int]:
            return 12040, 13000

    monkeypatch.setattr(native, "_native", None)
    monkeypatch.setattr(build, "load", lambda _: Module)
    with pytest.raises(
        KernelError, match=r"built with CUDA 13\.0, and the driver is for CUDA 12\.4"
    ):
        native.native()


def test_the_table_serves_references_on_the_cpu_and_gives_reasons() -> None:
    kernels = Kernels(Plugins())
    if "dscore-ops-cuda" not in {c.dist for c in kernels.candidates("adam", "cpu", "float32")}:
        entries = list(ds_kernels())  # not installed in this environment: what it would offer
    else:
        entries = [
            c.entry
            for op in (*OPS, *FUSED, PROGRAM)
            for c in kernels.candidates(op, "cpu", "float32")
        ]
        assert kernels.get("layer_norm").__module__ == "ds_ops_cuda.references"
        assert kernels.get("adam").__module__ != "ds_ops_cuda.kernels"
    cuda = [e for e in entries if e.provider == "cuda"]
    assert {e.op for e in cuda} == {*OPS, *FUSED, PROGRAM}
    assert all(e.devices == ("cuda",) and e.priority == 30 for e in cuda)
    assert {e.op for e in entries if e.provider == "reference"} >= {*FUSED}
