"""The config of `init_inference`, with every documented key (torch-free).

Old keys are moved to where they are now, with one note in the log. Objects (process groups, an mpu,
classes of layers) may stand in these models, though not in a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Literal

from pydantic import field_validator, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from ds_core.config import Section, option
from ds_core.config.section import Clash

DTYPES = {
    "fp32": ("float32", "float"),
    "fp16": ("float16", "half"),
    "bf16": ("bfloat16",),
    "int8": (),
    "int4": (),
}
"""Names of dtypes, and what else they are called."""
MOVED = {
    "mp_size": ("tensor_parallel", "tp_size", ("tp",)),
    "mpu": ("tensor_parallel", "mpu", ("tp",)),
    "ep_size": ("moe", "ep_size", ()),
    "ep_group": ("moe", "ep_group", ()),
    "expert_group": ("moe", "ep_group", ()),
    "ep_mp_group": ("moe", "ep_mp_group", ()),
    "expert_mp_group": ("moe", "ep_mp_group", ()),
    "moe_experts": ("moe", "moe_experts", ()),
    "moe_type": ("moe", "type", ()),
}
"""Deprecated key -> (section, key in it, other names of the section)."""


class MoETypeEnum(str, Enum):
    """Layers of experts: by themselves, or beside a dense layer."""

    residual = "residual"
    standard = "standard"


class QuantTypeEnum(str, Enum):
    """Whether the whole numbers lie around zero or between two ends."""

    asym = "asymmetric"
    sym = "symmetric"


class DeepSpeedTPConfig(Section):
    """Tensor parallelism: each layer is divided over ranks."""

    enabled: bool = option(True, "Divide layers over ranks.")
    tp_size: int = option(1, "Ranks that divide each layer.", ge=1)
    tp_grain_size: int = option(
        64,
        "Lengths are cut at multiples of this, where heads do not say where. Default: less in "
        "small models.",
        ge=1,
    )
    mpu: Any = option(
        None, "An object with get_model_parallel_group and its kin, whose groups are used."
    )
    tp_group: Any = option(None, "A process group whose ranks divide the layers.")


class DeepSpeedMoEConfig(Section):
    """Expert parallelism: ranks have different experts."""

    enabled: bool = option(True, "Divide experts over ranks.")
    ep_size: int = option(1, "Ranks that divide the experts of a layer.", ge=1)
    moe_experts: list[int] = option(
        [1],
        "Experts of each layer.",
        alias="num_experts",
        without_effect="the layers say how many they have",
    )
    type: MoETypeEnum = option(
        MoETypeEnum.standard,
        "standard or residual.",
        without_effect="the layers are what the model is made of",
    )
    ep_mp_group: Any = option(
        None, "A process group.", without_effect="groups come from the mesh of ranks"
    )
    ep_group: Any = option(
        None,
        "A process group.",
        alias="expert_group",
        without_effect="groups come from the mesh of ranks",
    )

    @field_validator("moe_experts", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        return [value] if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("type", mode="before")
    @classmethod
    def _member(cls, value: Any) -> Any:
        return value.value if isinstance(value, Enum) else value


class BaseQuantConfig(Section):
    """Whole numbers in place of floats."""

    enabled: bool = option(True, "Quantise.")
    num_bits: Literal[8, 4] = option(8, "Bits of a number: 8 or 4.")
    q_type: QuantTypeEnum = option(QuantTypeEnum.sym, "symmetric or asymmetric.")
    q_groups: int = option(
        1,
        "Groups of a matrix.",
        ge=1,
        without_effect="group_size weights of a row have a scale in common",
    )

    @field_validator("q_type", mode="before")
    @classmethod
    def _member(cls, value: Any) -> Any:
        return value.value if isinstance(value, Enum) else value


class LayerQuantization(Section):
    """How the weights of some layers are quantised."""

    num_bits: Literal[8, 4] = option(8, "Bits of a number: 8 or 4.")
    group_size: int | None = option(
        None, "Weights of a row with a scale in common; null: 32.", ge=2, multiple_of=2
    )
    group_dim: Literal[0, 1] = option(
        1,
        "The dimension along which a group lies.",
        without_effect="a group is always a part of a row",
    )
    symmetric: bool | None = option(
        None, "Numbers lie around zero; null: in 8 bits they do, in 4 not."
    )

    @property
    def group(self) -> int:
        """Weights with a scale in common."""
        return self.group_size or 32


class WeightQuantConfig(BaseQuantConfig):
    """Weights of linear layers."""

    group_size: int | None = option(
        None, "Weights of a row with a scale in common; null: 32.", ge=2, multiple_of=2
    )
    quantized_initialization: LayerQuantization | dict[str, Any] = option(
        {}, "All layers, whatever dtype says."
    )
    post_init_quant: dict[str, LayerQuantization] = option(
        {},
        "Part of a layer's name, or the name with wildcards -> how it is quantised, whatever dtype "
        "says.",
    )

    @field_validator("quantized_initialization")
    @classmethod
    def _opened(cls, value: Any) -> Any:
        return (
            LayerQuantization.model_validate(value) if value and isinstance(value, dict) else value
        )

    def layers(self, bits: int) -> Mapping[str, LayerQuantization]:
        """Name of layers, the first that fits counts -> how they are quantised.

        bits: that dtype asks for.
        """
        found = dict(self.post_init_quant) if self.enabled else {}
        if self.enabled and isinstance(self.quantized_initialization, LayerQuantization):
            found["*"] = self.quantized_initialization
        elif bits:
            given = "q_type" in self.model_fields_set
            symmetric = self.q_type is QuantTypeEnum.sym if given else None
            num_bits: Any = bits
            found["*"] = LayerQuantization(
                num_bits=num_bits, group_size=self.group_size, symmetric=symmetric
            )
        return found


class WeightQuantization(WeightQuantConfig):
    """The section ``weight_quantization``: linear layers are quantised for inference.

    All in `num_bits`, unless quantized_initialization or post_init_quant say which.
    """


class ActivationQuantConfig(BaseQuantConfig):
    """Activations, which are not quantised beforehand; kernels may round them in products."""

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """What is given has no effect."""
        if self.enabled and given:
            yield "", "has no effect: weights are quantised, activations only inside of products"


class QKVQuantConfig(Section):
    """Weights of queries, keys and values."""

    enabled: bool = option(True, "Quantise them as other weights.")


class QuantizationConfig(Section):
    """Quantisation, with dtype int8 or int4."""

    enabled: bool = option(True, "Quantise where dtype says so.")
    activation: ActivationQuantConfig = option(ActivationQuantConfig(), "Activations.")
    weight: WeightQuantConfig = option(WeightQuantConfig(), "Weights of linear layers.")
    qkv: QKVQuantConfig = option(QKVQuantConfig(), "Queries, keys and values.")


class InferenceCheckpointConfig(Section):
    """Where weights are read and written; the same keys at the top say the same."""

    checkpoint_dir: str | None = option(None, "The folder or file to load; as checkpoint.")
    save_mp_checkpoint_path: str | None = option(None, "The folder to save to.")
    base_dir: str | None = option(None, "The root of the files.")


class DeepSpeedInferenceConfig(Section):
    """The config of `init_inference`."""

    replace_with_kernel_inject: bool = option(
        False,
        "Known families run as programs of compiled kernels; else the module itself runs.",
        alias="kernel_inject",
    )
    dtype: Literal["fp32", "fp16", "bf16", "int8", "int4"] = option(
        "fp16", "The weights' dtype; int8 and int4: of linear layers, the rest in bf16."
    )
    tensor_parallel: DeepSpeedTPConfig = option(
        DeepSpeedTPConfig(), "Layers divided over ranks.", alias="tp"
    )
    enable_cuda_graph: bool = option(
        False, "Record a graph per shape at the first call, replay it later."
    )
    use_triton: bool = option(False, "Kernels in Triton; an error where Triton is missing.")
    triton_autotune: bool = option(
        False, "Tune them at the first run.", without_effect="no kernel is in Triton"
    )
    zero: dict[str, Any] = option(
        {}, "Keys of zero_optimization: stage 3 keeps weights on the host or NVMe."
    )
    triangular_masking: bool = option(
        True, "A token sees no later ones; false: an error in models that say so.", alias="tm"
    )
    moe: DeepSpeedMoEConfig = option(
        DeepSpeedMoEConfig(), "Experts divided over ranks; true or false: its enabled."
    )
    keep_module_on_host: bool = option(
        False,
        "Load on the host first.",
        without_effect="only this rank's parts ever go to the device",
    )
    quant: QuantizationConfig = option(
        QuantizationConfig(), "Quantisation. A number, or the second of a pair, is weight.q_groups."
    )
    checkpoint: str | dict[str, Any] | None = option(
        None, "Weights to load: a folder, a file, or a JSON file (or dict) that lists files."
    )
    base_dir: str = option("", "The root of relative file names.")
    set_empty_params: bool = option(
        False, "The model was made without values (device meta); checkpoint has them."
    )
    save_mp_checkpoint_path: str | None = option(None, "Save each rank's part in this folder.")
    checkpoint_config: InferenceCheckpointConfig = option(
        InferenceCheckpointConfig(), "Where weights are read and written.", alias="ckpt_config"
    )
    return_tuple: bool = option(
        True,
        "Layers return tuples.",
        without_effect="layers and models return what transformers' do",
    )
    training_mp_size: int = option(
        1,
        "Parts in which the checkpoint was saved.",
        ge=1,
        without_effect="a checkpoint says so itself",
    )
    replace_method: str = option(
        "auto", "Deprecated.", without_effect="layers are found by their family"
    )
    injection_policy: dict[Any, Any] | None = option(
        None,
        "Class of a layer -> names of the linears in it whose outputs are summed over ranks.",
        alias="injection_dict",
    )
    injection_policy_tuple: tuple[str, ...] | None = option(
        None, "Names of such linears in any layer."
    )
    config: dict[str, Any] | None = option(None, "More keys, as if they stood here.", alias="args")
    max_out_tokens: int = option(
        1024, "Most tokens of a prompt and its answer.", alias="max_tokens", ge=1
    )
    min_out_tokens: int = option(
        1, "It is an error when there is room for fewer than so many.", alias="min_tokens", ge=1
    )
    transposed_mode: bool = option(
        False, "Weights are stored transposed.", without_effect="kernels read both orders"
    )
    cache_tokens: int | None = option(
        None,
        "Tokens that the KV cache holds, of all sequences together; null: 16 times max_out_tokens.",
        ge=1,
    )
    max_rows: int = option(512, "Most tokens of prompts that one step computes.", ge=1)
    max_sequences: int = option(64, "Most sequences that are generated at once.", ge=1)
    kernels: dict[str, str] = option(
        {}, "Operation -> the provider to use, as the key kernels of a training config."
    )

    @model_validator(mode="before")
    @classmethod
    def _move(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        moved = {**(data.get("config") or {}), **(data.get("args") or {}), **data}
        moved = {k: v for k, v in moved.items() if k not in ("config", "args")} | {
            k: v for k, v in data.items() if k in ("config", "args") and v is not None
        }
        for old, (section, key, aliases) in MOVED.items():
            if old not in moved:
                continue
            value = moved.pop(old)
            name = next((n for n in (section, *aliases) if n in moved), section)
            inner = _opened(moved.get(name))
            if not isinstance(inner, dict):
                continue  # the section itself reports this error
            if key in inner and inner[key] is not value and inner[key] != value:
                raise PydanticCustomError(
                    "ds_clash",
                    "{old} is {kind} of {new}, and both are set",
                    Clash(old, f"{name}.{key}")._asdict(),
                )
            moved[name] = {**inner, key: value}
        return moved

    @field_validator("dtype", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        members = value.value if isinstance(value, Enum) else value
        text = str(members[0] if isinstance(members, tuple) else members).removeprefix("torch.")
        return next((name for name, more in DTYPES.items() if text in more), text)

    @field_validator("moe", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        return {"enabled": value} if isinstance(value, bool) else value

    @field_validator("quant", mode="before")
    @classmethod
    def _groups(cls, value: Any) -> Any:
        if isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[0], bool):
            # the first asks for more groups in feed-forward layers, and there are no such groups
            value = value[1]
        if isinstance(value, int) and not isinstance(value, bool):
            return {"weight": {"q_groups": value}}
        return value

    @field_validator("injection_policy_tuple", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("zero", mode="before")
    @classmethod
    def _dict(cls, value: Any) -> Any:
        return value.model_dump(exclude_unset=True) if hasattr(value, "model_dump") else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_out_tokens > self.max_out_tokens:
            raise ValueError(
                f"min_out_tokens {self.min_out_tokens} is more than max_out_tokens "
                f"{self.max_out_tokens}"
            )
        if self.set_empty_params and self.weights is None:
            raise ValueError("set_empty_params makes no values; name the weights with checkpoint")
        for key in ("base_dir", "save_mp_checkpoint_path"):
            here = getattr(self, key)
            inner = getattr(self.checkpoint_config, key)
            if here and inner and here != inner:
                raise ValueError(
                    f"{key} is {here!r}, and checkpoint_config.{key} {inner!r}; give one of them"
                )
        if self.checkpoint is not None and self.checkpoint_config.checkpoint_dir not in (
            None,
            self.checkpoint,
        ):
            raise ValueError(
                "checkpoint and checkpoint_config.checkpoint_dir differ; give one of them"
            )
        return self

    @property
    def weights(self) -> str | dict[str, Any] | None:
        """What is loaded."""
        return (
            self.checkpoint
            if self.checkpoint is not None
            else self.checkpoint_config.checkpoint_dir
        )

    @property
    def root(self) -> str:
        """The folder of relative file names."""
        return self.base_dir or self.checkpoint_config.base_dir or ""

    @property
    def save_to(self) -> str | None:
        """Where each rank's part is saved."""
        return self.save_mp_checkpoint_path or self.checkpoint_config.save_mp_checkpoint_path

    @property
    def bits(self) -> int:
        """Bits of quantised weights; 0: they are floats."""
        named = {"int8": 8, "int4": 4}.get(self.dtype, 0)
        weight = self.quant.weight
        if not (self.quant.enabled and weight.enabled):
            return 0
        return (weight.num_bits if "num_bits" in weight.model_fields_set else named) if named else 0

    @property
    def floats(self) -> str:
        """The dtype of what stays floats, as torch names it."""
        return {"fp32": "float32", "fp16": "float16"}.get(self.dtype, "bfloat16")

    @property
    def tp_size(self) -> int:
        """Ranks that divide each layer."""
        return self.tensor_parallel.tp_size if self.tensor_parallel.enabled else 1

    @property
    def ep_size(self) -> int:
        """Ranks that divide the experts of a layer."""
        return self.moe.ep_size if self.moe.enabled else 1

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """Deprecated keys, and what has no effect with these values."""
        for source in (given, given.get("config") or {}, given.get("args") or {}):
            for old, (section, key, _) in MOVED.items():
                if old in source:
                    yield old, f"is deprecated and was read as '{section}.{key}'; rename it"
        if not isinstance(given.get("quant", {}), (Mapping, Section)):
            yield (
                "quant",
                "has no effect as groups of a matrix: group_size weights of a row have a scale in "
                "common",
            )
        weights = self.quant.weight.layers(self.bits) if self.quant.enabled else {}
        if self.dtype in ("int8", "int4") and not weights:
            off = "quant.weight.enabled" if self.quant.enabled else "quant.enabled"
            yield (
                "dtype",
                f"{self.dtype} quantises nothing, because {off} is false; weights are "
                f"{self.floats}",
            )
        elif "quant" in given and not weights:
            yield "quant", f"has no effect: dtype is {self.dtype}; quantise with int8 or int4"


def _opened(value: Any) -> Any:
    """A section as a dict of what was given."""
    if value is None:
        return {}
    if isinstance(value, bool):
        return {"enabled": value}
    if isinstance(value, Section):
        return {name: getattr(value, name) for name in value.model_fields_set}
    return dict(value) if isinstance(value, Mapping) else value
