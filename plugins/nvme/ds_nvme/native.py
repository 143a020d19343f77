"""The engines in C++: ``io_uring``, ``kernel aio`` and ``threads``; and what is compiled
(torch-free at import).
"""

from __future__ import annotations

import functools
import logging
import sys
from pathlib import Path
from typing import Any

from ds_kernel_kit.build import Extension, Unit, load, why_not

from ds_core.errors import KernelError
from ds_nvme.engines import Engine, Settings, Transfer, changed, ended
from ds_nvme.files import Opened, disk_error

log = logging.getLogger("ds_nvme")

_FOLDER = Path(__file__).parent / "cpp"

KINDS = ("io_uring", "kernel aio", "threads")
"""The engines, best first."""

EXTENSION = Extension(
    name="dscore-nvme",
    module="_ds_nvme",
    folder=_FOLDER,
    units=(Unit("module.cpp"), Unit("engine.cpp"), Unit("uring.cpp"), Unit("others.cpp")),
    flags=("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread"),
    link=("-shared", "-pthread"),
    prebuilt=Path(__file__).parent / "prebuilt",
)


def available() -> str | None:
    """None when the engines are built or can be, else what is missing."""
    return "needs Linux" if sys.platform != "linux" else why_not(EXTENSION)


@functools.cache
def swapping() -> Any:
    """The module that exchanges a storage's memory; None where it cannot be built.

    It is built for one torch.
    """
    import torch

    # The only one that needs torch's headers: it reaches into a storage.
    extension = _swap_extension(torch)
    try:
        if (reason := why_not(extension)) is None:
            return load(extension)
    except KernelError as error:
        reason = str(error)
    log.info("tensors are copied on their way to and from the disk: %s", reason)
    return None


def _swap_extension(torch: Any) -> Extension:
    libraries = Path(torch.__file__).parent / "lib"
    # The ABI of the C++ library that torch itself was built with.
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return Extension(
        name="ds-nvme-swap",
        module="_ds_nvme_swap",
        folder=_FOLDER,
        units=(Unit("swap.cpp"),),
        flags=(
            "-std=c++17",
            "-O2",
            "-fPIC",
            "-fvisibility=hidden",
            f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        ),
        link=("-shared", f"-L'{libraries}'", "-lc10"),
        torch_headers=True,
    )


class NativeEngine(Engine):
    """An engine in C++.

    Raises RuntimeError with the reason where the kernel has none of this kind.
    """

    def __init__(self, kind: str, settings: Settings) -> None:
        super().__init__(settings)
        self.name = kind
        s = settings
        self._engine = load(EXTENSION).Engine(
            *(kind, s.block_size, s.queue_depth, s.threads, s.single_submit, s.overlap_events)
        )

    def start(
        self,
        file: Opened,
        *,
        write: bool,
        offset: int,
        address: int,
        nbytes: int,
        sums: bytes | None = None,
    ) -> Transfer:
        """See `Engine`."""
        under_way = self._engine.start(
            *(
                self.settings.block_size,
                file.descriptor,
                write,
                file.direct,
                offset,
                address,
                nbytes,
            ),
            *(sums is not None, sums or b""),
        )
        return _NativeTransfer(file, under_way, write=write, offset=offset, nbytes=nbytes)

    def close(self) -> None:
        """See `Engine`."""
        self._engine.close()


class _NativeTransfer(Transfer):
    def __init__(
        self, file: Opened, under_way: Any, *, write: bool, offset: int, nbytes: int
    ) -> None:
        super().__init__(file, write=write, offset=offset, nbytes=nbytes)
        self._under_way = under_way

    def done(self) -> bool:
        # A wait without time only looks.
        return self._wait(0.0)

    def _wait(self, seconds: float) -> bool:
        return bool(self._under_way.wait(seconds))

    def _result(self) -> None:
        failure, number, at = self._under_way.result()
        if failure == "error":
            raise disk_error(self.doing, self.file.path, number, f"at {at}")
        if failure == "ended":
            raise ended(self.file.path, self.write, at)
        if failure == "changed":
            raise changed(self.file.path, at)

    def sums(self) -> bytes:
        """See `Transfer`."""
        return bytes(self._under_way.sums())
