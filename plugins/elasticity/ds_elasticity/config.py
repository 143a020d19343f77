"""The sections ``elasticity`` and ``autosave`` (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from ds_core.config import Section, option

VERSIONS = (0.1, 0.2)


class Autosave(Section):
    """Automatic checkpoints, and the folder from which ``engine.resume()`` loads."""

    writes_outside = ("every", "on_sigterm")

    folder: str = option(..., "Where checkpoints are saved; every rank must see it.", min_length=1)
    every: int = option(
        0, "Steps from one checkpoint to the next; 0: only when the run is asked to stop.", ge=0
    )
    on_sigterm: bool = option(
        True,
        "On SIGTERM at any rank, all ranks save at the end of their step and end with exit "
        "code 75.",
    )


class Elasticity(Section):
    """One train batch size for many numbers of ranks."""

    enabled: bool = option(
        False, "Derive the three batch sizes of a run from this section and its number of ranks."
    )
    max_train_batch_size: int = option(
        2000, "Upper limit of the train batch size; required when enabled.", gt=0
    )
    micro_batch_sizes: list[Annotated[int, Field(gt=0)]] = option(
        [2, 4, 6], "Micro-batch sizes that a rank may run; required when enabled.", min_length=1
    )
    min_gpus: int = option(1, "Fewest ranks that the batch size is chosen for.", gt=0)
    max_gpus: int = option(10000, "Most ranks that the batch size is chosen for.", gt=0)
    min_time: int = option(
        0,
        "Minutes that a job should run before its number of ranks is changed.",
        ge=0,
        without_effect="it is a hint for schedulers, which read it from the config",
    )
    prefer_larger_batch: bool = option(
        True,
        "Of batch sizes for equally many numbers of ranks, take the largest.",
        old=("prefer_large_batch",),
    )
    version: float = option(0.2, "0.1 counts ranks, 0.2 counts nodes of num_gpus_per_node ranks.")
    ignore_non_elastic_batch_info: bool = option(
        False,
        "Ignore train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps "
        "if given.",
    )
    num_gpus_per_node: int = option(1, "Ranks of a node; version 0.2.", gt=0)
    model_parallel_size: int = option(
        1,
        "Ranks that hold one copy of the model (pipeline stages, tensor-parallel ranks); version "
        "0.2.",
        gt=0,
    )

    @field_validator("version")
    @classmethod
    def _known(cls, value: float) -> float:
        if value > max(VERSIONS):
            raise ValueError(
                f"version {value:g} is newer than {max(VERSIONS)}, the newest that is supported"
            )
        if value not in VERSIONS:
            raise ValueError(f"version {value:g} is unknown; use 0.1 or 0.2")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.enabled and (
            missing := {"max_train_batch_size", "micro_batch_sizes"} - self.model_fields_set
        ):
            raise ValueError(
                f"{' and '.join(sorted(missing))} must be given when elasticity is enabled"
            )
        if self.max_gpus < self.min_gpus:
            raise ValueError(f"max_gpus {self.max_gpus} is less than min_gpus {self.min_gpus}")
        if self.model_parallel_size > 1 and self.version == 0.1:
            raise ValueError(f"model_parallel_size {self.model_parallel_size} needs version 0.2")
        if self.num_gpus_per_node % self.model_parallel_size:
            raise ValueError(
                f"num_gpus_per_node {self.num_gpus_per_node} is not a multiple of "
                f"model_parallel_size {self.model_parallel_size}"
            )
        per_node = 1 if self.version == 0.1 else self.num_gpus_per_node // self.model_parallel_size
        limit = self.max_train_batch_size // per_node
        if self.enabled and (largest := max(self.micro_batch_sizes)) > limit:
            of = f" // {per_node} data-parallel ranks of a node" if per_node > 1 else ""
            raise ValueError(
                f"micro-batch size {largest} is more than max_train_batch_size{of}, which is "
                f"{limit}"
            )
        return self

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """Keys of version 0.2 next to 0.1, and what is ignored on request."""
        if self.enabled and self.version == 0.1 and self.num_gpus_per_node != 1:
            yield "num_gpus_per_node", "has no effect: version 0.1 does not count nodes"
        if self.enabled and self.ignore_non_elastic_batch_info:
            yield (
                "ignore_non_elastic_batch_info",
                "is on: this section sets the batch sizes, not the keys outside it",
            )
