"""Several datasets in given proportions: one dataset, and the order in which its parts come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset

from ds_core.errors import UsageError
from ds_data_sampling.batching.order import Planned


def concatenated(data: Any, weights: Mapping[str, float]) -> ConcatDataset[Any]:
    """The datasets that `weights` names, one after the other, in the order of `weights`.

    data: a mapping of names to datasets, or a list of them, whose names are their places ("0",
    "1", ...).
    """
    parts = (
        data
        if isinstance(data, Mapping)
        else dict(zip(map(str, range(len(data))), data, strict=True))
    )
    if not isinstance(data, (Mapping, list, tuple)) or not all(
        hasattr(part, "__getitem__") for part in parts.values()
    ):
        raise UsageError(
            "data_efficiency.data_sampling.mixing: training_data must be a mapping of names to "
            "datasets, or a list of "
            f"datasets, not a {type(data).__name__}"
        )
    if set(parts) != set(weights):
        raise UsageError(
            f"data_efficiency.data_sampling.mixing.weights names {', '.join(weights)}, and "
            "training_data has "
            f"{', '.join(map(str, parts))}; give each dataset a weight"
        )
    if empty := [name for name in weights if not len(parts[name])]:
        raise UsageError(f"training_data: dataset {empty[0]!r} is empty")
    return ConcatDataset([parts[name] for name in weights])


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """`total` divided in proportion to `weights`, by largest remainders."""
    exact = [total * weight / sum(weights) for weight in weights]
    found = [int(x) for x in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: found[k] - exact[k])
    for place in by_remainder[: total - sum(found)]:
        found[place] += 1
    return found


class Mixed(Planned):
    """An order over datasets that lie one after the other, of `sizes` samples each.

    An epoch has `total` samples: of each dataset its share, evenly spread. Each dataset is walked
    through in a shuffled order of its own, that goes on in the next epoch where this one stopped,
    and begins anew, shuffled otherwise, when it is through: no sample comes twice before all others
    of its set have come.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], total: int, seed: int
    ) -> None:
        super().__init__(total, seed)
        self._sizes = list(sizes)
        self._shares = shares(total, weights)
        self._offsets = np.cumsum([0, *sizes])

    def indices(self, epoch: int) -> npt.NDArray[np.int64]:
        """The k-th of n samples of a set comes at the place (k + r) / n of the epoch, with a random
        r.
        """
        generator = torch.Generator().manual_seed(self._seed + epoch)
        places = []
        found = []
        for part, share in enumerate(self._shares):
            jitter = torch.rand(share, generator=generator, dtype=torch.float64).numpy()
            places.append((np.arange(share) + jitter) / max(share, 1))
            found.append(self._part_indices(part, share, epoch))
        return np.concatenate(found)[np.argsort(np.concatenate(places), kind="stable")]

    def _part_indices(self, part: int, share: int, epoch: int) -> npt.NDArray[np.int64]:
        """The samples of one set in an epoch."""
        size = self._sizes[part]
        first = epoch * share
        passes = range(first // size, -(-(first + share) // size))
        if not passes:
            return np.zeros(0, np.int64)
        walked = np.concatenate([self._walk(part, number) for number in passes])
        begin = first - passes[0] * size
        found: npt.NDArray[np.int64] = walked[begin : begin + share] + self._offsets[part]
        return found

    def _walk(self, part: int, number: int) -> npt.NDArray[np.int64]:
        """One pass through a set.

        The seed is of both, so that sets of one size do not share an order.
        """
        generator = torch.Generator().manual_seed(self._seed + (part + 1) * 1_000_003 + number)
        found: npt.NDArray[np.int64] = torch.randperm(
            self._sizes[part], generator=generator
        ).numpy()
        return found
