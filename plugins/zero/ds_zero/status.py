"""Where the weight of a partitioned parameter is now, as ``param.ds_status`` tells (torch-free)."""

from __future__ import annotations

import enum

__all__ = ["ZeroParamStatus"]


class ZeroParamStatus(enum.Enum):
    """AVAILABLE: the parameter is whole. NOT_AVAILABLE: it is empty, each rank has a part. INFLIGHT: being gathered."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3
