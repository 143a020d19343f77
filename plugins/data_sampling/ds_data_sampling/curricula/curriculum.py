"""Samples by difficulty: easy ones first, and harder ones as the steps go on.

Samples that become easy enough in the same step form a cluster. A sample is drawn in two moves: a
cluster, by chance in proportion to its size; then its next sample, in an order that is shuffled
anew when the cluster is used up. The numbers of the first move come from a counter-based generator
at the number of the draw, so they do not depend on how many samples are requested at a time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ds_core.errors import UsageError
from ds_data_sampling.curricula.index import Array, MetricIndex, read_array, read_index
from ds_data_sampling.curricula.schedules import difficulty_at

if TYPE_CHECKING:
    from ds_data_sampling.curricula.config import Curriculum, Metric


class ByDifficulty:
    """An `Order` in which samples wait until every metric admits them at the step's difficulty.

    An epoch has as many samples as the dataset; they are not all different while some wait.
    schedules: functions (step from 1) -> difficulty, by metric, for those whose schedule_type is
    custom; read when a sample is drawn, and not saved.
    """

    def __init__(
        self,
        settings: Curriculum,
        size: int,
        seed: int,
        schedules: Mapping[str, Callable[[int], int]] | None = None,
    ) -> None:
        self._metrics = settings.curriculum_metrics
        self._size = size
        self._seed = seed
        self._pool = _Pool(self._metrics, size, settings.data_cluster_path)
        self._schedules = {} if schedules is None else schedules
        # By metric, of the step that samples were drawn for last.
        self.difficulties: dict[str, int] = {}
        self._clusters: list[_Cluster] = []
        self._epoch = 0
        # Samples drawn in this epoch, and in all: the second numbers the draws of clusters.
        self._taken = 0
        self._drawn = 0

    def __len__(self) -> int:
        return self._size

    def start(self, epoch: int) -> None:
        """Begin `epoch`: difficulties and clusters stay as they are."""
        self._epoch = epoch
        self._taken = 0

    def take(self, count: int, step: int) -> list[int]:
        """The next `count` samples, for the optimizer step `step` (from 0), at its difficulty."""
        self._grow(step)
        count = min(count, self._size - self._taken)
        found = [self._clusters[number].next_sample() for number in self._choose(count)]
        self._taken += count
        self._drawn += count
        return found

    def state_dict(self) -> dict[str, Any]:
        """The position, and per cluster how many samples of each metric were admitted and how
        many were drawn."""
        clusters = [
            {"admitted": cluster.admitted, "drawn": cluster.drawn} for cluster in self._clusters
        ]
        return {
            "size": self._size,
            "epoch": self._epoch,
            "taken": self._taken,
            "drawn": self._drawn,
            "difficulties": dict(self.difficulties),
            "clusters": clusters,
        }

    def load_state_dict(self, state: Any) -> None:
        """Go on from `state`. Raises UsageError when it is of other data or other metrics."""
        waiting = set(self._pool.indices)
        if state["size"] != self._size or any(
            set(row["admitted"]) != waiting for row in state["clusters"]
        ):
            raise UsageError(
                f"the curriculum was saved with {state['size']} samples and difficulties of "
                f"{', '.join(state['difficulties'])}; "
                f"this run has {self._size} and {', '.join(self._metrics)}"
            )
        self._epoch, self._taken, self._drawn = (
            int(state[key]) for key in ("epoch", "taken", "drawn")
        )
        self.difficulties = {str(name): int(value) for name, value in state["difficulties"].items()}
        self._pool.restart()
        self._clusters = []
        for row in state["clusters"]:
            admitted = {str(name): int(count) for name, count in row["admitted"].items()}
            self._add(admitted).drawn = int(row["drawn"])

    def _grow(self, step: int) -> None:
        """The difficulties of `step`, and a cluster of the samples that they admit in addition."""
        for name, metric in self._metrics.items():
            assert metric.max_difficulty is not None
            if self.difficulties.get(name, -1) >= metric.max_difficulty:
                continue
            if metric.schedule_type == "custom" and name not in self._schedules:
                raise UsageError(
                    f"the schedule of {name!r} is custom: give its function, as in "
                    f"engine.set_custom_curriculum_learning_schedule({{{name!r}: function}}), "
                    "before the first batch"
                )
            self.difficulties[name] = difficulty_at(metric, step + 1, self._schedules.get(name))
        admitted = self._pool.admitted_at(self.difficulties)
        if not self._clusters or admitted != self._pool.admitted:
            self._add(admitted)
        if not any(len(cluster) for cluster in self._clusters):
            raise UsageError(
                f"no sample is easy enough for step {step + 1}, "
                f"whose difficulties are {self.difficulties}; raise min_difficulty"
            )

    def _add(self, admitted: dict[str, int]) -> _Cluster:
        name = f"{self._seed} {len(self._clusters)}"
        self._clusters.append(_Cluster(name, self._pool.admit(admitted), admitted))
        return self._clusters[-1]

    def _choose(self, count: int) -> list[int]:
        """The numbers of the clusters of the next `count` draws."""
        if len(self._clusters) == 1:
            return [0] * count
        ends = np.cumsum([len(cluster) for cluster in self._clusters])
        # A count of Philox gives four numbers: the first of each belongs to one draw, so that a
        # draw's number depends on its position alone.
        raw = np.random.Philox(key=self._seed, counter=self._drawn).random_raw(4 * count)[::4]
        # The upper 53 bits are a double in [0, 1), scaled to [0, all samples).
        places = np.floor((raw >> np.uint64(11)) * 2.0**-53 * ends[-1])
        found: list[int] = np.searchsorted(ends, places, side="right").tolist()
        return found


class _Cluster:
    """Samples that were admitted together, in an order that is shuffled anew after each pass."""

    def __init__(self, name: str, samples: Array, admitted: dict[str, int]) -> None:
        self._name = name
        self._samples = samples
        self.admitted = admitted
        self.drawn = 0
        self._pass = -1
        self._order = samples

    def __len__(self) -> int:
        return len(self._samples)

    def next_sample(self) -> int:
        number, place = divmod(self.drawn, len(self._samples))
        # The order of a pass follows from its number: a resumed run computes it again.
        if number != self._pass:
            digest = hashlib.blake2b(f"{self._name} {number}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            self._order = self._samples[
                torch.randperm(len(self._samples), generator=generator).numpy()
            ]
            self._pass = number
        self.drawn += 1
        return int(self._order[place])


class _Pool:
    """The samples that every schedule_based metric has admitted.

    With one metric they are a prefix of its index. With several, a sample enters when the last of
    them admits it: one byte per sample counts the metrics that have.
    """

    def __init__(self, metrics: Mapping[str, Metric], size: int, folder: str | None) -> None:
        self._metrics = metrics
        self._size = size
        self._folder = folder
        self.indices: dict[str, MetricIndex] = {}
        for name, metric in metrics.items():
            if metric.clustering_type == "schedule_based":
                assert metric.index_to_sample_path is not None
                values = metric.index_to_metric_path if metric.difficulty_type == "value" else None
                self.indices[name] = read_index(metric.index_to_sample_path, values, size)
        self.restart()

    def restart(self) -> None:
        """Nothing is admitted."""
        self.admitted = dict.fromkeys(self.indices, 0)
        self._votes = np.zeros(self._size if len(self.indices) > 1 else 0, np.uint8)

    def admitted_at(self, difficulties: Mapping[str, int]) -> dict[str, int]:
        """How many samples each metric admits, never fewer than before."""
        counts = dict(self.admitted)
        for name, index in self.indices.items():
            by_value = self._metrics[name].difficulty_type == "value"
            found = (index.up_to_value if by_value else index.up_to_percentile)(difficulties[name])
            counts[name] = max(counts[name], found)
        return counts

    def admit(self, admitted: Mapping[str, int]) -> Array:
        """The samples that enter when each metric admits so many."""
        rows = [
            (index.samples, self.admitted[name], admitted[name])
            for name, index in self.indices.items()
        ]
        self.admitted = dict(admitted)
        if not rows:
            return np.arange(self._size)
        new = [samples[start:end] for samples, start, end in rows]
        if len(new) == 1:
            return new[0]
        # Only samples that some metric has just admitted can have reached the last vote now.
        for part in new:
            self._votes[part] += 1
        candidates = np.unique(np.concatenate(new))
        return _map_from_file(candidates[self._votes[candidates] == len(new)], self._folder)


def _map_from_file(samples: Array, folder: str | None) -> Array:
    """`samples`, memory-mapped from a file of `folder`, whose name is that of its content."""
    if folder is None or not len(samples):
        return samples
    file = Path(
        folder, f"cluster-{hashlib.blake2b(samples.tobytes(), digest_size=12).hexdigest()}.npy"
    )
    if not _is_intact(file, samples):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Every rank writes the same content; replacing a file is atomic, so no rank reads half.
        part = file.with_name(f"{file.stem}.{os.getpid()}.part")
        with part.open("wb") as stream:
            np.save(stream, samples, allow_pickle=False)
        part.replace(file)
    return read_array(file)


def _is_intact(file: Path, samples: Array) -> bool:
    """Whether a file is there and has not been damaged since it was written."""
    try:
        return file.is_file() and np.array_equal(read_array(file), samples)
    except UsageError:
        return False
