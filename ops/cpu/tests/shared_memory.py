"""What the tests of collectives through shared memory share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from ds_comm_gloo import GlooCollectives
from ds_ops_cpu import shared as ours

from ds_core import comm
from ds_core.comm import collectives

ROOT = Path(__file__).parents[3]
CHECKS = ROOT / "tests" / "comm"
SMALL = 1 << 14  # boxes of so many bytes, so that small tensors go through in many pieces


def core_checks(name: str, folder: Path = CHECKS) -> ModuleType:
    """A module of the core's (or a plugin's) tests, whose functions check collectives by whatever
    way they go.
    """
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def transport(group: Any = None) -> Any:
    return (
        collectives._groups[dist.group.WORLD if group is None else group].serving["cpu"].transport
    )  # type: ignore


def renew() -> None:
    """Ask for the transport of the world's collectives once more."""
    collectives._groups.pop(dist.group.WORLD, None)  # type: ignore[call-overload]
    comm.use_providers({("cpu", "gloo"): ours.collectives})


def use_new_segments(box: int = ours.BOX, once: int = ours.ONCE) -> None:
    """Go through shared memory from here on, on new segments."""
    ours.BOX = box
    ours.ONCE = once
    renew()
    comm.all_reduce(torch.ones(1))
    assert isinstance(transport(), ours.SharedMemory)


def spread(layout: str) -> Callable[[Any, bool], GlooCollectives]:
    """Take rank i's host for ``layout[i]`` from here on."""

    def serve(group: Any, messages: bool) -> GlooCollectives:
        return GlooCollectives(
            group, messages, ours.open_segment, key=lambda: layout[dist.get_rank()]
        )

    comm.use_providers({("cpu", "gloo"): serve})
    return serve
