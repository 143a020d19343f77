"""Named coordinates of ranks (torch-free), and the grid that serves as a Megatron-style mpu.

`ProcessTopology` is arithmetic alone. `PipelineParallelGrid` takes its groups from the core's mesh
once `ds_core.initialize` has made it.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import namedtuple
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_core.mesh import Mesh


class ProcessTopology:
    """Ranks in row-major order over named axes: the last axis varies fastest."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(d < 1 for d in dims):
            raise ValueError(
                f"axes {list(axes)} with sizes {list(dims)}: one size of at least 1 for each, "
                "names once"
            )
        self.axes = list(axes)
        self.dims = list(dims)
        self.ProcessCoord = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        places = itertools.product(*map(range, self.dims))
        coords = (self.ProcessCoord(**dict(zip(self.axes, place, strict=True))) for place in places)
        self.mapping = {coord: rank for rank, coord in enumerate(coords)}

    def get_rank(self, **coords: int) -> int:
        """The rank at `coords`, which name every axis; ValueError else."""
        if set(coords) != set(self.axes):
            raise ValueError(
                f"get_rank needs each of {self.axes} once, got {sorted(coords)}; filter_match "
                "takes some"
            )
        key = self.ProcessCoord(**coords)
        if key not in self.mapping:
            raise ValueError(
                f"there is no rank at {key}; the sizes are "
                f"{dict(zip(self.axes, self.dims, strict=True))}"
            )
        return self.mapping[key]

    def get_axis_names(self) -> list[str]:
        """The axes in order."""
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """The rank's place as text, ``"model_00"``; '' when every axis is left out."""
        coord = self.get_coord(rank)
        shown = [a for a in self.axes if a not in omit_axes]
        return outer_sep.join(f"{a}{inner_sep}{getattr(coord, a):02d}" for a in shown)

    def get_dim(self, axis: str) -> int:
        """The axis's size; 0 for an unknown one."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """The rank's coordinates, a named tuple; ValueError for a rank that there is not."""
        for coord, number in self.mapping.items():
            if number == rank:
                return coord
        raise ValueError(f"rank {rank} is not in a topology of {self.world_size()}")

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Lists of ranks that differ along `axis` alone; none for an unknown axis."""
        if axis not in self.axes:
            return []
        others = [a for a in self.axes if a != axis]
        rows = []
        for place in itertools.product(*(range(self.get_dim(a)) for a in others)):
            fixed = dict(zip(others, place, strict=True))
            rows.append([self.get_rank(**fixed, **{axis: i}) for i in range(self.get_dim(axis))])
        return rows

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks with the given coordinates, in order."""
        return [
            r
            for c, r in self.mapping.items()
            if all(getattr(c, k) == v for k, v in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks with coordinate `idx` on `axis`, in order."""
        return [r for c, r in self.mapping.items() if c[self.axes.index(axis)] == idx]

    def world_size(self) -> int:
        """All ranks."""
        return math.prod(self.dims)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages of data-parallel ranks, which are next to each other."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline, data and model parallelism; ranks of a model-parallel group are neighbours."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """Coordinates of this rank, and the mpu getters.

    Groups exist once `ds_core.initialize` has bound it to the mesh.

    topology: None is data parallelism alone.
    process_group: the ranks that the topology numbers; None is the world.
    rank: None is this process's.
    """

    def __init__(
        self,
        topology: ProcessTopology | None = None,
        process_group: Any = None,
        *,
        rank: int | None = None,
    ) -> None:
        self._ranks: list[int] | None = None  # of the group: global ranks
        if topology is None or rank is None or process_group is not None:
            from ds_core import comm

            rank = comm.rank() if rank is None else rank
            size = comm.world_size()
            if process_group is not None:
                rank, size = self._place_in(process_group, rank)
            topology = PipeDataParallelTopology(1, size) if topology is None else topology
            if process_group is not None and topology.world_size() != size:
                raise UsageError(
                    f"the topology has {topology.world_size()} ranks, process_group {size}"
                )
        self._topo = topology
        self.global_rank = self._ranks[rank] if self._ranks is not None else rank
        self.world_size = topology.world_size()
        self.data_parallel_size = max(topology.get_dim("data"), 1)
        self.pipe_parallel_size = max(topology.get_dim("pipe"), 1)
        self.model_parallel_size = self.slice_parallel_size = max(topology.get_dim("model"), 1)
        self._coord = topology.get_coord(rank)
        self.stage_id = self.get_stage_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.data_parallel_id = self.get_data_parallel_id()
        self._mesh: Mesh | None = None

    def _place_in(self, group: Any, rank: int) -> tuple[int, int]:
        """(place, size) of global `rank` in `group`."""
        from torch.distributed import get_process_group_ranks

        self._ranks = list(get_process_group_ranks(group))
        if rank not in self._ranks:
            raise UsageError(
                f"PipelineParallelGrid: rank {rank} is not in process_group, which has "
                f"{self._ranks}"
            )
        return self._ranks.index(rank), len(self._ranks)

    def bind(self, mesh: Mesh | None) -> None:
        """Take groups from `mesh` from now on; None: there are none, the run has ended."""
        self._mesh = mesh

    def __deepcopy__(self, memo: Any) -> PipelineParallelGrid:
        """The copy has the same groups, which cannot be copied."""
        return copy.copy(self)

    def _group(self, *axes: str) -> Any:
        if self._mesh is None:
            raise UsageError(
                "the grid has process groups once ds_core.initialize has been called with the "
                "module, without mpu="
            )
        return self._mesh.group(*(a for a in axes if self._mesh.has(a)))

    @property
    def topology(self) -> ProcessTopology:
        """The arithmetic."""
        return self._topo

    def get_stage_id(self) -> int:
        """This rank's stage."""
        return int(getattr(self._coord, "pipe", 0))

    def get_data_parallel_id(self) -> int:
        """This rank's place among its stage's data-parallel ranks."""
        return int(getattr(self._coord, "data", 0))

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The global rank at another stage, else where this one is (or at `kwargs`)."""
        rank: int = self._topo.get_rank(**{**self._coord._asdict(), "pipe": stage_id, **kwargs})
        return self._ranks[rank] if self._ranks is not None else rank

    # -- the mpu contract --------------------------------------------------------------------------

    def get_global_rank(self) -> int:
        """This process's rank."""
        return self.global_rank

    def get_pipe_parallel_rank(self) -> int:
        """The stage."""
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """The number of stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        """The ranks that make up one pipeline with this one."""
        return self._group("pp")

    def get_data_parallel_rank(self) -> int:
        """See `get_data_parallel_id`."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """The number of replicas of this stage."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        """The replicas of this stage."""
        return self._group("dp")

    def get_model_parallel_rank(self) -> int:
        """The place among tensor-parallel ranks."""
        return int(getattr(self._coord, "model", 0))

    def get_model_parallel_world_size(self) -> int:
        """The number of tensor-parallel ranks."""
        return self.model_parallel_size

    def get_model_parallel_group(self) -> Any:
        """The tensor-parallel ranks."""
        return self._group("tp")

    # Tensor slicing is what the model axis is for; these are its names in later Megatron versions.
    get_slice_parallel_rank = get_tensor_model_parallel_rank = get_model_parallel_rank
    get_slice_parallel_world_size = get_tensor_model_parallel_world_size = (
        get_model_parallel_world_size
    )
    get_slice_parallel_group = get_tensor_model_parallel_group = get_model_parallel_group
