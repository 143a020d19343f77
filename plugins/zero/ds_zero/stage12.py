"""Stages 1 and 2: weights are replicated; optimizer states (and, in stage 2, gradients) are
sharded.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ds_zero.base import ZeroPartitioner
from ds_zero.buckets.flat import FlatBucket
from ds_zero.buckets.make import make_buckets


class Stage12(ZeroPartitioner):
    """Module parameters are views of flat buffers, into which the step's result is all-gathered."""

    def _lay_out(self, module: nn.Module, params: Sequence[nn.Parameter]) -> list[FlatBucket]:
        placement = self.offload.placements(params)
        # One large bucket is complete at the end of backward: nothing of it could overlap.
        small = self.section.stage == 2 or self.section.overlap
        return make_buckets(
            params, self.ctx, self.section.bucket_elements, placement=placement, small_on_host=small
        )

    def publish(self) -> None:
        """See `Partitioner.publish`; unused buckets have not changed."""
        changed = [b for b in self.buckets if self.updates.changed(b)]
        self._update_shards(changed)
        self._gather_weights(changed)
        if self.section.enable_sanity_checks:
            self._check_equal(changed)
