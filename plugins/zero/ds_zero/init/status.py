"""The values of ``param.ds_status``: where the weight of a partitioned parameter is now.

Declared without torch.
"""

from __future__ import annotations

import enum


class ZeroParamStatus(enum.Enum):
    """Where a weight is; DeepSpeed's names and values."""

    # Unsharded.
    AVAILABLE = 1
    # The parameter is empty, each rank has a shard.
    NOT_AVAILABLE = 2
    # Being gathered.
    INFLIGHT = 3
