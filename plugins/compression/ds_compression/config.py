"""The section ``compression_training`` (torch-free): one sub-section per technique, all with the
same two parts.

``shared_parameters`` switch a technique on and say when; ``different_groups`` say how strongly, and
to which modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from typing_extensions import Self

from ds_core.config import Section, option

_ONLY_PRUNING = "only row, channel and head pruning take away what follows"
_ONLY_SNIP = "only method snip_momentum uses it"
_SNIP_KEYS = ("schedule_offset_end", "schedule_offset_stride", "block_pattern", "dense_ratio")


def _pattern(text: str) -> str:
    """`text` when it is a regular expression, or "*".

    Raises ValueError with what is wrong with it.
    """
    if text != "*":
        try:
            re.compile(text)
        except re.error as error:
            raise ValueError(
                f"{text!r} is no regular expression: {error}; '*' alone means all modules"
            ) from None
    return text


def _list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Patterns = Annotated[list[Annotated[str, AfterValidator(_pattern)]], BeforeValidator(_list)]
"""Regular expressions that are searched in the names of modules; one alone may be given as text."""


def _blocks(text: str) -> str:
    """A block pattern. Raises ValueError where it is none."""
    found = re.fullmatch(r"([1-9]\d*)([x:])([1-9]\d*)", text)
    if found is None or (found[2] == ":" and int(found[1]) >= int(found[3])):
        raise ValueError(
            f"{text!r} is no block pattern: NxM is a block of N outputs and M inputs ('4x1'), N:M "
            "prunes N of each M "
            "weights in a row, N < M ('2:4')"
        )
    return text


# -- groups ----------------------------------------------------------------------------------------


class Bits(Section):
    """``weight_quantization.different_groups.NAME.params``."""

    start_bits: int = option(8, "Bits at first.", ge=1, le=16)
    target_bits: int = option(8, "Bits at last.", ge=1, le=16)
    quantization_period: int = option(
        1, "Steps after which there is one bit less, down to target_bits; 0 counts as 1.", ge=0
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.target_bits > self.start_bits:
            raise ValueError(
                f"target_bits {self.target_bits} is more than start_bits {self.start_bits}; bits "
                "only become fewer"
            )
        return self


class InputBits(Section):
    """``activation_quantization.different_groups.NAME.params``."""

    bits: int = option(8, "Bits of a layer's input.", ge=4, le=16)


class Ratio(Section):
    """``different_groups.NAME.params`` of pruning."""

    dense_ratio: float = option(0.5, "Part of what can be pruned that is kept.", gt=0, le=1)


class Group(Section):
    """Some modules. One module may be in one group of each technique."""

    modules: Patterns = option(
        ["*"],
        "Regular expressions, searched in the names of modules; '*': all linear and 2-d "
        "convolution layers.",
        min_length=1,
    )
    related_modules: list[Patterns] | None = option(
        None,
        "What would lose inputs or outputs with it; for row, channel and head pruning.",
        without_effect=_ONLY_PRUNING,
    )


class WeightGroup(Group):
    """``weight_quantization.different_groups.NAME``."""

    params: Bits = option(Bits(), "How many bits, and when.")


class InputGroup(Group):
    """``activation_quantization.different_groups.NAME``."""

    params: InputBits = option(InputBits(), "How many bits.")


class SparseGroup(Group):
    """``sparse_pruning.different_groups.NAME``."""

    params: Ratio = option(Ratio(), "How much is kept.")


class PruningGroup(Group):
    """``different_groups.NAME`` of row, channel and head pruning."""

    params: Ratio = option(Ratio(), "How much is kept.")
    related_modules: list[Patterns] | None = option(
        None,
        "For each entry of modules, the modules that are cut with it by redundancy_clean: those "
        "that take the pruned "
        "outputs as inputs, or for heads, those that make the queries, keys and values.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        related = self.related_modules
        if related is not None and len(related) != len(self.modules):
            raise ValueError(
                f"related_modules has {len(related)} lists, and modules {len(self.modules)} "
                "entries; give one list for "
                "each"
            )
        return self


# -- shared parameters -----------------------------------------------------------------------------


class _Shared(Section):
    enabled: bool = option(False, "Use this technique.")


class Mixed(Section):
    """``fp16_mixed_quantize``."""

    enabled: bool = option(False, "Mix weights with their quantised values at first.")
    quantize_change_ratio: float = option(
        0.001,
        "By how much the part of the quantised values grows with each step, up to 1.",
        gt=0,
        le=1,
    )


class WeightShared(_Shared):
    """``weight_quantization.shared_parameters``."""

    quantizer_kernel: bool = option(
        False,
        "Quantise by DeepSpeed's kernel.",
        without_effect="there is one way to quantise, the same on every device",
    )
    schedule_offset: int = option(0, "The step at which it begins.", ge=0)
    quantize_groups: int = option(
        1, "Groups per weight matrix, each with its own scale. Embeddings have one per row.", ge=1
    )
    quantize_verbose: bool = option(False, "Log when bits change, on rank 0.", per_rank=True)
    quantization_type: Literal["symmetric", "asymmetric"] = option(
        "symmetric", "Levels around zero, or between the least and the greatest weight."
    )
    rounding: Literal["nearest", "stochastic"] = option(
        "nearest", "To the nearest level; or randomly up or down, right on average."
    )
    quantize_weight_in_forward: bool = option(
        False,
        "Quantise weights where they are used, instead of after the optimizer's step.",
        without_effect="weights are always quantised where they are used, from the weights that "
        "the optimizer updates",
    )
    fp16_mixed_quantize: Mixed = option(
        Mixed(), "Weights change to their quantised values little by little."
    )


class ActivationShared(_Shared):
    """``activation_quantization.shared_parameters``."""

    quantization_type: Literal["symmetric", "asymmetric"] = option(
        "symmetric", "Levels around zero, or between the least and the greatest input."
    )
    range_calibration: Literal["dynamic", "static"] = option(
        "dynamic",
        "Ranges of each token (of each image, for convolutions), or one per layer: a running mean "
        "of its inputs' range "
        "over all ranks.",
    )
    schedule_offset: int = option(1000, "The step at which it begins.", ge=0)


class PruningShared(_Shared):
    """``row_pruning.shared_parameters`` and ``channel_pruning.shared_parameters``."""

    schedule_offset: int = option(1000, "The step at which it begins.", ge=0)
    method: Literal["l1", "topk"] = option(
        "l1",
        "Keep what has the largest absolute values at schedule_offset (l1), or what learned scores "
        "say (topk).",
    )


class HeadShared(_Shared):
    """``head_pruning.shared_parameters``."""

    schedule_offset: int = option(1000, "The step at which it begins.", ge=0)
    method: Literal["topk"] = option("topk", "Keep the heads that learned scores say.")
    num_heads: int | None = option(None, "Heads per layer. Required.", ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.enabled and self.num_heads is None:
            raise ValueError("num_heads is missing; give the number of attention heads of a layer")
        return self


class SparseShared(_Shared):
    """``sparse_pruning.shared_parameters``."""

    schedule_offset: int = option(1000, "The step at which it begins.", ge=0)
    method: Literal["l1", "topk", "snip_momentum"] = option(
        "l1",
        "Keep the weights with the largest absolute values at schedule_offset (l1), those that "
        "learned scores say "
        "(topk), or, in steps, blocks whose weights times gradients were large of late "
        "(snip_momentum).",
    )
    schedule_offset_end: int | None = option(
        None,
        "The step at which snip_momentum has pruned all that it will. Absent: schedule_offset.",
        ge=0,
    )
    schedule_offset_stride: int = option(
        1, "Steps from one pruning of snip_momentum to the next.", ge=1
    )
    block_pattern: Annotated[str, AfterValidator(_blocks)] = option(
        "4x1",
        "What snip_momentum prunes: blocks of N outputs and M inputs (NxM), or N of each M weights "
        "in a row (N:M).",
    )
    dense_ratio: float = option(
        0.1,
        "Part of the blocks that snip_momentum keeps where different_groups is empty; not for N:M.",
        gt=0,
        le=1,
    )
    excluded_modules: Patterns = option([], "Modules that are not pruned, by regular expressions.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schedule_offset_end is not None and self.schedule_offset_end < self.schedule_offset:
            raise ValueError(
                f"schedule_offset_end {self.schedule_offset_end} comes before schedule_offset "
                f"{self.schedule_offset}"
            )
        return self

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """Keys of snip_momentum beside another method."""
        if self.enabled and self.method != "snip_momentum":
            for key in _SNIP_KEYS:
                if key in self.model_fields_set:
                    yield key, f"has no effect with method {self.method}: {_ONLY_SNIP}"

    @property
    def end(self) -> int:
        """The step from which snip_momentum's masks do not change any more."""
        return (
            self.schedule_offset if self.schedule_offset_end is None else self.schedule_offset_end
        )


# -- techniques ------------------------------------------------------------------------------------

_GROUPS = "By names that you choose: modules, and how they are treated."
_SHARED = "Whether, when and how."


class LayerReduction(Section):
    """A student with some of its teacher's layers."""

    enabled: bool = option(
        False, "Initialise the model from a teacher (init_compression(..., teacher_model=...))."
    )
    keep_number_layer: int | None = option(None, "Layers of the student.", ge=1)
    module_name_prefix: str | None = option(
        None, "What the layers' names have before their number.", min_length=1
    )
    teacher_layer: list[Annotated[int, Field(ge=0)]] = option(
        [], "The teacher's layers, in the student's order."
    )
    other_module_name: list[str] = option(
        [], "Modules besides that get the teacher's weights, by their whole names."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.enabled:
            return self
        if not (self.module_name_prefix or self.other_module_name):
            raise ValueError(
                "nothing is copied; give module_name_prefix and teacher_layer, or other_module_name"
            )
        if bool(self.module_name_prefix) != bool(self.teacher_layer):
            raise ValueError("module_name_prefix and teacher_layer belong together; give both")
        count = len(self.teacher_layer)
        if (
            self.keep_number_layer is not None
            and self.teacher_layer
            and count != self.keep_number_layer
        ):
            raise ValueError(
                f"keep_number_layer is {self.keep_number_layer}, but teacher_layer has {count} "
                "entries"
            )
        return self


class WeightQuantization(Section):
    """Weights are quantised where they are used; gradients go to them unchanged."""

    shared_parameters: WeightShared = option(WeightShared(), _SHARED)
    different_groups: dict[str, WeightGroup] = option({}, _GROUPS)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.shared_parameters.quantization_type == "asymmetric":
            for name, group in self.different_groups.items():
                if group.params.target_bits < 3:
                    raise ValueError(
                        f"different_groups.{name}: {group.params.target_bits} bits are symmetric "
                        "(one or two bits are "
                        "signs and a mean); use quantization_type symmetric, or target_bits 3 or "
                        "more"
                    )
        return self


class ActivationQuantization(Section):
    """Inputs of layers are quantised."""

    shared_parameters: ActivationShared = option(ActivationShared(), _SHARED)
    different_groups: dict[str, InputGroup] = option({}, _GROUPS)


class SparsePruning(Section):
    """Single weights, or blocks of them, become zero."""

    shared_parameters: SparseShared = option(SparseShared(), _SHARED)
    different_groups: dict[str, SparseGroup] = option({}, _GROUPS)

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """Ratios beside a pattern that says how much is pruned."""
        shared = self.shared_parameters
        if shared.enabled and shared.method == "snip_momentum" and ":" in shared.block_pattern:
            why = (
                f"has no effect with block_pattern {shared.block_pattern}, which says how "
                "much is "
                "pruned"
            )
            if "dense_ratio" in shared.model_fields_set:
                yield "shared_parameters.dense_ratio", why
            for name, group in self.different_groups.items():
                if "dense_ratio" in group.params.model_fields_set:
                    yield f"different_groups.{name}.params.dense_ratio", why


class Pruning(Section):
    """Whole outputs of layers become zero: rows of linear layers, channels of convolutions."""

    shared_parameters: PruningShared = option(PruningShared(), _SHARED)
    different_groups: dict[str, PruningGroup] = option({}, _GROUPS)


class HeadPruning(Section):
    """Whole heads become zero, in the layer that joins them."""

    shared_parameters: HeadShared = option(HeadShared(), _SHARED)
    different_groups: dict[str, PruningGroup] = option({}, _GROUPS)


class CompressionConfig(Section):
    """The section ``compression_training``."""

    layer_reduction: LayerReduction = option(
        LayerReduction(), "A student with some of its teacher's layers."
    )
    weight_quantization: WeightQuantization = option(
        WeightQuantization(), "Quantisation-aware training."
    )
    activation_quantization: ActivationQuantization = option(
        ActivationQuantization(), "Quantised inputs of layers."
    )
    sparse_pruning: SparsePruning = option(SparsePruning(), "Single weights or blocks become zero.")
    row_pruning: Pruning = option(Pruning(), "Outputs of linear layers become zero.")
    channel_pruning: Pruning = option(Pruning(), "Output channels of 2-d convolutions become zero.")
    head_pruning: HeadPruning = option(HeadPruning(), "Attention heads become zero.")

    def techniques(self) -> Mapping[str, Any]:
        """The techniques that are switched on, by name; without layer_reduction."""
        return {
            name: part
            for name in type(self).model_fields
            if name != "layer_reduction" and (part := getattr(self, name)).shared_parameters.enabled
        }

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, part in self.techniques().items():
            snip = name == "sparse_pruning" and part.shared_parameters.method == "snip_momentum"
            if not part.different_groups and not snip:
                raise ValueError(
                    f"{name} is enabled, but different_groups is empty: nothing would change; name "
                    "a group, "
                    '{"all": {}} for all layers'
                )
        return self
