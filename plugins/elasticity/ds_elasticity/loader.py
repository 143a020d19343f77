"""An order of samples in which step k of an epoch sees the same samples at every number of
ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Sampler

from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_core.engine import LoaderRequest


class WholeBatches(Sampler[int]):
    """This rank's indices of a shuffled dataset whose length is made a multiple of the train batch.

    The end of an epoch is filled up from its beginning, or left out with ``drop_last``. Where the
    length is a multiple anyway, the order is that of torch's DistributedSampler.
    """

    def __init__(self, request: LoaderRequest, train_batch: int) -> None:
        self._request = request
        self._length = len(request.dataset)
        self.epoch = 0
        batches = (
            self._length // train_batch if request.drop_last else -(-self._length // train_batch)
        )
        self._total = batches * train_batch
        if self._total == 0:
            raise UsageError(
                f"training_data has {self._length} samples, fewer than the train batch of "
                f"{train_batch}, and "
                "dataloader_drop_last drops it; lower elasticity.max_train_batch_size, or keep the "
                "last batch"
            )

    def set_epoch(self, epoch: int) -> None:
        """Which permutation the next pass goes through."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._total // self._request.replicas

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._request.seed + self.epoch)
        order = torch.randperm(self._length, generator=generator)
        # Rank r of n reads samples r, r + n, ...: a step over all ranks covers one contiguous range
        # of the order, whatever n is.
        filled = order.repeat(-(-self._total // self._length))[: self._total]
        return iter(filled[self._request.index :: self._request.replicas].tolist())
