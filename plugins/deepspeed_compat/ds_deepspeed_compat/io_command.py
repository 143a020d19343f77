"""``ds_io``: how fast folders are written and read through the handle that programs use (of
dscore-nvme).
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ds_core.catalogue import install

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def main(args: Sequence[str] | None = None) -> None:
    """The command."""
    parser = _parser()
    given = parser.parse_args(args)
    for flag in ("gpu", "use_gds", "slow_bounce_buffer", "torch_legacy_save"):
        if getattr(given, flag):
            parser.error(
                f"--{flag} is not offered: files are read into and written from host memory"
            )
    if given.engine not in ("aio_handle", "aio_basic"):
        parser.error(f"--engine {given.engine} is not offered; use aio_handle")
    folders = [word.rpartition(":")[0] or word for word in given.folder_to_device_mapping]
    folders = folders or [given.folder] * given.multi_process
    if folders[0] is None:
        parser.error("give --folder, or --folder_to_device_mapping FOLDER:DEVICE ...")
    for folder in folders:
        if not Path(folder).is_dir():
            parser.error(f"{folder!r} is no folder")
    try:
        speeds = measured(given, folders)
    except ModuleNotFoundError as error:
        how = install("dscore-nvme")
        sys.exit(f"ds_io: {error}; it measures what dscore-nvme does: {how}")
    except OSError as error:
        sys.exit(f"ds_io: {error}")
    what = "read" if given.read else "write"
    print(f"{what} of {given.io_size} in {len(folders)} folder(s): best {max(speeds):.3f} GB/sec")
    print(f"{what} speed: {statistics.median(speeds):.3f} GB/sec")


def measured(given: argparse.Namespace, folders: Sequence[str]) -> list[float]:
    """The speed of all folders together in each loop, in GiB/s.

    Files are removed again. Raises OSError.
    """
    import torch

    handles = importlib.import_module("ds_nvme.handle")
    size = _bytes(given.io_size)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8)
    jobs: list[tuple[Any, Any, str]] = []
    with ThreadPoolExecutor(len(folders)) as pool:
        names = [Path(tempfile.mkdtemp(dir=folder, prefix="ds_io-")) for folder in folders]
        try:
            for name in names:
                handle = handles.aio_handle(
                    block_size=_bytes(given.block_size),
                    queue_depth=given.queue_depth,
                    single_submit=given.single_submit,
                    overlap_events=not given.sequential_requests,
                    intra_op_parallelism=given.io_parallel or 1,
                )
                buffer = handle.new_cpu_locked_tensor(size, source)
                buffer.copy_(source)
                jobs.append((handle, buffer, str(name / "data")))
            if given.read:
                list(pool.map(lambda job: job[0].write(job[1], job[2], False), jobs))

            def once(job: tuple[Any, Any, str]) -> None:
                handle, buffer, file = job
                (handle.read if given.read else handle.write)(buffer, file, given.validate)

            speeds = []
            for _ in range(given.warmup_loops + given.loops):
                began = time.perf_counter()
                list(pool.map(once, jobs))
                speeds.append(size * len(jobs) / (time.perf_counter() - began) / 1024**3)
            for handle, buffer, _file in jobs:
                handle.free_cpu_locked_tensor(buffer)
        finally:
            for name in names:
                (name / "data").unlink(missing_ok=True)
                name.rmdir()
    return speeds if given.include_warmup_time else speeds[given.warmup_loops :]


def _bytes(text: str) -> int:
    """``"4M"`` -> 4194304. Raises ValueError."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


def _size(text: str) -> str:
    """A size as it was written, if it is one."""
    if _bytes(text) <= 0:
        raise ValueError(text)
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds_io", description="Write or read files, and tell how fast that is."
    )
    add = parser.add_argument
    add("--folder", default=None, help="where the files are made")
    add(
        "--folder_to_device_mapping",
        nargs="+",
        default=[],
        metavar="FOLDER:DEVICE",
        help="one file in each",
    )
    add("--io_size", type=_size, required=True, help="bytes of each file: 4M, 1G")
    add("--read", action="store_true", help="read; else write")
    add("--multi_process", type=int, default=1, help="how many at a time in --folder")
    add("--block_size", type=_size, default="1M", help="bytes of a request")
    add("--queue_depth", type=int, default=32, help="requests at a time")
    add("--single_submit", action="store_true", help="requests one by one")
    add("--sequential_requests", action="store_true", help="wait for each batch of requests")
    add("--validate", action="store_true", help="compare what was moved")
    add("--engine", default="aio_handle", help="aio_handle")
    add("--loops", type=int, default=3, help="measurements")
    add("--warmup_loops", type=int, default=1, help="loops before them")
    add("--include_warmup_time", action="store_true", help="count these too")
    add("--io_parallel", type=int, default=None, help="threads of one process")
    add("--fast_io_size", default="64M", help=argparse.SUPPRESS)
    add("--use_accelerator_pin_memory", action="store_true", help=argparse.SUPPRESS)
    for flag in ("--gpu", "--use_gds", "--slow_bounce_buffer", "--torch_legacy_save"):
        add(flag, action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
