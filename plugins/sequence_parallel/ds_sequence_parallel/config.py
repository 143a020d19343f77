"""The sections ``sequence_parallel``, ``sequence_parallel_size`` and
``seq_parallel_communication_data_type`` (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import ConfigDict, Field, RootModel

from ds_core.config import Section, option
from ds_core.errors import Problem

if TYPE_CHECKING:
    from ds_core.config import RunConfig

_SPELLINGS = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
}


class SequenceCommunicationDtype(
    RootModel[
        Literal[
            "fp32",
            "fp16",
            "bf16",
            "float32",
            "float",
            "float16",
            "half",
            "bfloat16",
            "torch.float32",
        ]
    ]
):
    """The dtype in which gradients are reduced over ranks of a sequence: that of all data-parallel
    ranks.
    """

    model_config = ConfigDict(strict=True, frozen=True)


class SequenceParallelSize(RootModel[Annotated[int, Field(ge=1)]]):
    """Ranks that divide each sequence among them: DeepSpeed's key for
    ``sequence_parallel.size``."""

    model_config = ConfigDict(strict=True, frozen=True)


class TileConfig(Section):
    """How something is computed in tiles along the sequence."""

    shards: int | None = option(
        None, "Number of tiles; null: as few as keep within tile_bytes.", ge=1
    )
    tile_bytes: int = option(
        268435456,
        "Bytes that one tile may need in forward and backward; unused where shards is given.",
        ge=1,
    )


class TiledMLPConfig(TileConfig):
    """MLPs in tiles."""

    modules: tuple[str, ...] = option(
        (),
        "Class names, or names of modules with * and the like; empty: all whose class is called an "
        "MLP.",
    )


class OffloadConfig(Section):
    """Activations of the model's repeated blocks in host memory, from forward to backward."""

    min_bytes: int = option(1048576, "Smaller tensors stay on the device, in bytes.", ge=0)
    pin_memory: bool = option(
        True, "Page-locked host memory; without it the device waits for each copy."
    )
    in_flight: int = option(
        2, "Tensors that may be on their way to the host at once, and stay that much longer.", ge=1
    )
    prefetch: int = option(2, "Tensors that are fetched ahead in backward.", ge=0)


class SequenceParallelConfig(Section):
    """How sequences are divided over ranks, layers computed in tiles, and activations kept."""

    size: int | None = option(
        None,
        "Ranks that divide each sequence; null: sequence_parallel_size, which is 1 if not given.",
        ge=1,
        json_schema_extra={"x-ds-tune": {"values": "divides_world", "needs": "transformers"}},
    )
    mode: Literal["auto", "ulysses", "ring"] = option(
        "auto",
        "How ranks attend to the whole sequence: ulysses exchanges heads, ring sends keys and "
        "values around; auto: ring where a transformers model has fewer heads than there are ranks.",
    )
    inputs: dict[str, int | None] = option(
        {},
        "Arguments of the model's forward and the dimension of each that is cut, null for none; "
        "those of transformers models are known.",
    )
    tiled_mlp: TiledMLPConfig | None = option(
        None, "Compute MLPs in tiles along the sequence; null: no."
    )
    tiled_loss: TileConfig | None = option(
        None, "Compute logits and loss of a causal language model in tiles; null: no."
    )
    offload_activations: OffloadConfig | None = option(
        None, "Keep what blocks save for backward in host memory; null: no."
    )


def settings(config: RunConfig) -> SequenceParallelConfig:
    """The section ``sequence_parallel``; its defaults where the config has `sequence_parallel_size`
    alone.
    """
    return config.section(SequenceParallelConfig) or SequenceParallelConfig()


def sp_size(config: RunConfig) -> int:
    """The size of the axis ``sp``."""
    if (size := settings(config).size) is not None:
        return size
    section = config.section(SequenceParallelSize)
    return section.root if section is not None else 1


def dtype_problems(config: RunConfig) -> Iterable[Problem]:
    """Gradients are reduced once, over all data-parallel ranks, those of a sequence among them: in one
    dtype.
    """
    section = config.section(SequenceCommunicationDtype)
    if section is None:
        return
    asked = section.root.removeprefix("torch.")
    asked = _SPELLINGS.get(asked, asked)
    if asked not in ("fp32", config.core.communication_data_type):
        why = (
            f"{section.root!r}: gradients are reduced over sp and dp at once, in "
            "communication_data_type"
        )
        yield Problem(
            "seq_parallel_communication_data_type", why, f'set "communication_data_type": "{asked}"'
        )
