"""Indices of samples of similar length, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ds_core.data import LoaderRequest


class ByLength(torch.utils.data.Sampler[int]):
    """It depends on `replicas` and `index`, not on the rank: ranks with one index get the same batches."""

    def __init__(self, request: LoaderRequest) -> None:
        self.request, self.epoch = request, 0
        self.block = request.batch_size * request.replicas

    def __len__(self) -> int:
        return len(self.request.dataset) // self.block * self.request.batch_size

    def set_epoch(self, epoch: int) -> None:
        """The next pass is that epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        data, block = self.request.dataset, self.block
        order = sorted(range(len(data)), key=lambda i: len(data[i]))
        generator = torch.Generator().manual_seed(self.request.seed + self.epoch)
        for first in torch.randperm(len(data) // block, generator=generator).tolist():
            yield from order[first * block : (first + 1) * block][self.request.index :: self.request.replicas]
