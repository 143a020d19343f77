"""The values of ``param.ds_status``: where the weight of a partitioned parameter is now
(torch-free).
"""

from __future__ import annotations

import enum


class ZeroParamStatus(enum.Enum):
    """AVAILABLE: unsharded.

    NOT_AVAILABLE: the parameter is empty, each rank has a shard. INFLIGHT: being gathered.
    """

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3
