"""Measures a dataset once, before training, and writes the files that curricula and token budgets
read.

Several workers measure a part each (ranks, or jobs that know nothing of each other), and one
combines the parts. In a folder there is a folder for each metric NAME, with

- ``NAME_sample_to_metric.npy``: the value of each sample, in order of the dataset,
- ``NAME_index_to_sample.npy`` and ``NAME_index_to_metric.npy``: samples from the lowest value to
  the highest, and their values; see `ds_data_sampling.curricula.index`,
- ``NAME_metric_value.npy`` instead, where it is a sum over all samples,
- ``NAME.json``: how values are distributed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset

from ds_core import comm
from ds_core.errors import UsageError
from ds_data_sampling.curricula.index import Array, read_array
from ds_data_sampling.curricula.metrics import RARITY, VOCABULARY, Measure, Rarity, named

FORMAT = 1
PERCENTILES = range(0, 101, 5)


def analyze(
    dataset: Any,
    metrics: Iterable[str | Measure],
    folder: str | Path,
    *,
    batch_size: int = 256,
    processes: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Measure `dataset` on all ranks, a part on each, and combine.

    Returns what the JSON files say, by metric.

    metrics: as `metrics.named` takes them, or measures.
    processes: on each rank, that load samples and measure them; 0: the rank itself.

    Every rank must see `folder`. Collective.
    """
    asked = [each if isinstance(each, Measure) else named(each) for each in metrics]
    given = [each for each in asked if each.function is not RARITY.function]
    if RARITY in asked and VOCABULARY not in given:
        given.append(VOCABULARY)
    options = {"batch_size": batch_size, "processes": processes, "collate_fn": collate_fn}
    found = _on_all_ranks(dataset, given, Path(folder), options)
    if RARITY in asked:
        found |= _on_all_ranks(dataset, [rarity_in(folder)], Path(folder), options)
    return found


def measures_of(metrics: Iterable[str], folder: str | Path) -> list[Measure]:
    """What `metrics` ask for, as `metrics.named` takes them, where `folder` has what they need of
    other metrics.
    """
    asked = [named(each) for each in metrics]
    return [rarity_in(folder) if each == RARITY else each for each in asked]


def rarity_in(folder: str | Path) -> Measure:
    """The metric vocabularyrarity, by the vocabulary that was counted into `folder`."""
    file = Path(folder, VOCABULARY.name, f"{VOCABULARY.name}_metric_value.npy")
    if not file.is_file():
        raise UsageError(
            f"vocabularyrarity needs how often each token occurs in the dataset, and {file} is "
            "missing; measure and "
            "combine the metric vocabulary first"
        )
    return Measure(RARITY.name, Rarity(np.array(read_array(file))))


def measure(
    dataset: Any,
    measures: Sequence[Measure],
    folder: str | Path,
    *,
    worker: int = 0,
    workers: int = 1,
    batch_size: int = 256,
    processes: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> None:
    """Measure the part of `dataset` that the worker `worker` of `workers` has, and write it below
    `folder`.

    collate_fn: of batched measures; torch's default.
    processes: that load and measure; 0: this one.

    Raises UsageError for a value that is not finite, or not of the dtype that the measure says.
    """
    if not 0 <= worker < workers:
        raise UsageError(
            f"worker is {worker}; with {workers} workers it is one of 0 to {workers - 1}"
        )
    size = len(dataset)
    start = size * worker // workers
    end = size * (worker + 1) // workers
    loader: DataLoader[Any] = DataLoader(
        Subset(dataset, range(start, end)),
        batch_size=batch_size,
        num_workers=min(processes, end - start),
        collate_fn=_Measuring(tuple(measures), collate_fn),
        generator=torch.Generator(),  # leaves torch's own alone
    )
    columns: list[list[Array]] = [[] for _ in measures]
    at = start
    for count, batch in loader:
        for each, column, values in zip(measures, columns, batch, strict=True):
            _check(each, values, at, count)
            column[:] = [_sum([*column, values])] if each.kind == "sum" else [*column, values]
        at += count
    for each, column in zip(measures, columns, strict=True):
        whole = np.concatenate(column) if column else np.empty(0, each.dtype or np.int64)
        _write(_part(Path(folder), each.name, worker, workers), whole)


def combine(
    folder: str | Path, measures: Sequence[Measure], size: int, *, workers: int = 1
) -> dict[str, Any]:
    """Put the parts of `workers` workers together, for a dataset of `size` samples; parts are
    removed.

    Returns what the JSON files say, by metric. Raises UsageError where a part is missing, or the
    parts do not add up.
    """
    return {each.name: _combine(Path(folder), each, size, workers) for each in measures}


def _combine(folder: Path, each: Measure, size: int, workers: int) -> dict[str, Any]:
    files = [_part(folder, each.name, worker, workers) for worker in range(workers)]
    for worker, file in enumerate(files):
        if not file.is_file():
            raise UsageError(
                f"worker {worker} of {workers} has not measured {each.name}: {file} is missing"
            )
    parts: list[Array] = [read_array(file) for file in files]
    facts: dict[str, Any] = {
        "format": FORMAT,
        "metric": each.name,
        "kind": each.kind,
        "samples": size,
    }
    base = folder / each.name
    if each.kind == "sum":
        _write(base / f"{each.name}_metric_value.npy", _sum(parts))
    else:
        values = np.concatenate([part for part in parts if len(part)] or parts)
        if len(values) != size:
            raise UsageError(
                f"{each.name} was measured of {len(values)} samples, and the dataset has {size}"
            )
        facts |= _write_values(base, each.name, values)
    text = json.dumps(facts, indent=2, allow_nan=False)
    _replace(base / f"{each.name}.json", lambda stream: stream.write(f"{text}\n".encode()))
    for file in files:
        file.unlink()
    return facts


def _write_values(base: Path, name: str, values: Array) -> dict[str, Any]:
    """The three files of a metric with a value per sample, in as few bytes per number as do; and
    how they lie.
    """
    if values.dtype.kind in "iu" and len(values):
        low, high = (int(limit) for limit in (values.min(), values.max()))
        values = values.astype(np.promote_types(np.min_scalar_type(low), np.min_scalar_type(high)))
    order = np.argsort(values, kind="stable").astype(np.min_scalar_type(max(len(values) - 1, 0)))
    _write(base / f"{name}_sample_to_metric.npy", values)
    _write(base / f"{name}_index_to_sample.npy", order)
    _write(base / f"{name}_index_to_metric.npy", values[order])
    if not len(values):
        return {}
    numbers = values[order]
    places = {
        str(percent): numbers[(len(numbers) - 1) * percent // 100].item() for percent in PERCENTILES
    }
    return {"mean": float(numbers.mean(dtype=np.float64)), "percentiles": places}


class _Measuring:
    """A collate_fn that measures: how many samples a batch has, and for each measure its values or
    sum.
    """

    def __init__(
        self, measures: tuple[Measure, ...], collate_fn: Callable[[list[Any]], Any] | None
    ) -> None:
        self._measures = measures
        self._collate = collate_fn or torch.utils.data.default_collate

    def __call__(self, samples: list[Any]) -> tuple[int, list[Array]]:
        batch = self._collate(samples) if any(each.batched for each in self._measures) else None
        return len(samples), [self._measured(each, samples, batch) for each in self._measures]

    def _measured(self, each: Measure, samples: list[Any], batch: Any) -> Array:
        if each.batched:
            return (
                _array(each.function(batch)).reshape(-1)
                if each.kind == "value"
                else _array(each.function(batch))
            )
        found = [_array(each.function(sample)) for sample in samples]
        if each.kind == "sum":
            return _sum(found)
        if any(value.size != 1 for value in found):
            raise UsageError(
                f"the metric {each.name} must be one number per sample, not one of {found[0].size}"
            )
        return np.stack([value.reshape(()) for value in found])


def _on_all_ranks(
    dataset: Any, measures: Sequence[Measure], folder: Path, options: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    rank = comm.rank()
    world = comm.world_size()
    measure(dataset, measures, folder, worker=rank, workers=world, **options)
    comm.barrier()
    if rank == 0:
        combine(folder, measures, len(dataset), workers=world)
    comm.barrier()
    return {
        each.name: json.loads((folder / each.name / f"{each.name}.json").read_text())
        for each in measures
    }


def _array(value: Any) -> Array:
    if isinstance(value, torch.Tensor):  # numpy has no bfloat16
        value = value.detach().cpu()
        value = value.float() if value.dtype is torch.bfloat16 else value
    found = np.asarray(value)
    if found.dtype.kind not in "iufb":
        raise UsageError(f"a metric must be a number, not {type(value).__name__}")
    return found.astype(np.int64) if found.dtype.kind == "b" else found


def _sum(arrays: Sequence[Array]) -> Array:
    """Their sum; shorter ones are filled up with zeros."""
    dtype = np.result_type(*arrays)
    whole = np.zeros(max(len(array) for array in arrays), np.int64 if dtype.kind in "iu" else dtype)
    for array in arrays:
        whole[: len(array)] += array.astype(whole.dtype)
    return whole


def _check(each: Measure, values: Array, at: int, count: int) -> None:
    if each.dtype and values.dtype != np.dtype(each.dtype):
        raise UsageError(
            f"the metric {each.name} is {values.dtype}, and {each.dtype} was announced"
        )
    if each.kind == "sum":
        return
    if len(values) != count:
        raise UsageError(
            f"the metric {each.name} gave {len(values)} values for a batch of {count} samples"
        )
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise UsageError(f"the metric {each.name} of sample {at + bad} is {values[bad]}")


def _part(folder: Path, name: str, worker: int, workers: int) -> Path:
    return folder / name / f"part-{worker:05}-of-{workers:05}.npy"


def _write(file: Path, array: Array) -> None:
    _replace(file, lambda stream: np.save(stream, array, allow_pickle=False))


def _replace(file: Path, write: Callable[[Any], object]) -> None:
    """Write a file so that it is there whole, or as it was before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.{os.getpid()}.new")
    with new.open("wb") as stream:
        write(stream)
    os.replace(new, file)
