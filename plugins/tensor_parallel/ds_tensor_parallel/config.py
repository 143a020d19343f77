"""The section ``tensor_parallel``, with every documented key (torch-free)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import field_validator, model_validator
from typing_extensions import Self

from ds_core.config import Section, option
from ds_core.errors import nearest

PRESETS = ("bloom", "chatglm", "deepseek_v2", "gpt2", "llama", "mixtral", "phi3", "qwen2")
"""Names of the families that `ds_tensor_parallel.planning.presets` knows."""


class LayerSpec(Section):
    """One rule: which parameters it is for, and how they are cut."""

    patterns: list[str] = option(
        [], "Regular expressions; one must match the whole name of a parameter."
    )
    partition_type: Literal["column", "row", "skip"] = option(
        "column", "Cut the output of a layer, or its input; skip: every rank has all of it."
    )
    shape: list[int | list[int]] | None = option(
        None,
        "Of a weight in which several matrices are fused: at partition_dim their number (of equal "
        "ones) or the list of their lengths, elsewhere -1. Each matrix is cut by itself.",
    )
    partition_dim: int | None = option(
        None,
        "The dimension of the weight that is cut. Default: 0 for column, 1 for row; embeddings: 0 "
        "or 1.",
    )
    model_types: list[str] | None = option(
        None, "Only for models whose config.model_type is one of these."
    )
    gather_output: bool = option(
        False, "Of a column: every rank gets the whole output, as from an output head."
    )
    grad_allreduce: bool = option(
        False,
        "Of skip: the gradient is summed over the ranks, for a weight that is used on each rank's "
        "own heads.",
    )

    @field_validator("patterns")
    @classmethod
    def _regexes(cls, value: list[str]) -> list[str]:
        if not value:
            raise ValueError(
                "is empty; give at least one regular expression such as '.*\\.o_proj\\.weight'"
            )
        for pattern in value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.shape is not None:
            self._check_shape(self.shape)
        if self.partition_dim is not None and not 0 <= self.partition_dim < len(
            self.shape or (0, 0)
        ):
            shown = (
                f"shape {self.shape}" if self.shape is not None else "a weight of two dimensions"
            )
            raise ValueError(f"partition_dim {self.partition_dim} is outside {shown}")
        if self.gather_output and self.partition_type != "column":
            raise ValueError(
                f"gather_output is for column, not {self.partition_type}; only columns leave parts"
            )
        if self.grad_allreduce and self.partition_type != "skip":
            raise ValueError(
                f"grad_allreduce is for skip, not {self.partition_type}; a part's gradient is "
                "its own"
            )
        return self

    def _check_shape(self, shape: list[int | list[int]]) -> None:
        for length in (
            n for entry in shape for n in (entry if isinstance(entry, list) else [entry])
        ):
            if length != -1 and length < 1:
                raise ValueError(f"shape has {length}; give lengths of at least 1, or -1")
        dim = (
            self.partition_dim
            if self.partition_dim is not None
            else int(self.partition_type == "row")
        )
        fused = [d for d, entry in enumerate(shape) if isinstance(entry, list)]
        if fused and fused != [dim]:
            raise ValueError(
                f"shape {shape} has a list of lengths at {fused}; it belongs at partition_dim {dim}"
            )


class PartitionConfig(Section):
    """Rules of one's own, for models that no preset knows."""

    tp_size: int = option(1, "As autotp_size, for configs that say it twice; 1: not said.", ge=1)
    use_default_specs: bool = option(
        True, "What no rule is for follows the preset, the model's plan, or heuristics."
    )
    layer_specs: list[LayerSpec] = option([], "Rules; the first that matches a parameter counts.")
    strict_mode: bool = option(
        False, "A linear layer that no rule is for is an error, instead of being left whole."
    )
    lm_head_patterns: list[str] = option(
        ["lm_head", "embed_out"],
        "Names of modules that are output heads: their output is gathered.",
    )
    embedding_partition_dim: Literal[0, 1] = option(
        1,
        "How the input embedding is cut where no rule says it: 0 along the vocabulary, 1 along the "
        "hidden size. One that is tied to an output head is cut as the head is.",
    )


class TensorParallelSize(Section):
    """The size, as DeepSpeed's inference config has it."""

    enabled: bool = option(True, "Divide layers over ranks.")
    tp_size: int = option(1, "Ranks that divide each layer.", ge=1)
    tp_grain_size: int = option(
        1,
        "Lengths are cut at multiples of this, where heads do not say where: 64 suits the GPU's "
        "matrix units.",
        ge=1,
    )
    mpu: None = option(
        None, "An object, which a config cannot hold: pass it as initialize(mpu=...)."
    )
    tp_group: None = option(
        None, "An object, which a config cannot hold: pass initialize(mpu=...), whose group it is."
    )


class TensorParallelConfig(Section):
    """Tensor parallelism: each layer is divided over ranks, which work on the same samples."""

    enabled: bool = option(True, "Divide layers over ranks.")
    autotp_size: int = option(
        0,
        "Ranks that divide each layer; 0: as tensor_parallel.tp_size says.",
        ge=0,
        json_schema_extra={"x-ds-tune": {"values": "divides_world", "needs": "transformers"}},
    )
    preset_model: str | None = option(
        None,
        f"The family of models: {', '.join(PRESETS)}. Default: the model's own tp_plan, else by "
        "its type.",
    )
    tp_overlap_comm: bool = option(
        False, "Compute gradients of weights while gradients of inputs are summed over the ranks."
    )
    sequence_parallel: bool = option(
        False,
        "Between divided layers (norms, dropouts, residuals) each rank has a part of the tokens: "
        "less memory, as many bytes are sent.",
    )
    vocab_parallel_loss: bool = option(
        True,
        "In training, transformers models that get labels compute the loss from logits "
        "that stay divided, and give none. Not of fp64 logits.",
    )
    partition_config: PartitionConfig | None = option(None, "Your rules.")
    tensor_parallel: TensorParallelSize = option(
        TensorParallelSize(), "Size and grain.", alias="tp"
    )
    dtype: str | None = option(
        None,
        "The dtype of an inference engine.",
        without_effect="training has the dtype that fp16 or bf16 says",
    )
    injection_policy_tuple: list[str] | None = option(
        None,
        "Names of the layers whose outputs are summed (rows), by which heuristics go instead of "
        "usual names.",
    )
    keep_module_on_host: bool = option(
        False, "Not with training: weights are on the device that trains them."
    )
    replace_with_kernel_inject: bool = option(
        False, "Kernels of an inference engine: not with training.", alias="kernel_inject"
    )

    @property
    def size(self) -> int:
        """Ranks that divide each layer."""
        return (
            (self.autotp_size or self.tensor_parallel.tp_size)
            if self.enabled and self.tensor_parallel.enabled
            else 1
        )

    @property
    def rules(self) -> PartitionConfig:
        """The rules of one's own; the defaults where there are none."""
        return self.partition_config if self.partition_config is not None else PartitionConfig()

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """What has no effect with one rank."""
        if self.size == 1:
            yield "", "autotp_size is 0 or 1, so nothing is divided"

    @field_validator("preset_model")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is None:
            return value
        name = value.lower()
        if name not in PRESETS:
            hint = nearest(name, PRESETS)
            meant = f"; did you mean {hint!r}?" if hint else ""
            raise ValueError(f"unknown preset {value!r}{meant}; use {', '.join(PRESETS)}")
        return name

    @field_validator("keep_module_on_host", "replace_with_kernel_inject")
    @classmethod
    def _training(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "true is for inference engines; a training engine cannot do it, leave it out"
            )
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        inner = self.tensor_parallel
        if (
            self.autotp_size
            and "tp_size" in inner.model_fields_set
            and inner.tp_size != self.autotp_size
        ):
            raise ValueError(
                f"autotp_size is {self.autotp_size}, and tensor_parallel.tp_size {inner.tp_size}; "
                "give one of them"
            )
        if self.rules.tp_size not in (1, size := self.autotp_size or inner.tp_size):
            raise ValueError(
                f"partition_config.tp_size is {self.rules.tp_size}, and the size {size}; give "
                "autotp_size that value"
            )
        return self
