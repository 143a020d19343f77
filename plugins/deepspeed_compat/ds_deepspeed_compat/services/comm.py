"""``deepspeed.comm``: torch.distributed's calls with DeepSpeed's arguments, made through ds_core's
collectives.

So interceptors, such as those of dscore-comms-logger and dscore-comms-guard, see them; but for `gather`,
`scatter` and messages between two ranks, which are torch's own. `prof`, `log_name` and `debug` are
taken as documented and have no effect: the section ``comms_logger`` decides what is logged.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    P2POp,
    ProcessGroup,
    ReduceOp,
    is_available,
    new_group,
)

from ds_core import comm

__all__ = [
    "P2POp",
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "monitored_barrier",
    "mpi_discovery",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]
"""DeepSpeed's names, which `torch_backend` offers, too."""


def _takes(position: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function take ``prof``, ``log_name`` and ``debug`` too, by keyword or from `position`
    on, and drop them.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(
            *args: Any, prof: bool = False, log_name: str = "", debug: Any = None, **kwargs: Any
        ) -> Any:
            return function(*args[:position], **kwargs)

        return call

    return wrap


# -- groups and ranks ------------------------------------------------------------------------------


def is_initialized() -> bool:
    """Whether a process group is running."""
    return comm.is_initialized()


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """End a process group; None: all."""
    dist.destroy_process_group(group)


def get_rank(group: ProcessGroup | None = None) -> int:
    """This process's place in `group`; -1 when it is no member."""
    return comm.rank(group)


def get_world_size(group: ProcessGroup | None = None) -> int:
    """The number of ranks in `group`; -1 when this process is no member."""
    return comm.world_size(group)


def get_local_rank() -> int:
    """This process's number on its machine."""
    return comm.local_rank()


def get_world_group() -> ProcessGroup | None:
    """The group of all ranks; None when no process group is running."""
    return dist.group.WORLD


def get_global_rank(group: ProcessGroup | None = None, group_rank: int = 0) -> int:
    """The rank among all of rank `group_rank` of `group`."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """The ranks of a group, in its order."""
    return list(range(comm.world_size())) if group is None else dist.get_process_group_ranks(group)


def mpi_discovery(distributed_port: int = 29500, verbose: bool = True) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as the job's launcher (MPI,
    Slurm ...) has them.
    """
    found = comm.find_rendezvous(os.environ, port=distributed_port, collective=True)
    if found is not None:
        values = {
            "RANK": found.rank,
            "WORLD_SIZE": found.world_size,
            "LOCAL_RANK": comm.local_rank(),
        }
        os.environ.update({name: str(value) for name, value in values.items()})
        os.environ["MASTER_ADDR"] = found.address
        os.environ["MASTER_PORT"] = str(found.port)


# -- collectives -----------------------------------------------------------------------------------


@_takes(4)
def all_reduce(
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce `tensor` over the ranks, into every rank's own."""
    return comm.all_reduce(tensor, op, group, async_op)


@_takes(4)
def inference_all_reduce(
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """`all_reduce`; the tensor, or with `async_op` a work."""
    work = comm.all_reduce(tensor, op, group, async_op)
    return work if async_op else tensor


@_takes(4)
def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce each of `tensors`."""
    return _together([comm.all_reduce(tensor, op, group, async_op) for tensor in tensors], async_op)


@_takes(5)
def reduce(
    tensor: Tensor,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce `tensor` over the ranks, into that of `dst`."""
    return comm.reduce(tensor, dst, op, group, async_op)


@_takes(5)
def reduce_scatter_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce `tensor` over the ranks and give each its share of the result."""
    return comm.reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


reduce_scatter_fn = reduce_scatter_tensor


@_takes(5)
def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce the tensors of `input_list` over the ranks; rank i gets the i-th."""
    return comm.reduce_scatter_tensor(
        output, torch.cat([t.reshape(-1) for t in input_list]), op, group, async_op
    )


@_takes(4)
def broadcast(
    tensor: Tensor, src: int, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Give every rank the tensor of `src`."""
    return comm.broadcast(tensor, src, group, async_op)


@_takes(4)
def all_gather(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Gather every rank's `tensor` into `tensor_list`."""
    # One collective over one tensor, as interceptors know it; then copies into the list.
    flat = tensor.new_empty(len(tensor_list) * tensor.numel())
    work = comm.all_gather_into_tensor(flat, tensor, group, async_op)
    return _hand_out(flat, tensor_list, work, async_op)


@_takes(4)
def all_gather_into_tensor(
    output_tensor: Tensor, tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Gather every rank's `tensor` into one."""
    return comm.all_gather_into_tensor(output_tensor, tensor, group, async_op)


@_takes(4)
def allgather_fn(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """`all_gather_into_tensor`."""
    return comm.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


@_takes(4)
def all_gather_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """`all_gather_into_tensor` for each pair."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    return _together(
        [comm.all_gather_into_tensor(out, into, group, async_op) for out, into in pairs], async_op
    )


@_takes(6)
def all_to_all_single(
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Send each rank its rows of `tensor`, and receive one's own of every rank into `output`."""
    return comm.all_to_all_single(
        output, tensor, output_split_sizes, input_split_sizes, group, async_op
    )


@_takes(4)
def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Send the i-th tensor to rank i, and receive one of each rank."""
    # The tensors of a list may have any shapes, so they travel flat.
    sizes = [[t.numel() for t in tensors] for tensors in (output_tensor_list, input_tensor_list)]
    output = output_tensor_list[0].new_empty(sum(sizes[0]))
    sent = torch.cat([t.reshape(-1) for t in input_tensor_list])
    work = comm.all_to_all_single(output, sent, sizes[0], sizes[1], group, async_op)
    return _hand_out(output, output_tensor_list, work, async_op)


def _hand_out(flat: Tensor, targets: Sequence[Tensor], work: Any, async_op: bool) -> Any:
    """Copy `flat` into `targets`, one after the other, when `work` is done."""

    def copy() -> None:
        for target, piece in zip(targets, flat.split([t.numel() for t in targets]), strict=True):
            target.detach().copy_(piece.view_as(target))

    if async_op:
        return comm.AfterWork([work] if work is not None else [], copy)
    copy()
    return None


@_takes(5)
def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Gather every rank's `tensor` into the list of `dst`."""
    # One process may have no process group at all.
    if comm.world_size(group) == 1:
        for target in gather_list or ():
            target.copy_(tensor)
        return _together([], async_op)
    return dist.gather(
        tensor, None if gather_list is None else list(gather_list), dst, group, async_op
    )


@_takes(5)
def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Give each rank its tensor of the list of `src`."""
    if comm.world_size(group) == 1:
        for source in scatter_list or ():
            tensor.copy_(source)
        return _together([], async_op)
    return dist.scatter(
        tensor, None if scatter_list is None else list(scatter_list), src, group, async_op
    )


@_takes(2)
def barrier(
    group: ProcessGroup | None = None, async_op: bool = False, device_ids: Any = None
) -> Any:
    """Return when every rank has called it."""
    return comm.barrier(group, async_op)


@_takes(3)
def monitored_barrier(
    group: ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """A barrier that names the ranks that do not come (gloo only, as torch's)."""
    if comm.world_size(group) > 1:
        dist.monitored_barrier(group, timeout, wait_all_ranks)


@_takes(4)
def send(tensor: Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """Send to rank `dst`."""
    dist.send(tensor, dst, group, tag)


@_takes(4)
def recv(
    tensor: Tensor, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0
) -> int:
    """Receive from rank `src`; gives the sender."""
    return int(dist.recv(tensor, src, group, tag))


@_takes(4)
def isend(tensor: Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> Any:
    """Start to send; ``wait()`` on what it gives."""
    return dist.isend(tensor, dst, group, tag)


@_takes(4)
def irecv(
    tensor: Tensor, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0
) -> Any:
    """Start to receive; ``wait()`` on what it gives."""
    return dist.irecv(tensor, src, group, tag)


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Any]:
    """Start all of torch's P2POps at once."""
    return dist.batch_isend_irecv(list(p2p_op_list))


# -- objects ---------------------------------------------------------------------------------------


def broadcast_object_list(
    object_list: list[Any], src: int = 0, group: ProcessGroup | None = None, device: Any = None
) -> None:
    """Replace the objects of every rank by those of `src`. They travel as JSON."""
    # An object that JSON would change is an error where it is, on the sender.
    if comm.rank() == src:
        _as_json(object_list, "broadcast_object_list")
    place = src if group is None else dist.get_group_rank(group, src)
    object_list[:] = comm.all_gather_json(object_list if comm.rank() == src else None, group)[place]


def all_gather_object(object_list: list[Any], obj: Any, group: ProcessGroup | None = None) -> None:
    """Gather every rank's object into `object_list`. They travel as JSON."""
    object_list[:] = comm.all_gather_json(_as_json(obj, "all_gather_object"), group)


def _as_json(value: Any, who: str) -> Any:
    """`value`, if it comes back from JSON as it was; TypeError else."""
    if _is_plain(value):
        return value
    raise TypeError(
        f"{who}: nothing is pickled here, and {value!r:.200} is more than lists, dicts with text "
        "keys, text, numbers, "
        "booleans and None; send tensors by broadcast or all_gather, or call torch.distributed "
        "yourself"
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (str, int, float, bool)


# -- what torch offers -----------------------------------------------------------------------------


def has_all_gather_into_tensor() -> bool:
    """Always."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """Always."""
    return True


def has_all_reduce_coalesced() -> bool:
    """Always."""
    return True


def has_coalescing_manager() -> bool:
    """Always."""
    return True


def _together(works: list[Any], async_op: bool) -> Any:
    return comm.AfterWork([w for w in works if w is not None]) if async_op else None
