"""`aio_handle`, and the engines below it: what goes wrong in them is named."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from pathlib import Path

import pytest
import torch
from ds_nvme import DiskError, aio_handle, engines
from ds_nvme.aio import AsyncIO
from ds_nvme.files import ALIGNMENT, open_file
from ds_nvme.handle import AsyncIOBuilder
from ds_nvme.memory import aligned
from ds_nvme.probe import ENGINES, open_engine, settings

from ds_core.errors import UsageError


def test_any_tensor_at_any_offset(tmp_path: Path) -> None:
    module = AsyncIOBuilder().load()
    handle = module.aio_handle(8192, 4, False, True, 2)
    assert (
        handle.get_block_size(),
        handle.get_queue_depth(),
        handle.get_intra_op_parallelism(),
    ) == (8192, 4, 2)
    assert (handle.get_single_submit(), handle.get_overlap_events(), handle.get_alignment()) == (
        False,
        True,
        8192,
    )
    file = str(tmp_path / "tensor")
    locked = handle.new_cpu_locked_tensor(5000, torch.empty(0, dtype=torch.float16))
    assert locked.dtype is torch.float16 and locked.data_ptr() % ALIGNMENT == 0 and not locked.any()
    tensors = [
        torch.rand(40_000),
        torch.rand(7),
        torch.rand(90, 100).t(),
        torch.rand(3000)[1:],
        locked.fill_(2),
    ]
    for offset in (0, 4096, 13):
        for tensor in tensors:
            assert handle.sync_pwrite(tensor, file, offset) == 1
            found = torch.empty_like(tensor)
            assert handle.async_pread(found, file, offset) == 0 and handle.wait() == 1
            assert torch.equal(found, tensor)
    assert handle.wait() == 0
    assert (
        handle.write(tensors[0], file, True) == 0
        and handle.read(found := torch.empty(40_000), file, True) == 0
    )
    assert torch.equal(found, tensors[0])
    with open(tmp_path / "other", "wb") as other:
        assert handle.async_pwrite(tensors[0], other.fileno()) == 0 and handle.wait() == 1
    assert (tmp_path / "other").read_bytes() == (tmp_path / "tensor").read_bytes()[:160_000]
    assert handle.free_cpu_locked_tensor(locked) and not handle.free_cpu_locked_tensor(found)


def test_what_cannot_be_done_names_the_file(tmp_path: Path) -> None:
    handle = aio_handle()
    with pytest.raises(DiskError, match=r"cannot open /no/where: No such file"):
        handle.sync_pread(torch.empty(3), "/no/where")
    (tmp_path / "short").write_bytes(bytes(8))
    with pytest.raises(DiskError, match=r"short has 8 bytes, and 12 at 0 are to be read"):
        handle.pread(torch.empty(3), str(tmp_path / "short"), False, True)
    with pytest.raises(
        DiskError, match=r"cannot write /dev/full at 0: No space left .*disk is full"
    ):
        handle.sync_pwrite(torch.zeros(3), "/dev/full")
    with pytest.raises(UsageError, match="multiple of 4096"):
        aio_handle(block_size=1000)


@pytest.mark.parametrize("name", ENGINES)
def test_each_engine_goes_on_after_a_part_and_names_errors(name: str, tmp_path: Path) -> None:
    """/proc/self/mem: a page that is there, and one that is not, which is an I/O error; kernel AIO
    cannot read it.
    """
    engine = open_engine(name, settings(AsyncIO(block_size=2 * ALIGNMENT, queue_depth=2)))
    pages = mmap.mmap(-1, 2 * ALIGNMENT)
    pages[:] = bytes(range(256)) * 32
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ALIGNMENT, 1)
    libc = ctypes.CDLL(None)
    libc.munmap(ctypes.c_void_p(address + ALIGNMENT), ALIGNMENT)
    try:
        memory = aligned(2 * ALIGNMENT)
        file = open_file("/proc/self/mem", write=False)
        transfer = engine.start(
            file, write=False, offset=address, address=memory.data_ptr(), nbytes=2 * ALIGNMENT
        )
        told, number = (
            (rf"{address}: Invalid", 22)
            if name == "kernel aio"
            else (rf"{address + ALIGNMENT}: Input/", 5)
        )
        for _ in range(2):  # it is raised each time
            with pytest.raises(DiskError, match=f"read /proc/self/mem at {told}") as error:
                transfer.wait()
            assert error.value.errno == number
        assert number == 22 or bytes(memory[:ALIGNMENT].tolist()) == pages[:ALIGNMENT]
    finally:
        libc.mmap.restype = ctypes.c_void_p
        # at this very address, which `pages` unmaps in the end
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
        libc.mmap(
            ctypes.c_void_p(address + ALIGNMENT),
            ALIGNMENT,
            mmap.PROT_READ | mmap.PROT_WRITE,
            flags,
            -1,
            0,
        )
    cut = tmp_path / "cut"
    cut.write_bytes(bytes(ALIGNMENT + 100))
    for direct in (True, False):
        file = open_file(cut, write=False, direct=direct)
        transfer = engine.start(
            file, write=False, offset=0, address=memory.data_ptr(), nbytes=2 * ALIGNMENT
        )
        with pytest.raises(DiskError, match="the file ends there"):
            transfer.wait()
    engine.close()


def test_a_slow_disk_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    class Slow(engines.Transfer):
        left = 2

        def done(self) -> bool:
            return False

        def _wait(self, seconds: float) -> bool:
            assert seconds == 10
            self.left -= 1
            return self.left < 0

        def _result(self) -> None: ...

    (tmp_path / "file").touch()
    file = open_file(tmp_path / "file", write=False)
    with caplog.at_level(logging.WARNING, "ds_nvme"):
        Slow(file, write=False, offset=0, nbytes=5).wait()
    assert [r.args for r in caplog.records] == [("read", file.path, 5, s) for s in (10.0, 20.0)]
    assert file.descriptor == -1 and os.path.exists(file.path)
