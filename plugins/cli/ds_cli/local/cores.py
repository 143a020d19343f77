"""Which cores each process of a run computes on (standard library)."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ds_command_kit.show import CommandError


def _allowed() -> set[int]:
    affinity = getattr(os, "sched_getaffinity", None)
    return set(affinity(0)) if affinity is not None else set(range(os.cpu_count() or 1))


def threads_per_rank(nproc: int, cores: Sequence[Sequence[int]] = ()) -> int:
    """How many threads a process should compute with: its share of the cores; where bound, without
    hyper-threads.
    """
    return (
        min(len({_core(cpu) for cpu in own}) for own in cores)
        if cores
        else max(1, len(_allowed()) // nproc)
    )


def parse_cores(text: str) -> list[int]:
    """``"0,2-4"`` -> [0, 2, 3, 4]. Raises CommandError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise CommandError(
                f"--bind-core-list {text!r} must be numbers and ranges, as in 0-7,16-23"
            )
        found += range(first, last + 1)
    if len(set(found)) != len(found):
        raise CommandError(f"--bind-core-list {text!r} names a core twice")
    return found


def cores_of_ranks(nproc: int, listed: Sequence[int] = ()) -> list[list[int]]:
    """An equal share of `listed` (empty: of all cores that we may use) for each process; neighbours
    stay together.

    Raises CommandError for cores that we may not use, or when there are fewer than processes.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise CommandError(f"--bind-cores-to-rank: {sys.platform} cannot bind processes to cores")
    allowed = _allowed()
    if strangers := sorted(set(listed) - allowed):
        raise CommandError(
            f"--bind-core-list: core {', '.join(map(str, strangers[:8]))} cannot be used here; "
            "this process may use "
            f"{', '.join(map(str, sorted(allowed)[:16]))}{' ...' if len(allowed) > 16 else ''}"
        )
    cores = list(listed) or sorted(allowed, key=lambda cpu: (_core(cpu), cpu))
    share = len(cores) // nproc
    if share < 1:
        raise CommandError(
            f"--bind-cores-to-rank: {len(cores)} cores cannot be divided among {nproc} processes"
        )
    return [cores[i * share : (i + 1) * share] for i in range(nproc)]


def _core(cpu: int) -> tuple[int, int]:
    """(package, first sibling) of a logical CPU, which hyper-threads of one core share; itself
    where unknown.
    """
    place = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        package = int((place / "physical_package_id").read_text())
        first = re.match(r"\d+", (place / "thread_siblings_list").read_text())
        return package, int(first[0]) if first else cpu
    except (OSError, ValueError):
        return 0, cpu
