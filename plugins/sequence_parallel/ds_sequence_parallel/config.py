"""The sections ``sequence_parallel`` and ``sequence_parallel_size`` (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import ConfigDict, Field, RootModel

from ds_core.config import Section, option

if TYPE_CHECKING:
    from ds_core.config import RunConfig

__all__ = ["SequenceParallelConfig", "SequenceParallelSize", "settings", "sp_size"]


class SequenceParallelSize(RootModel[Annotated[int, Field(ge=1)]]):
    """Ranks that divide each sequence among them: DeepSpeed's key for ``sequence_parallel.size``."""

    model_config = ConfigDict(strict=True, frozen=True)


class SequenceParallelConfig(Section):
    """How sequences are divided over ranks, and layers computed in tiles."""

    size: int | None = option(
        None, "Ranks that divide each sequence; null: sequence_parallel_size, which is 1 if not given.", ge=1
    )
    mode: Literal["auto", "ulysses", "ring"] = option(
        "auto",
        "How ranks attend to the whole sequence: ulysses exchanges heads, ring sends keys and values around; "
        "auto: ring "
        "where a transformers model has fewer heads than there are ranks.",
    )
    inputs: dict[str, int | None] = option(
        {},
        "Arguments of the model's forward and the dimension of each that is cut, null for none; those of transformers "
        "models are known.",
    )


def settings(config: RunConfig) -> SequenceParallelConfig:
    """The section ``sequence_parallel``; its defaults where the config has `sequence_parallel_size` alone."""
    section = config.section("sequence_parallel")
    return section if isinstance(section, SequenceParallelConfig) else SequenceParallelConfig()


def sp_size(config: RunConfig) -> int:
    """The size of the axis ``sp``."""
    if (size := settings(config).size) is not None:
        return size
    section = config.section("sequence_parallel_size")
    return section.root if isinstance(section, SequenceParallelSize) else 1
