"""Reads modules and configurations of transformers; what is not known is `Unknown`, never
guessed."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from ds_inference_kit.program import Activation
from torch import Tensor, nn

from ds_inference.families.description import Tables

ACTIVATIONS = {
    "ReLU": Activation.RELU,
    "GELUActivation": Activation.GELU,
    "NewGELUActivation": Activation.GELU_TANH,
    "GELUTanh": Activation.GELU_TANH,
    "FastGELUActivation": Activation.GELU_TANH,
    "AccurateGELUActivation": Activation.GELU_TANH,
    "BloomGelu": Activation.GELU_TANH,
    "QuickGELUActivation": Activation.QUICK_GELU,
    "SiLUActivation": Activation.SILU,
    "SiLU": Activation.SILU,
    "Tanh": Activation.TANH,
}
HOMES = (
    "torch.nn.modules.",
    "transformers.models.",
    "transformers.activations",
    "transformers.pytorch_utils",
)
ROPES = ("default", "linear", "llama3", "yarn", "dynamic")
COMMON = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads max_position_embeddings "
    "initializer_range use_cache "
    "pad_token_id bos_token_id eos_token_id tie_word_embeddings classifier_dropout "
    "attention_dropout intermediate_size"
)


class Unknown(Exception):
    """There is no lowering for this model; the message says what is in the way."""


def fields(config: Any, known: str, **values: Iterable[object]) -> None:
    """Every field that the class of `config` declares is in `known` or off; those of `values` are
    among their values.

    So a version of transformers that adds a field to a family is not answered with a program that
    ignores it.
    """
    for name in type(config).__annotations__:
        value = getattr(config, name, None)
        if (
            name not in f"{COMMON} {known}".split()
            and name not in values
            and value not in (None, False)
        ):
            raise Unknown(f"{name} = {value!r} of its configuration is not known")
    for name, allowed in values.items():
        if (value := getattr(config, name, None)) not in tuple(allowed):
            raise Unknown(f"{name} = {value!r} is not served")


def plain(base: nn.Module) -> None:
    """The modules are those of torch and transformers, with their own forward methods."""
    for name, module in base.named_modules():
        kind = type(module)
        foreign = not kind.__module__.startswith((*HOMES, "ds_")) or "forward" in vars(module)
        if foreign:
            raise Unknown(
                f"{name or 'the model'} is a {kind.__module__}.{kind.__qualname__} or computes in "
                "its own way"
            )


def activation(module: Any) -> Activation:
    """What an activation module computes."""
    found = ACTIVATIONS.get(type(module).__name__)
    if found is None:
        raise Unknown(f"activation {type(module).__name__} is not served")
    return found


def rotary(module: Any, config: Any) -> Tables:
    """The tables of a rotary embedding module of transformers."""
    if module.rope_type not in ROPES:
        raise Unknown(f"rope_type {module.rope_type!r} is not served")
    return functools.partial(tables, module, config.max_position_embeddings)


def tables(module: Any, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin of all positions.

    "dynamic" frequencies change with positions behind those of training only.
    """
    speeds = module.original_inv_freq.float()
    angles = torch.arange(positions, device=speeds.device, dtype=torch.float32)[:, None] * speeds
    return angles.cos() * module.attention_scaling, angles.sin() * module.attention_scaling


def windows(config: Any, layers: int) -> list[int | None]:
    """The sliding window of each layer, of a configuration with `layer_types` or of one window for
    all.
    """
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise Unknown(f"layer_types {sorted(unknown)} are not served")
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
