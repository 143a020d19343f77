"""The section ``torch_profiler`` (torch-free)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ds_core.config import Section, option

Rank = Annotated[int, Field(ge=0)]


class TorchProfiler(Section):
    """Traces of some steps by torch.profiler, one file per rank."""

    writes_outside = ("enabled",)

    enabled: bool = option(False, "Trace some steps.")
    folder: str = option(
        "traces",
        "The folder for the files, rank0.json.gz and so on; made if it is missing.",
        min_length=1,
    )
    wait: int = option(1, "Steps before anything is switched on.", ge=0)
    warmup: int = option(
        1, "Steps with the profiler on that are thrown away: its first steps are slow.", ge=1
    )
    record: int = option(3, "Steps that are recorded.", ge=1)
    ranks: list[Rank] | None = option(None, "The ranks that are traced; null: all.", min_length=1)
    shapes: bool = option(False, "Record the shapes of operations' inputs.")
    memory: bool = option(False, "Record each allocation.")
    stack: bool = option(False, "Record the Python stack of each operation; slow.")
