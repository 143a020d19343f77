"""The named process grid: axis arithmetic (torch-free) and the groups over it.

Ranks are laid out row-major: axes that are `outermost`, then ``dp`` (``edp`` and the axes that fold
inside it), then all others. All groups are made up front, in one order, on every rank: making a
group is itself a collective.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ds_core import comm
from ds_core.comm import ALONE
from ds_core.entries import Axis
from ds_core.errors import ConfigError, Problem
from ds_core.moved import names_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__getattr__ = names_of(__name__)


class Mesh:
    """Where this rank stands on each axis, and the groups along any set of axes.

    ``dp`` is an alias of all its parts, ``batch`` of those whose ranks get other samples
    (`Axis.same_batch`). A group over axes of size 1 is `ALONE`, over which collectives do nothing.
    """

    names: tuple[str, ...]
    """The axes of the grid, the outermost first."""
    shape: tuple[int, ...]
    """Their sizes; the product is the world size."""
    alias: dict[str, tuple[str, ...]]
    """Name -> the axes of the grid that it stands for."""
    coord: dict[str, int]
    """This rank's position on each axis."""

    def __init__(
        self,
        names: Sequence[str],
        shape: Sequence[int],
        rank: int,
        alias: dict[str, tuple[str, ...]],
    ) -> None:
        self.names = tuple(names)
        self.shape = tuple(shape)
        self.rank = rank
        self.world_size = math.prod(self.shape)
        self.alias = dict.fromkeys(("dp", "batch"), alias.get("dp", ("dp",))) | alias
        self.coord = dict(zip(self.names, self._places()[rank], strict=True))
        self._groups: dict[tuple[str, ...], ProcessGroup] = {}
        # Those that `close` destroys.
        self._made: list[ProcessGroup] = []
        self._ranks: dict[tuple[str, ...], list[int]] = {}  # along those axes

    def expand(self, axes: Iterable[str]) -> tuple[str, ...]:
        """`axes` with aliases replaced by their parts, in grid order, without those of size 1."""
        wanted = {part for axis in axes for part in self.alias.get(axis, (axis,))}
        if unknown := wanted - set(self.names):
            raise KeyError(
                f"no mesh axis {sorted(unknown)}; this mesh has "
                f"{list(self.names) + list(self.alias)}"
            )
        return tuple(n for n, size in self.describe().items() if n in wanted and size > 1)

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
        key = self.expand(axes)
        if key not in self._ranks:
            self._ranks[key] = next(row for row in self._rows(key) if self.rank in row)
        return list(self._ranks[key])

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
        """Make every group and open its transport.

        Collective over the world; torch.distributed must be initialised.

        own: a separate group also where the default group would do, which no other code uses.
        """
        import torch.distributed as dist

        live = self.expand(self.names)
        for count in range(1, len(live) + 1):
            for combo in itertools.combinations(live, count):
                # The default group has all ranks, and is there already.
                if len(combo) == len(live) and not own:
                    world = dist.group.WORLD
                    assert world is not None
                    self._groups[combo] = world
                    continue
                self._groups[combo] = self._new_group(self._rows(combo), timeout)
        for group in self.groups():
            comm.open_transport(group)

    def own_group(self, *axes: str, only: Sequence[int] | None = None) -> ProcessGroup:
        """Make another process group along `axes`, for this caller alone, and open its transport.

        Collective over the world: all ranks give the same arguments. Messages on it meet no others.
        It lives as long as the mesh; who needs it no longer may destroy it before, with
        ``torch.distributed.destroy_process_group``.

        only: the positions along `axes` that take part; None: all. Gives `ALONE` on ranks that are
        alone in it.
        """
        rows = self._rows(self.expand(axes))
        own = self._new_group(rows if only is None else [[row[i] for i in only] for row in rows])
        comm.open_transport(own)
        return own

    def describe(self) -> dict[str, int]:
        """Axis name -> size, for logs, fingerprints and manifests."""
        return dict(zip(self.names, self.shape, strict=True))

    def _new_group(self, rows: Iterable[Sequence[int]], timeout: Any = None) -> ProcessGroup:
        """Make a group of each row, and give the one that this rank is in; `ALONE` when there is
        none.
        """
        import torch.distributed as dist

        own = ALONE
        # Every rank makes every group, also those that it is not in: torch demands it.
        for row in rows:
            if len(row) > 1:
                group = dist.new_group(list(row), timeout=timeout)
                own = group if self.rank in row else own
        if own is not ALONE:
            self._made.append(own)
        return own

    def close(self) -> None:
        """Destroy the groups that this mesh has made.

        torch keeps a group, with its threads and connections, until it is destroyed. All ranks call
        it, but none waits for others.
        """
        import torch.distributed as dist

        while self._made:
            # Who made the group may have destroyed it, or all groups.
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(self._made.pop())
        self._groups.clear()

    def _rows(self, combo: tuple[str, ...]) -> list[list[int]]:
        """The ranks of every group along `combo`, in the same order on all ranks."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(self._places()):
            # Ranks of one group differ along `combo` only.
            rest = tuple(c for n, c in zip(self.names, place, strict=True) if n not in combo)
            rows.setdefault(rest, []).append(rank)
        return list(rows.values())

    def _places(self) -> list[tuple[int, ...]]:
        """The position of each rank on all axes."""
        return list(itertools.product(*map(range, self.shape)))


def plan_mesh(axes: Iterable[Axis], world_size: int, rank: int) -> Mesh:
    """Lay `axes` over `world_size` ranks; dp takes what is left. Pure arithmetic, no communication.

    Raises ConfigError with the numbers when they do not divide.
    """
    axes = sorted(axes, key=lambda a: not a.outermost)
    outer = [a for a in axes if a.inside is None]
    folded = [a for a in axes if a.inside is not None]
    names = [a.name for a in axes]
    wrong = [f"{n!r} is declared twice" for n in sorted({n for n in names if names.count(n) > 1})]
    wrong += [f"{a.name!r} has size {a.size}; it must be at least 1" for a in axes if a.size < 1]
    wrong += [
        f"{a.name!r} folds inside {a.inside!r}; only 'dp' can hold other axes"
        for a in folded
        if a.inside != "dp"
    ]
    if wrong:
        raise ConfigError([Problem("", f"mesh axis {text}") for text in wrong], "mesh")
    product = math.prod(a.size for a in outer)
    shown = " x ".join(f"{a.name} {a.size}" for a in outer)
    if world_size % product:
        raise ConfigError(
            f"{shown} needs a multiple of {product} processes; there are {world_size}",
            "mesh",
        )
    around = [a for a in folded if a.outermost]
    within = math.prod(a.size for a in folded[len(around) :])
    parted = [*(replace(a, size=a.size // within) for a in around), *folded[len(around) :]]
    dp = world_size // product
    inner = math.prod(a.size for a in parted)
    if not inner or dp % inner or any(a.size % within for a in around):
        inside = " x ".join(f"{a.name} {a.size}" for a in folded)
        good = ", ".join(
            str(d) for d in range(1, dp + 1) if dp % d == 0 and not (around and d % within)
        )
        raise ConfigError(
            f"{inside} must divide dp {dp} (world {world_size}{' / ' + shown if outer else ''}); "
            f"use {good}",
            "mesh",
        )
    parts = [Axis("edp" if folded else "dp", dp // inner), *parted]
    grid = [*(a for a in outer if a.outermost), *parts, *(a for a in outer if not a.outermost)]
    alias = {
        "batch": tuple(a.name for a in parts if not a.same_batch),
        "dp": tuple(a.name for a in parts),
    }
    return Mesh([a.name for a in grid], [a.size for a in grid], rank, alias)
