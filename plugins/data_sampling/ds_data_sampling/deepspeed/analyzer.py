"""`DataAnalyzer` and `DistributedDataAnalyzer`: the analysis under DeepSpeed's names and
arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch

from ds_core import comm
from ds_core.errors import UsageError
from ds_data_sampling.curricula.analysis import combine, measure
from ds_data_sampling.curricula.metrics import Measure

KINDS: dict[str, Literal["value", "sum"]] = {
    "single_value_per_sample": "value",
    "accumulate_value_over_samples": "sum",
}


class DataAnalyzer:
    """Measures a dataset: `run_map` on every worker, then `run_reduce` on one.

    metric_functions: of a batch, as collate_fn makes it.
    metric_types: ``single_value_per_sample`` gives an array with a number for each sample,
        ``accumulate_value_over_samples`` one that is added up.
    num_threads: processes that load and measure. What is written is described in
        `ds_data_sampling.curricula.analysis`; num_threads_reduce is of no use there.

    Raises UsageError for specific_threads, custom_map_*, custom_reduce and sample_indices, which
    there are not.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: str = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        custom_map_init: Any = None,
        custom_map_update: Any = None,
        custom_map_finalize: Any = None,
        custom_reduce: Any = None,
        sample_indices: Any = None,
    ) -> None:
        own = {
            "specific_threads": list(specific_threads) or None,
            "custom_map_init": custom_map_init,
            "custom_map_update": custom_map_update,
            "custom_map_finalize": custom_map_finalize,
            "custom_reduce": custom_reduce,
            "sample_indices": sample_indices,
        }
        if given := [name for name, value in own.items() if value is not None]:
            raise UsageError(
                f"DataAnalyzer has no {', '.join(given)}; "
                "use ds_data_sampling.curricula.analysis.measure "
                "and combine"
            )
        dtypes = [_name(dtype) for dtype in metric_dtypes] or [""] * len(metric_names)
        columns = {"functions": metric_functions, "types": metric_types, "dtypes": dtypes}
        for name, column in columns.items():
            if len(column) != len(metric_names):
                raise UsageError(
                    f"there are {len(metric_names)} metric_names and {len(column)} metric_{name}"
                )
        if unknown := [kind for kind in metric_types if kind not in KINDS]:
            raise UsageError(f"metric_types has {unknown[0]!r}; there are {' and '.join(KINDS)}")
        self._measures = [
            Measure(name, function, KINDS[kind], batched=True, dtype=dtype)
            for name, function, kind, dtype in zip(
                metric_names, metric_functions, metric_types, dtypes, strict=True
            )
        ]
        self._dataset = dataset
        self._folder = save_path
        self._collate = collate_fn
        self._batch = batch_size
        self._worker = worker_id
        self._workers = num_workers
        self._processes = num_threads if num_threads > 1 else 0

    def run_map(self) -> None:
        """Measure this worker's part."""
        measure(
            self._dataset,
            self._measures,
            self._folder,
            worker=self._worker,
            workers=self._workers,
            batch_size=self._batch,
            processes=self._processes,
            collate_fn=self._collate,
        )

    def run_reduce(self) -> None:
        """Combine the parts of all workers."""
        combine(self._folder, self._measures, len(self._dataset), workers=self._workers)

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Both, where workers are ranks of `comm_group` (None: of all); the first one combines."""
        self.run_map()
        comm.barrier(comm_group)
        if self._worker == 0:
            self.run_reduce()
        comm.barrier(comm_group)


class DistributedDataAnalyzer(DataAnalyzer):
    """`DataAnalyzer` whose workers are the ranks of `comm_group`, or the `num_workers` workers;
    device is of no use.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        num_threads: int = 1,
        worker_id: int = 0,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        save_path: str = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: Any = "cuda",
        comm_group: Any = None,
        sample_indices: Any = None,
    ) -> None:
        if comm_group is not None:
            num_workers = comm.world_size(comm_group)
            worker_id = comm.rank(comm_group)
        self._group = comm_group
        super().__init__(
            dataset,
            num_workers=num_workers,
            worker_id=worker_id,
            num_threads=num_threads,
            batch_size=batch_size,
            metric_names=metric_names,
            metric_functions=metric_functions,
            metric_types=metric_types,
            save_path=save_path,
            collate_fn=collate_fn,
            sample_indices=sample_indices,
        )

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Measure and combine."""
        super().run_map_reduce(comm_group if comm_group is not None else self._group)


def _name(dtype: Any) -> str:
    return (
        str(dtype).removeprefix("torch.")
        if isinstance(dtype, torch.dtype)
        else np.dtype(dtype).name
    )
