"""Stages 1 and 2: weights stay whole on every rank; optimizer states (and, in stage 2, gradients) are partitioned."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ds_zero.base import ZeroPartitioner
from ds_zero.flat import FlatBucket, make_buckets

__all__ = ["Stage12"]


class Stage12(ZeroPartitioner):
    """Module parameters are views of flat buffers, into which the step's result is all-gathered."""

    def _lay_out(self, module: nn.Module, params: Sequence[nn.Parameter]) -> list[FlatBucket]:
        home, brief = self.offload.homes(params), self.section.stage == 2
        return make_buckets(params, self.ctx, self.section.bucket_elements, home=home, brief=brief)

    def publish(self) -> None:
        """See `Partitioner.publish`; buckets that nobody used have not changed."""
        changed = [b for b in self.buckets if self.reducer.used(b)]
        self._send(changed)
        self._spread(changed)
        if self.section.enable_sanity_checks:
            self._check_equal(changed)
