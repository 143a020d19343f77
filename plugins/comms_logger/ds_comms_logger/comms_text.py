"""Small functions of ``deepspeed.utils.comms_logging``: sizes as text, and bandwidths."""

from __future__ import annotations

import math
import sys

from ds_core import comm

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")
_GATHERED = {"all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"}
_REDUCED = {"all_reduce", "all_reduce_coalesced", "inference_all_reduce"}
_EXCHANGED = {"all_to_all", "all_to_all_single"}
_SENT = {
    *("send", "recv", "isend", "irecv", "batch_isend_irecv", "broadcast", "broadcast_object_list"),
    *("reduce", "gather", "scatter", "barrier"),
}


def get_caller_func(frame: int = 3) -> str:
    """The name of the function that many calls up; "" above the first."""
    found = sys._getframe()
    for _ in range(frame):
        if found.f_back is None:
            return ""
        found = found.f_back
    return found.f_code.co_name


def convert_size(size_bytes: float) -> str:
    """``"1.5 KB"``, in powers of 1024."""
    if size_bytes == 0:
        return "0B"
    power = int(math.log(size_bytes, 1024))
    return f"{round(size_bytes / 1024**power, 2)} {_UNITS[power]}"


def calc_bw_log(comm_op: str, size: float, duration: float) -> tuple[float, float]:
    """The algorithm's and the bus's bandwidth of a collective, in Mbit per unit of `duration`.

    size: bytes that one rank gives. The bus's is what links between ranks carry (NVIDIA's
        nccl-tests, PERFORMANCE.md).

    Raises ValueError for a name that is no collective's.
    """
    ranks = comm.world_size()
    others = (ranks - 1) / ranks
    if comm_op in _EXCHANGED:
        algorithm = size
        bus = size * others
    elif comm_op in _GATHERED:
        algorithm = size * ranks
        bus = size * ranks * others
    elif comm_op in _REDUCED:
        algorithm = size * 2
        bus = size * 2 * others
    elif comm_op in _SENT:
        algorithm = bus = size
    else:
        raise ValueError(
            f"{comm_op!r} is no collective; it is one of "
            f"{sorted(_EXCHANGED | _GATHERED | _REDUCED | _SENT)}"
        )
    megabits = 8 / 1e6 / duration
    return algorithm * megabits, bus * megabits
