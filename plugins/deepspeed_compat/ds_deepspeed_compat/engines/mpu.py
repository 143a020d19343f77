"""A mesh over the groups of a Megatron-style `mpu` object that the user gives to ``initialize``."""

from __future__ import annotations

from typing import Any

from ds_core import comm
from ds_core.comm import ALONE
from ds_core.errors import ConfigError
from ds_core.mesh import Mesh

_GETTERS = ("world_size", "rank", "group")


def knows(mpu: Any) -> bool:
    """Whether `mpu` has any of the getters that `MpuMesh` reads."""
    kinds = ("data", "model", "tensor_model", "sequence")
    return any(hasattr(mpu, f"get_{kind}_parallel_{what}") for kind in kinds for what in _GETTERS)


class MpuMesh(Mesh):
    """A mesh given by a Megatron-style `mpu` object: its data, sequence and model groups are used
    as they are.

    An mpu without model-parallel getters has no tensor parallelism. One without data-parallel
    getters leaves no rank for it, unless it is a sequence-parallel unit, whose ranks are
    neighbours. Raises ConfigError for what cannot be told from it.
    """

    def __init__(self, mpu: Any, rank: int, world_size: int) -> None:
        tp, tp_rank, tp_group = _coordinates(mpu, "tensor_model_parallel", "model_parallel") or (
            1,
            0,
            None,
        )
        sp, sp_rank, sp_group = _coordinates(mpu, "sequence_parallel") or (1, 0, None)
        data, data_rank, data_group = _data_coordinates(mpu, tp, rank, world_size)
        # What the mpu does not name is taken for pipeline parallelism.
        pp = world_size // (data * sp * tp)
        if pp * data * sp * tp != world_size:
            sequence = f" x sequence parallel {sp}" if sp > 1 else ""
            raise ConfigError(
                f"mpu says data parallel {data}{sequence} x model parallel {tp}, which does not "
                "divide the world of "
                f"{world_size} ranks",
                "mpu",
            )
        if sp == 1:
            super().__init__(("pp", "dp", "tp"), (pp, data, tp), 0, {})
            given: dict[tuple[str, ...], Any] = {("dp",): data_group}
        else:
            alias = {"dp": ("edp", "sp"), "batch": ("edp",)}
            super().__init__(("pp", "edp", "sp", "tp"), (pp, data, sp, tp), 0, alias)
            _, _, both = _coordinates(mpu, "sequence_data_parallel") or (0, 0, None)
            if both is None and data > 1 and pp * tp > 1:
                raise ConfigError(
                    "the mpu does not tell over which ranks gradients are averaged; give it "
                    "get_sequence_data_parallel_world_size, _rank and _group",
                    "mpu",
                )
            given = {("edp",): data_group, ("sp",): sp_group, ("edp", "sp"): both}
        places = {"dp": data_rank} if sp == 1 else {"edp": data_rank, "sp": sp_rank}
        self.rank = rank
        self.coord = {"pp": 0, **places, "tp": tp_rank}
        # Groups are known by their axes without those of size 1, as the mesh asks for them.
        given[("tp",)] = tp_group
        self._given = {axes: group for axes, group in given.items() if axes == self.expand(axes)}

    def build_groups(self, timeout: Any = None, *, own: bool = False) -> None:
        """Take the mpu's groups, whether or not others use them; the world is added, for what
        concerns all ranks.
        """
        import torch.distributed as dist

        world = dist.group.WORLD
        assert world is not None or self.world_size == 1
        for axes, group in self._given.items():
            # of a sequence-parallel unit without data-parallel getters
            if group is None and axes == ("edp",):
                sp = self.size("sp")
                group = self._new_group(
                    [range(first, self.world_size, sp) for first in range(sp)], timeout
                )
            if group is not None:
                self._groups[axes] = group
        live = self.expand(self.names)
        if live and live not in self._groups:
            self._groups[live] = world  # type: ignore[assignment]
        # Every rank opens the transports, in the same order.
        for group in self.groups():
            comm.open_transport(group)

    def ranks(self, *axes: str) -> list[int]:
        """The ranks of the mpu's own group; it may lay ranks out in any order."""
        import torch.distributed as dist

        group = self.group(*axes)
        return [self.rank] if group is ALONE else dist.get_process_group_ranks(group)

    def _rows(self, combo: tuple[str, ...]) -> list[list[int]]:
        return [
            list(row)
            for row in sorted({tuple(row) for row in comm.all_gather_json(self.ranks(*combo))})
        ]


def _coordinates(mpu: Any, *kinds: str) -> tuple[int, int, Any] | None:
    """(size, rank, group) from the getters of the first of `kinds` that has all three; None when
    there is no getter.
    """
    partial = ""
    for kind in kinds:
        names = [f"get_{kind}_{what}" for what in _GETTERS]
        missing = [name for name in names if not callable(getattr(mpu, name, None))]
        if not missing:
            size, rank, group = (getattr(mpu, name)() for name in names)
            return int(size), int(rank), group
        # A size of 1 needs no rank and no group.
        if missing == names[1:] and int(getattr(mpu, names[0])()) == 1:
            return 1, 0, None
        if len(missing) < len(names) and not partial:
            partial = (
                f"the mpu has {', '.join(n for n in names if n not in missing)}, but not "
                f"{', '.join(missing)}"
            )
    if partial:
        raise ConfigError(f"{partial}; give it all three", "mpu")
    return None


def _data_coordinates(mpu: Any, tp: int, rank: int, world_size: int) -> tuple[int, int, Any]:
    found = _coordinates(mpu, "data_parallel")
    if found is not None:
        return found
    if tp == world_size > 1:
        return 1, 0, None
    sequence = _coordinates(mpu, "sequence_parallel")
    if sequence is None:
        raise ConfigError(
            "the mpu does not tell which ranks hold the same weights; give it "
            "get_data_parallel_world_size, "
            "get_data_parallel_rank and get_data_parallel_group",
            "mpu",
        )
    size, place, _ = sequence
    if tp != 1 or world_size % size or rank % size != place:
        raise ConfigError(
            f"the mpu has model parallel size {tp}, and rank {rank} at place {place} of {size} of "
            "a sequence; without "
            "get_data_parallel_* getters it needs model parallel size 1, and a sequence's ranks "
            "next to each other",
            "mpu",
        )
    import torch.distributed as dist

    return world_size // size, rank // size, dist.group.WORLD if size == 1 else None
