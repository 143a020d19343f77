"""The models of the top-level keys of dscore-step-log."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, RootModel

from ds_core.config import Section
from ds_core.config.section import option

_STRICT = ConfigDict(strict=True, frozen=True)


class StepsPerPrint(RootModel[Annotated[int, Field(gt=0, lt=2**63)] | None]):
    """Print progress every so many updates; null: never."""

    model_config = _STRICT


class WallClockBreakdown(RootModel[bool]):
    """Time forward, backward, reduction and step, by events on the device where it has them."""

    model_config = _STRICT


class MemoryBreakdown(RootModel[bool]):
    """Log memory use around the phases of a step, whenever progress is printed."""

    model_config = _STRICT


class DumpState(RootModel[bool]):
    """Log the run's whole configuration once, when the engine is built."""

    model_config = _STRICT


class Throughput(Section):
    """The samples-per-second timer."""

    enabled: bool = option(True, "Measure samples per second.")
    synchronized: bool = option(
        True, "A step ends when the device has done its work, not when it has been queued."
    )
    tokens_per_sample: int | None = option(
        None,
        "Tokens of one sample, for tokens per second; null: counted in the inputs of forward.",
        gt=0,
    )


class Timers(Section):
    """Timers of the engine."""

    throughput: Throughput = option(Throughput(), "The samples-per-second timer.")


class MemorySnapshot(Section):
    """What each rank holds in one step, by kind, and the peak of each phase; one file per rank."""

    enabled: bool = option(False, "Take a snapshot.")
    folder: str = option(
        "memory",
        "The folder for the files, rank0.json and so on; made if it is missing.",
        min_length=1,
    )
    step: int = option(
        2,
        "The optimizer step of this process, counted from 1; the optimizer has no states in the "
        "first.",
        ge=1,
    )
    history: bool = option(
        False,
        "Also the history of the device's allocator, rank0.pickle, for pytorch.org/memory_viz.",
    )
    max_entries: int = option(100_000, "Entries of the history; the oldest are forgotten.", gt=0)
