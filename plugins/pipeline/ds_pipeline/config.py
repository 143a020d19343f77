"""The section ``pipeline`` (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from ds_core.config import ConfigSource, Section, Trait, option


class PipelineConfig(Section):
    """Pipeline parallelism. A `ds_pipeline.PipelineModule` adds the section, with its stages."""

    stages: Annotated[int, Field(ge=1)] | Literal["auto"] = option(
        "auto",
        "Pipeline stages. A number must agree with the PipelineModule.",
        json_schema_extra={
            "x-ds-tune": {"values": "divides_world", "needs": ["pipeline", "mapped"]}
        },
    )
    chunks: int = option(
        1, "Parts of the model per stage. A number must agree with the PipelineModule.", ge=1
    )
    partition: str = option(
        "best",
        "How layers are divided, for the reader.",
        without_effect="the partition_method of the PipelineModule divides the layers",
    )
    seed_layers: bool = option(
        False,
        "Seed the random numbers of each layer before it is built.",
        without_effect="layers are built before the config is read; give seed_layers=True to "
        "PipelineModule",
    )
    activation_checkpoint_interval: int = option(
        0,
        "Recompute activations in groups of this many layers; 0 leaves it to the PipelineModule.",
        ge=0,
    )
    use_reentrant: bool = option(
        True,
        "Recompute with torch's re-entrant kind of checkpoint; the first stage takes the other "
        "where it must.",
    )
    pipe_partitioned: bool = option(
        True,
        "With tensor parallelism, each of its ranks sends its share of an activation, where the "
        "size divides.",
    )
    grad_partitioned: bool = option(True, "The same for gradients; needs pipe_partitioned.")
    schedule: str = Field(
        "auto",
        description="'1f1b', 'interleaved' (chunks > 1), 'zero_bubble', one that a plugin "
        "offers, or "
        "'package.module:Class', a PipeSchedule. 'auto': 1f1b, or interleaved where there are "
        "chunks.",
        json_schema_extra={"x-ds-tune": {"values": ["zero_bubble"], "needs": "pipeline"}},
    )
    reduce: Literal["batch", "micro_batch"] = option(
        "batch",
        "With ZeRO-2 and 3: 'batch' reduces gradients once per batch and keeps unsharded gradients "
        "of the stage until "
        "then; 'micro_batch' reduces after each micro-batch, so that only this rank's part is "
        "kept.",
        json_schema_extra={
            "x-ds-tune": {"values": ["batch", "micro_batch"], "needs": "pipeline", "stages": [2, 3]}
        },
    )

    def traits(self) -> Iterable[str]:
        """Whoever has the section has stages."""
        return (Trait.DIVIDES_DEPTH,)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (
            "grad_partitioned" in self.model_fields_set
            and self.grad_partitioned
            and not self.pipe_partitioned
        ):
            raise ValueError("grad_partitioned needs pipe_partitioned; set both to false")
        if self.schedule == "interleaved" and self.chunks == 1:
            raise ValueError("schedule 'interleaved' needs a PipelineModule with chunks=2 or more")
        if self.schedule in ("1f1b", "zero_bubble") and self.chunks > 1:
            raise ValueError(
                f"schedule {self.schedule!r} is for one chunk per stage, the model has "
                f"{self.chunks}"
            )
        return self


def overridden() -> dict[str, int]:
    """``stages`` and ``chunks`` that DS_CONFIG_OVERRIDES has as numbers; raises ConfigError where
    it is no config.
    """
    section = ConfigSource({}, "").overridden().raw.get("pipeline")
    given = section if isinstance(section, dict) else {}
    return {name: given[name] for name in ("stages", "chunks") if isinstance(given.get(name), int)}
