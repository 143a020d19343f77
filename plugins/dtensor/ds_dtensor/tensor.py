"""`PieceTensor`: a DTensor whose elements on a rank are any boxes of the whole, as ZeRO cuts them.

torch's placements describe equal chunks of one dimension. Ranges of flattened parameters are none,
so a `PieceTensor` has a placement of its own, `Pieces`, and does itself what depends on it:
`full_tensor`, `redistribute`, norms, arithmetic (`ds_dtensor.ops`), and what torch's distributed
checkpoint asks for: which boxes there are, and their memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from ds_run_state.slices import Box
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ds_core import comm
from ds_core.errors import UsageError
from ds_core.process import log_once
from ds_dtensor.layout import Window, contiguous
from ds_dtensor.ops import device_of, run, wrapped

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


log = logging.getLogger("ds_dtensor")

_PICKLED = (
    "a PieceTensor is being pickled, as by torch.save: it has this rank's elements only (the first "
    "is of shape %s). For one file with full weights use engine.save_16bit_model, or "
    "get_model_state_dict with StateDictOptions(full_state_dict=True); for files that any number "
    "of ranks reads use torch.distributed.checkpoint.save"
)


class Pieces(Replicate):
    """The placement of a `PieceTensor`: each rank has the boxes that the tensor itself names.

    torch's code that cuts a full tensor by placements leaves it whole, as for its parent class, and
    the piece is taken where the values are loaded.
    """

    def is_replicate(self) -> bool:
        """A rank does not have all of it."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pieces)

    def __hash__(self) -> int:
        return hash(Pieces)

    def __repr__(self) -> str:
        return "Pieces()"

    __str__ = __repr__


class PieceTensor(DTensor):
    """This rank's elements of a tensor, in their own memory. Made by `PieceTensor.of`.

    windows: the boxes that are here.
    counts: whether norms and sums count the elements here; of ranks with the same ones, one does.
    """

    windows: tuple[Window, ...]
    counts: bool

    @classmethod
    def of(
        cls,
        local: Tensor,
        shape: Sequence[int],
        windows: Sequence[Window],
        mesh: DeviceMesh,
        *,
        counts: bool,
    ) -> PieceTensor:
        """A view: `local` is this rank's memory, which is not copied."""
        meta = TensorMeta(torch.Size(shape), contiguous(shape), local.dtype)
        spec = DTensorSpec(mesh, (Pieces(),), tensor_meta=meta)
        made = wrapped(cls, local, spec)
        made.windows = tuple(windows)
        made.counts = counts
        return made

    def like(self, local: Tensor) -> PieceTensor:
        """`local`, laid out as this one's elements."""
        return PieceTensor.of(local, self.shape, self.windows, self.device_mesh, counts=self.counts)

    def same_layout(self, other: DTensor) -> bool:
        """Whether both have the same elements on this rank, in the same order."""
        return (
            isinstance(other, PieceTensor)
            and other.shape == self.shape
            and other.windows == self.windows
        )

    def views(self) -> list[Tensor]:
        """The memory of each of `windows`."""
        local = self._local_tensor
        begin = int(local.storage_offset())
        return [local.as_strided(w.box.size, w.stride, begin + w.offset) for w in self.windows]

    def fill(self, full: Tensor) -> None:
        """Copy what is here of `full`, a plain tensor of the whole shape."""
        for window, view in zip(self.windows, self.views(), strict=True):
            view.copy_(full[window.box.slices()])

    # -- DTensor -----------------------------------------------------------------------------------

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """This rank's elements, flat; maybe none."""
        return _Local.of(self)

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The full tensor, on the mesh's device. Collective over the mesh.

        Bits are added to zeros, so that every value comes as it is.
        """
        full = torch.zeros(self.shape, dtype=self.dtype, device=device_of(self))
        if self.counts:
            for window, view in zip(self.windows, self.views(), strict=True):
                full[window.box.slices()].copy_(view)
        comm.all_reduce(full.view(-1).view(torch.uint8))
        return full

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """A DTensor with torch's placements, from the whole one. Collective over the mesh."""
        mesh = self.device_mesh if device_mesh is None else device_mesh
        if placements is None:
            raise UsageError("redistribute: give placements, one for each dimension of the mesh")
        if all(isinstance(p, Pieces) for p in placements):
            return self
        full = self.full_tensor()
        whole = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim)
        return whole.redistribute(mesh, placements, **options)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it with the function, too
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(PieceTensor, func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = ", ".join(f"{w.box.size} at {w.box.first}" for w in self.windows)
        return (
            f"PieceTensor(shape={tuple(self.shape)}, dtype={self.dtype}, here: {held or 'nothing'})"
        )

    # -- copies ------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> PieceTensor:
        if id(self) not in memo:
            memo[id(self)] = self.like(self._local_tensor.clone())
        found: PieceTensor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        log_once(log, logging.WARNING, _PICKLED, tuple(self.shape))
        rows = [(w.box.first, w.box.size, w.stride, w.offset) for w in self.windows]
        return restored, (self._local_tensor.clone(), tuple(self.shape), rows, self.counts)

    # -- torch.distributed.checkpoint --------------------------------------------------------------

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(w.box.first), torch.Size(w.box.size))
            for w in self.windows
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for window, view in zip(self.windows, self.views(), strict=True):
            if index.offset is None or tuple(index.offset) == window.box.first:
                return view
        raise ValueError(f"{index.fqn}: this rank has no elements at {index.offset}")


def whole(tensor: Tensor) -> Tensor:
    """The whole of any tensor, as a plain one. Collective for a DTensor that is spread."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    # What torch has cut by our placement is whole on each rank, see `Pieces`.
    cut = any(isinstance(p, Pieces) for p in tensor.placements)
    if cut and not isinstance(tensor, PieceTensor):
        return tensor._local_tensor
    found: Tensor = tensor.full_tensor()
    return found


class _Local(Tensor):
    """A rank's elements as a flat tensor, which also takes a full tensor.

    torch's loading of full state dicts copies what placements leave of one, see `Pieces`.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    whole: PieceTensor

    @classmethod
    def of(cls, whole: PieceTensor) -> _Local:
        made = whole._local_tensor.as_subclass(cls)
        made.whole = whole
        return made

    def copy_(self, src: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy `src`, of this rank's elements or of the whole shape."""
        if src.shape == self.whole.shape and not isinstance(src, _Local):
            self.whole.fill(src)
            return self
        return super().copy_(src, non_blocking)


def restored(
    local: Tensor, shape: tuple[int, ...], rows: Sequence[Any], counts: bool
) -> PieceTensor:
    """The view again, on the ranks of now, of which there must be as many."""
    if not dist.is_initialized():
        raise UsageError(
            "a PieceTensor was pickled by one of several ranks; read it where they run, or save by "
            "torch.distributed.checkpoint.save"
        )
    mesh = init_device_mesh(local.device.type, (dist.get_world_size(),), mesh_dim_names=("ranks",))
    found = [Window(Box(first, size), stride, offset) for first, size, stride, offset in rows]
    return PieceTensor.of(local, shape, found, mesh, counts=counts)
