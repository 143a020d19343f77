"""The dtypes of a bucket's masters, gradients and messages, as training chooses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import nn

from ds_core.precision import Precision, wire_dtypes
from ds_zero.buckets.sizes import choose_dtype
from ds_zero.gather.scheduler import narrower_dtype

if TYPE_CHECKING:
    from ds_zero.planning.buckets import SimulatedBucket


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtypes under one precision."""

    precision: Precision

    autocast: Mapping[nn.Parameter, torch.dtype]
    """Parameters that are used, and whose gradients are sent, in the dtype of autocast."""

    @classmethod
    def of(cls, module: nn.Module, precision: Precision) -> Dtypes:
        """Those of the parameters of `module`."""
        if not precision.autocast:
            return cls(precision, {})
        return cls(precision, wire_dtypes(module, precision.autocast, precision.autocast_modules))

    def master(self, bucket: SimulatedBucket) -> torch.dtype:
        """Of what the optimizer updates."""
        return choose_dtype(bucket.dtype, self.precision.master)

    def grad(self, bucket: SimulatedBucket) -> torch.dtype:
        """In which gradients accumulate on the device."""
        return choose_dtype(bucket.dtype, self.precision.accumulate)

    def reduced(self, bucket: SimulatedBucket) -> torch.dtype:
        """In which gradients are sent: the widest that any parameter asks for, as in `Reducer`."""
        wanted = [self.autocast.get(p) or self.precision.wire or p.dtype for p in bucket.params]
        return reduce(torch.promote_types, wanted)

    def gathered(self, bucket: SimulatedBucket) -> torch.dtype:
        """In which weights are gathered."""
        return narrower_dtype(bucket.params, bucket.dtype, self.autocast) or bucket.dtype
