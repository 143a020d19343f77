"""The config section ``checkpoint`` (torch-free)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from ds_core.config import Section, option


def _capitalized(value: Any) -> Any:
    return value.capitalize() if isinstance(value, str) else value


class ParallelWrite(Section):
    """Which ranks write at once."""

    pipeline_stage: bool = option(
        False,
        "Pipeline stages write at the same time.",
        without_effect="every rank writes its own share, at once",
    )


class Writer(Section):
    """DeepSpeed's checkpoint writer; ds_core has its own."""

    type: Literal["MOCK", "PYTHON", "FAST"] = option("FAST", "Kind of DeepSpeed's writer.")
    io_buffer_size: int = option(67108864, "Bytes of the write buffer.", gt=0)
    io_buffer_double: bool = option(True, "Two buffers, so that filling and writing overlap.")
    io_multiplier: int = option(1, "Buffers per writer.", gt=0)
    data_parallel: Literal["REPLICA", "SOCKET", "MACHINE"] | None = option(
        None, "Which ranks share the writing."
    )
    decoupled: bool = option(False, "Write in another process.")
    show_statistics: bool = option(False, "Log the speed of each write.")


class CheckpointConfig(Section):
    """How checkpoints are saved and loaded."""

    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(_capitalized)] = (
        option("Warn", "When ranks save under unequal tags: Ignore, Warn or Fail (any case).")
    )
    asynchronous: bool = option(
        False, "Copy states to host memory and write them while training continues.", alias="async"
    )
    keep_last: int | None = option(
        None, "How many of the newest checkpoints to keep after each save.", ge=1
    )
    verify: bool = option(True, "Compare every file with its checksum before anything is loaded.")
    load_universal: bool = option(
        False,
        "Load a checkpoint that was saved at another layout.",
        without_effect="every checkpoint loads at any layout",
    )
    use_node_local_storage: bool = option(
        False,
        "Each host has its own folder; what one lacks is copied from the others before a load.",
    )
    checkpoint_serialization: bool = option(
        True,
        "False: tensors without a container.",
        without_effect="checkpoints are always safetensors and JSON",
    )
    parallel_write: ParallelWrite = option(ParallelWrite(), "Which ranks write at once.")
    writer: Writer | None = option(
        None,
        "DeepSpeed's checkpoint writer.",
        without_effect="ds_core writes safetensors by itself; checkpoint.async writes while training continues",
    )

    @model_validator(mode="after")
    def _threads_talk_through_the_folder(self) -> CheckpointConfig:
        if self.asynchronous and self.use_node_local_storage:
            raise ValueError(
                "async needs a folder that every rank sees; leave it out, or use_node_local_storage"
            )
        return self
