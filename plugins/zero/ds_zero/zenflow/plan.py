"""What `dscore plan` says of ZenFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds_plan import Kinds, join

from ds_zero.zenflow.columns import count_of

if TYPE_CHECKING:
    from ds_zero.config import ZenFlowConfig
    from ds_zero.planning.buckets import SimulatedBucket
    from ds_zero.planning.states import RankStates


def held(
    trained: Sequence[SimulatedBucket], keys: ZenFlowConfig, rank_states: RankStates
) -> tuple[Kinds, Kinds]:
    """What is on the device, and on the host beside masters and states.

    On the device chosen elements and their states; on the host sums of gradients, and the last one.
    """
    parts = states = sums = arrived = never = 0
    for bucket in trained:
        size = bucket.layout.shard_numel
        own = rank_states.dtypes.master(bucket)
        kept = rank_states.run.kept(own)
        for index, param in enumerate(bucket.params):
            span = bucket.layout.span(index, rank_states.rank)
            here = span.numel
            columns = param.shape[-1] if param.dim() > 1 else 0
            wanted = count_of(columns, keys.topk_ratio)
            share = wanted / columns if columns > wanted else 1.0
            chosen = round(here * share)
            parts += chosen * own.itemsize
            states += chosen * kept
            if share == 1 and not keys.full_warm_up_rounds:
                never += here * kept
        sums += size * max(own.itemsize, 4) * (2 if keys.overlap_step else 1)
        arrived += size * rank_states.dtypes.grad(bucket).itemsize
    device = Kinds(masters=parts, states=states)
    host = Kinds(gradients=sums + arrived, states=-never)  # no step there, no state
    return (Kinds(cast=device.resting), join(host, device)) if keys.offload else (device, host)
