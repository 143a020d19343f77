"""What `dscore plan` says of ZenFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ds_plan import Kinds, join

from ds_zero.zenflow.columns import count_of

if TYPE_CHECKING:
    import torch

    from ds_zero.config import ZenFlowConfig
    from ds_zero.planning.buckets import SimulatedBucket

    DtypeOf = Callable[[SimulatedBucket], torch.dtype]


def held(
    trained: Sequence[SimulatedBucket],
    keys: ZenFlowConfig,
    kept: Callable[[torch.dtype], int],
    rank: int,
    master: DtypeOf,
    grad: DtypeOf,
) -> tuple[Kinds, Kinds]:
    """What is on the device, and on the host beside masters and states.

    On the device chosen elements and their states; on the host sums of gradients, and the last one.

    kept: bytes of the optimizer's states per element of a dtype.
    master, grad: the dtypes of masters and of reduced gradients.
    """
    parts = states = sums = arrived = never = 0
    for bucket in trained:
        size = bucket.layout.shard_numel
        own = master(bucket)
        for index, param in enumerate(bucket.params):
            span = bucket.layout.span(index, rank)
            columns = param.shape[-1] if param.dim() > 1 else 0
            wanted = count_of(columns, keys.topk_ratio)
            share = wanted / columns if columns > wanted else 1.0
            chosen = round((span.stop - span.start) * share)
            parts = parts + chosen * own.itemsize
            states = states + chosen * kept(own)
            never += (
                (span.stop - span.start) * kept(own)
                if share == 1 and not keys.full_warm_up_rounds
                else 0
            )
        sums += size * max(own.itemsize, 4) * (2 if keys.overlap_step else 1)
        arrived += size * grad(bucket).itemsize
    device = Kinds(masters=parts, states=states)
    host = Kinds(gradients=sums + arrived, states=-never)  # no step there, no state
    return (Kinds(cast=device.resting), join(host, device)) if keys.offload else (device, host)
