"""How many tokens each sample has: from the dataset, from files of the analysis, or measured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ds_core.errors import UsageError

log = logging.getLogger("ds_data_sampling")

WORTH_TELLING = 10.0  # seconds


def tokens_of(sample: Any) -> int:
    """Tokens of a sample: of its ``input_ids``, else of its first item (mappings and tuples), else
    its own length.
    """
    if isinstance(sample, Mapping):
        sample = sample["input_ids"] if "input_ids" in sample else next(iter(sample.values()))
    elif isinstance(sample, tuple):
        sample = sample[0]
    try:
        return len(sample)
    except TypeError as error:
        raise UsageError(
            "the length of a sample cannot be found: it is (or begins with) a "
            f"{type(sample).__name__}; give the "
            "dataset an attribute `lengths`, or set dynamic_batching.metrics_path"
        ) from error


class Lengths:
    """The tokens of each sample, found at the first use: making a loader reads no sample.

    dataset: its attribute ``lengths``, where it has one, is a sequence, or a function that returns
        one.
    from_files: reads them from the files of an analysis instead.
    """

    def __init__(
        self, dataset: Any, from_files: Callable[[], npt.NDArray[Any]] | None = None
    ) -> None:
        self._dataset = dataset
        self._from_files = from_files

    def __getitem__(self, index: int) -> int:
        return int(self.values[index])

    @cached_property
    def values(self) -> npt.NDArray[Any]:
        """By index of the dataset."""
        if self._from_files is not None:
            found = self._from_files()
            whence = "dynamic_batching.metrics_path"
        elif (given := _given(self._dataset)) is not None:
            found = np.asarray(given)
            whence = "the dataset's `lengths`"
        else:
            return _measured(self._dataset)
        if found.shape != (len(self._dataset),):
            raise UsageError(
                f"{whence} has lengths of shape {tuple(found.shape)}, and the dataset "
                f"{len(self._dataset)} samples"
            )
        if len(found) and not (found.min() >= 0 and np.isfinite(found.max())):  # NaN is never >= 0
            raise UsageError(
                f"{whence} has a length of {found.min()}, and of {found.max()}; they are counts of "
                "tokens"
            )
        return found


def _given(dataset: Any) -> Sequence[int] | None:
    """What the dataset says, part by part where it is several one after the other."""
    if isinstance(dataset, torch.utils.data.ConcatDataset):
        parts = [Lengths(part).values for part in dataset.datasets]
        return np.concatenate(parts)  # type: ignore[return-value]
    found = getattr(dataset, "lengths", None)
    return found() if callable(found) else found


def _measured(dataset: Any) -> npt.NDArray[Any]:
    began = time.monotonic()
    found = np.fromiter(
        (tokens_of(dataset[i]) for i in range(len(dataset))), np.int64, len(dataset)
    )
    if (took := time.monotonic() - began) > WORTH_TELLING:
        log.warning(
            "reading all %d samples for their lengths took %.0f s, on each rank at each start; "
            "give the dataset an "
            "attribute `lengths`, or set dynamic_batching.metrics_path",
            len(dataset),
            took,
        )
    return found
