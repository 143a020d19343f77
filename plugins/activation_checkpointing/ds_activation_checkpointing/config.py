"""The section ``activation_checkpointing`` (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import model_validator
from typing_extensions import Self

from ds_core.config import Section, Trait, option

OWN = ("policy", "budget")
"""Keys that ask for recomputation by config; DeepSpeed's are settings of ``checkpoint`` calls."""


class ActivationCheckpointingConfig(Section):
    """Activation checkpointing: which blocks run again in backward, and where inputs are kept."""

    modules: Literal["auto"] | list[str] | None = option(
        None,
        "Modules that are computed again in backward: class names, names in the model, or patterns "
        "(*.layers.*). "
        "'auto': the model's repeated blocks, also where policy or budget is set. Absent: what the "
        "model itself "
        "checkpoints.",
        json_schema_extra={"x-ds-tune": ["auto"]},
    )
    policy: Literal["all", "keep_matmuls", "keep_attention"] = option(
        "all",
        "What is computed again: all; all but matrix products, convolutions and attention, whose "
        "outputs are kept "
        "(keep_matmuls); or all but attention (keep_attention), whose time grows with the square "
        "of the sequence.",
    )
    budget: int | None = option(
        None,
        "Bytes per rank that blocks may keep until backward: after the first step, as many blocks "
        "as fit are not "
        "computed again. Absent: all are.",
        ge=0,
    )
    partition_activations: bool = option(
        False,
        "Each rank along partition_axis keeps a part of a block's input, instead of all of it.",
    )
    partition_axis: str = option(
        "tp",
        "The mesh axis along which ranks work on the same activations, for partition_activations.",
        min_length=1,
    )
    cpu_checkpointing: bool = option(
        False, "Inputs of blocks rest in host memory, copied beside other work."
    )
    contiguous_memory_optimization: bool = option(
        False,
        "Inputs of blocks rest in one piece of memory. Needs partition_activations and "
        "number_checkpoints.",
    )
    number_checkpoints: int | None = option(
        None, "Tensors that are checkpointed before their backward; the size of that memory.", ge=1
    )
    synchronize_checkpoint_boundary: bool = option(
        False, "Wait for the device where a block begins and ends. Slow."
    )
    profile: bool = option(
        False, "Log the time of each block's forward, also of that in backward. Slow."
    )

    def traits(self) -> Iterable[str]:
        """Whether the config alone recomputes; a script may, by the settings that are here."""
        return [Trait.CHANGES_SAVED, *([] if self.recomputes is None else [Trait.RECOMPUTES])]

    @property
    def recomputes(self) -> Literal["auto"] | list[str] | None:
        """What is recomputed by config alone; None: nothing."""
        if self.modules is not None:
            return self.modules
        return "auto" if self.model_fields_set & set(OWN) else None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.contiguous_memory_optimization:
            needed = {
                "partition_activations": self.partition_activations,
                "number_checkpoints": self.number_checkpoints is not None,
            }
            if missing := [key for key, there in needed.items() if not there]:
                raise ValueError(
                    f"contiguous_memory_optimization needs {' and '.join(missing)}; set "
                    f"{'them' if len(missing) > 1 else 'it'} too, or "
                    "contiguous_memory_optimization to false"
                )
        if self.modules == []:
            raise ValueError("modules is empty; name some, or use 'auto'")
        return self
