"""``deepspeed.utils.groups``: process groups, answered from the mesh of the latest live engine.

Each function is one of five questions about one kind of parallelism: ``_get_expert_parallel_rank``
asks for the rank along the axis ``ep``. Those about experts take DeepSpeed's name of the group
(``"ep_size_4"``), which is not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ds_core.comm import ALONE
from ds_core.errors import UsageError
from ds_core.process import STATE

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ds_core.mesh import Mesh

AXES = {
    "data": ("batch",),
    "model": ("tp",),
    "tensor_model": ("tp",),
    "sequence": ("sp",),
    "sequence_data": ("dp",),
    "expert": ("ep",),
    "expert_data": ("edp", "hpz", "mics"),
    "max_expert": ("ep",),
    "pipe": ("pp",),
}
"""Kind of parallelism -> the axes of the mesh; an axis that the mesh does not have is of size 1. As
in DeepSpeed, ranks of "data" have different samples; gradients are averaged over
"sequence_data"."""

# by the default group, which a process may start again
_alone: dict[ProcessGroup, ProcessGroup] = {}


def mesh() -> Mesh:
    """The mesh of the latest live engine."""
    if not (engines := STATE.engines):
        raise UsageError(
            "deepspeed.utils.groups answers from the engine; call deepspeed.initialize first"
        )
    return engines[-1].ctx.mesh


def group_of(mesh: Mesh, *axes: str) -> ProcessGroup:
    """The group along `axes` as one of torch's, also where it would hold this rank alone."""
    group = mesh.group(*axes)
    if group is not ALONE:
        return group
    world = dist.group.WORLD
    if world is None:
        raise UsageError("no process group is running; call deepspeed.init_distributed first")
    if world.size() == 1:
        return world
    if world not in _alone:
        _alone[world] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return _alone[world]


_QUESTIONS: dict[str, Callable[[tuple[str, ...]], Any]] = {
    "group": lambda axes: group_of(mesh(), *axes),
    "world_size": lambda axes: mesh().size(*axes),
    "rank": lambda axes: mesh().index(*axes),
    "src_rank": lambda axes: mesh().ranks(*axes)[0],
    "group_ranks": lambda axes: mesh().ranks(*axes),
}


def _get_broadcast_src_rank() -> int:
    """The first rank of the data-parallel group."""
    return mesh().ranks("dp")[0]


def _get_expert_broadcast_src_rank(group_name: str = "") -> int:
    """The first of the ranks that hold the same experts."""
    return _ask("expert_data", "src_rank")  # type: ignore[no-any-return]


def _zero_param_parallel_is_initialized() -> bool:
    """Whether weights have second copies in blocks of ranks (hpZ)."""
    return mesh().has("hpz")


def _get_zero_param_intra_parallel_group() -> ProcessGroup | None:
    """The ranks of this rank's block; None without hpZ."""
    return group_of(mesh(), *mesh().alias["dp"][1:]) if mesh().has("hpz") else None


def _get_zero_param_intra_parallel_group_world_size() -> int:
    """How many ranks a block has."""
    return mesh().size(*mesh().alias["dp"][1:]) if mesh().has("hpz") else 1


def _get_max_expert_size() -> int:
    """How many ranks share the experts."""
    return _ask("expert", "world_size")  # type: ignore[no-any-return]


def _get_max_expert_size_name() -> str:
    """DeepSpeed's name of the expert-parallel group."""
    return f"ep_size_{_get_max_expert_size()}"


def _clone_world_group() -> ProcessGroup:
    """The group of all ranks."""
    return group_of(mesh(), *mesh().names)


def _ask(kind: str, question: str) -> Any:
    axes = tuple(axis for axis in AXES[kind] if mesh().has(axis))
    # no ranks share experts: they are data-parallel like all parameters
    if kind == "expert_data" and not axes:
        axes = ("dp",)
    return _QUESTIONS[question](axes)


def __getattr__(name: str) -> Callable[..., Any]:
    kind, _, question = name.removeprefix("_").removeprefix("get_").partition("_parallel_")
    if not name.lstrip("_").startswith("get_") or kind not in AXES or question not in _QUESTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def answer(group_name: str = "") -> Any:
        return _ask(kind, question)

    answer.__name__ = answer.__qualname__ = name
    globals()[name] = answer
    return answer
