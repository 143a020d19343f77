"""The named process grid: axis arithmetic (torch-free) and the groups over it.

Ranks are laid out row-major over the outer axes in the order given, then ``dp`` (split into ``edp`` and the axes
that fold inside it), so that neighbouring ranks are neighbours on the innermost axis. All groups are made up
front, in one order, on every rank: making a group is itself a collective.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ds_core import comm
from ds_core.comm import ALONE
from ds_core.entries import Axis
from ds_core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Mesh", "MpuMesh", "plan_mesh"]


class Mesh:
    """Where this rank stands on each axis, and the groups along any set of axes.

    names, shape: the axes of the grid. ``dp`` is an alias of all its parts when something folds inside it.
    A group over axes of size 1 is `ALONE`, over which collectives do nothing.
    """

    def __init__(
        self, names: Sequence[str], shape: Sequence[int], rank: int, alias: dict[str, tuple[str, ...]]
    ) -> None:
        self.names = tuple(names)
        self.shape = tuple(shape)
        self.rank = rank
        self.world_size = math.prod(self.shape)
        self.alias = alias
        self.coord = dict(zip(self.names, self._unravel(rank), strict=True))
        self._groups: dict[tuple[str, ...], ProcessGroup] = {}

    def expand(self, axes: Iterable[str]) -> tuple[str, ...]:
        """`axes` with aliases replaced by their parts, in grid order, without those of size 1."""
        wanted = {part for axis in axes for part in self.alias.get(axis, (axis,))}
        if unknown := wanted - set(self.names):
            raise KeyError(f"no mesh axis {sorted(unknown)}; this mesh has {list(self.names) + list(self.alias)}")
        return tuple(n for n, s in zip(self.names, self.shape, strict=True) if n in wanted and s > 1)

    def has(self, axis: str) -> bool:
        """Whether the mesh knows `axis` (possibly with size 1)."""
        return axis in self.names or axis in self.alias

    def size(self, *axes: str) -> int:
        """The number of ranks along `axes` together; 1 for none."""
        return math.prod(self.shape[self.names.index(n)] for n in self.expand(axes))

    def index(self, *axes: str) -> int:
        """This rank's position among `ranks(*axes)`."""
        return self.ranks(*axes).index(self.rank)

    def ranks(self, *axes: str) -> list[int]:
        """The global ranks that differ from this one only along `axes`, in grid order."""
        free = set(self.expand(axes))
        choices = [range(s) if n in free else (self.coord[n],) for n, s in zip(self.names, self.shape, strict=True)]
        return [self._ravel(c) for c in itertools.product(*choices)]

    def group(self, *axes: str) -> ProcessGroup:
        """The process group along `axes`; `ALONE` when it would hold this rank alone."""
        key = self.expand(axes)
        return self._groups[key] if key else ALONE

    def groups(self) -> list[ProcessGroup]:
        """Every group of this rank with others, in the same order on each rank of a group."""
        return list(self._groups.values())

    def replicas(self, held: Iterable[str]) -> tuple[str, ...]:
        """The parts of dp on which a parameter with param axes `held` is the same on every rank."""
        without = set(self.expand(held))
        return tuple(a for a in self.expand(("dp",)) if a not in without)

    def build_groups(self, timeout: Any = None, *, own: bool = False) -> None:
        """Make every group and open its transport. Collective over the world; torch.distributed must be initialised.

        own: a group of its own also where the default group would do, so that nobody else talks on it.
        """
        import torch.distributed as dist

        live = [n for n, s in zip(self.names, self.shape, strict=True) if s > 1]
        for count in range(1, len(live) + 1):
            for combo in itertools.combinations(live, count):
                if len(combo) == len(live) and not own:
                    world = dist.group.WORLD
                    assert world is not None
                    self._groups[combo] = world
                    continue
                self._groups[combo] = self._new_group(self._rows(combo), timeout)
        comm.open_transports(self.groups())

    def own_group(self, *axes: str, only: Sequence[int] | None = None) -> ProcessGroup:
        """Make another process group along `axes`, for this caller alone, and open its transport.

        Collective over the world: all ranks give the same arguments. Messages on it meet no others; whoever needs it no
        longer destroys it with ``torch.distributed.destroy_process_group``.

        only: the positions along `axes` that take part; None: all. Gives `ALONE` on ranks that nobody shares it with.
        """
        rows = self._rows(self.expand(axes))
        own = self._new_group(rows if only is None else [[row[i] for i in only] for row in rows])
        comm.open_transports([own])
        return own

    def describe(self) -> dict[str, int]:
        """Axis name -> size, for logs, fingerprints and manifests."""
        return dict(zip(self.names, self.shape, strict=True))

    def _new_group(self, rows: Iterable[Sequence[int]], timeout: Any = None) -> ProcessGroup:
        """Make a group of each row, and give the one that this rank is in; `ALONE` when there is none."""
        import torch.distributed as dist

        own = ALONE
        for row in rows:
            if len(row) > 1:
                group = dist.new_group(list(row), timeout=timeout)
                own = group if self.rank in row else own
        return own

    def _rows(self, combo: tuple[str, ...]) -> list[list[int]]:
        """The ranks of every group along `combo`, in the same order on all ranks."""
        fixed = [range(s) if n not in combo else (0,) for n, s in zip(self.names, self.shape, strict=True)]
        rows = []
        for base in itertools.product(*fixed):
            free = [range(s) if n in combo else (b,) for n, s, b in zip(self.names, self.shape, base, strict=True)]
            rows.append([self._ravel(c) for c in itertools.product(*free)])
        return rows

    def _ravel(self, coord: Sequence[int]) -> int:
        rank = 0
        for c, s in zip(coord, self.shape, strict=True):
            rank = rank * s + c
        return rank

    def _unravel(self, rank: int) -> list[int]:
        coord = []
        for s in reversed(self.shape):
            rank, c = divmod(rank, s)
            coord.append(c)
        return coord[::-1]


class MpuMesh(Mesh):
    """A mesh given by a Megatron-style `mpu` object: its data and model groups are used as they are.

    An mpu without model-parallel getters has no tensor parallelism. One without data-parallel getters leaves no rank
    for it, unless it is a sequence-parallel unit of size 1. Raises ConfigError for what cannot be told from it.
    """

    def __init__(self, mpu: Any, rank: int, world_size: int) -> None:
        tp, tp_rank, tp_group = _coordinates(mpu, "tensor_model_parallel", "model_parallel") or (1, 0, None)
        dp, dp_rank, dp_group = _data_coordinates(mpu, tp, rank, world_size)
        pp = world_size // (dp * tp)
        if pp * dp * tp != world_size:
            raise ConfigError(
                f"mpu says data parallel {dp} x model parallel {tp}, which does not divide the world of "
                f"{world_size} ranks",
                "mpu",
            )
        super().__init__(("pp", "dp", "tp"), (pp, dp, tp), 0, {})
        self.rank, self.mpu = rank, mpu
        self.coord = {
            "pp": 0,
            "dp": dp_rank,
            "tp": tp_rank,
        }
        given = {"dp": dp_group, "tp": tp_group}
        self._given = {axis: group for axis, group in given.items() if self.size(axis) > 1}

    def build_groups(self, timeout: Any = None, *, own: bool = False) -> None:
        """Take the mpu's groups, whether or not others use them; the world is added, for what concerns all ranks."""
        import torch.distributed as dist

        world = dist.group.WORLD
        assert world is not None or self.world_size == 1
        for axis, group in self._given.items():
            self._groups[(axis,)] = group
        live = self.expand(self.names)
        if live and live not in self._groups:
            self._groups[live] = world  # type: ignore[assignment]
        comm.open_transports(self.groups())

    def ranks(self, *axes: str) -> list[int]:
        """The ranks of the mpu's own group; it may lay ranks out in any order."""
        import torch.distributed as dist

        group = self.group(*axes)
        return [self.rank] if group is ALONE else dist.get_process_group_ranks(group)

    def _rows(self, combo: tuple[str, ...]) -> list[list[int]]:
        return [list(row) for row in sorted({tuple(row) for row in comm.all_gather_json(self.ranks(*combo))})]


def _coordinates(mpu: Any, *kinds: str) -> tuple[int, int, Any] | None:
    """(size, rank, group) from the getters of the first of `kinds` that has all three; None when there is no getter."""
    partial = ""
    for kind in kinds:
        names = [f"get_{kind}_{what}" for what in ("world_size", "rank", "group")]
        missing = [name for name in names if not callable(getattr(mpu, name, None))]
        if not missing:
            size, rank, group = (getattr(mpu, name)() for name in names)
            return int(size), int(rank), group
        if missing == names[1:] and int(getattr(mpu, names[0])()) == 1:
            return 1, 0, None
        if len(missing) < len(names) and not partial:
            partial = f"the mpu has {', '.join(n for n in names if n not in missing)}, but not {', '.join(missing)}"
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
            "the mpu does not tell which ranks hold the same weights; give it get_data_parallel_world_size, "
            "get_data_parallel_rank and get_data_parallel_group",
            "mpu",
        )
    if sequence[0] != 1:
        raise ConfigError(
            f"the mpu has sequence parallel size {sequence[0]}, which is documented but not built yet; use 1", "mpu"
        )
    if tp != 1:
        raise ConfigError(f"the mpu has model parallel size {tp}, so it needs get_data_parallel_* getters too", "mpu")
    import torch.distributed as dist

    return world_size, rank, dist.group.WORLD


def plan_mesh(axes: Iterable[Axis], world_size: int, rank: int) -> Mesh:
    """Lay `axes` over `world_size` ranks; dp takes what is left. Pure arithmetic, no communication.

    Raises ConfigError with the numbers when they do not divide.
    """
    axes = sorted(axes, key=lambda a: not a.outermost)
    outer = [a for a in axes if a.inside is None]
    folded = [a for a in axes if a.inside is not None]
    names = [a.name for a in (*outer, *folded)]
    problems = [
        Problem("", f"mesh axis {n!r} is declared twice") for n in sorted({n for n in names if names.count(n) > 1})
    ]
    problems += [
        Problem("", f"mesh axis {a.name!r} has size {a.size}; it must be at least 1")
        for a in (*outer, *folded)
        if a.size < 1
    ]
    problems += [
        Problem("", f"mesh axis {a.name!r} folds inside {a.inside!r}; only 'dp' can hold other axes")
        for a in folded
        if a.inside != "dp"
    ]
    if problems:
        raise ConfigError(problems, "mesh")
    product = math.prod(a.size for a in outer)
    shown = " x ".join(f"{a.name} {a.size}" for a in outer)
    if world_size % product:
        raise ConfigError(
            f"{shown} = {product} ranks do not divide the world of {world_size}; start a multiple of {product}", "mesh"
        )
    dp, inner = world_size // product, math.prod(a.size for a in folded)
    if dp % inner:
        inside = " x ".join(f"{a.name} {a.size}" for a in folded)
        good = ", ".join(str(d) for d in range(1, dp + 1) if dp % d == 0)
        raise ConfigError(
            f"{inside} must divide dp {dp} (world {world_size}{' / ' + shown if outer else ''}); use {good}", "mesh"
        )
    if not folded:
        return Mesh([*(a.name for a in outer), "dp"], [*(a.size for a in outer), dp], rank, {})
    parts = ("edp", *(a.name for a in folded))
    return Mesh(
        [*(a.name for a in outer), *parts],
        [*(a.size for a in outer), dp // inner, *(a.size for a in folded)],
        rank,
        {"dp": parts},
    )
