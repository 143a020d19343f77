"""Modules by their dotted names, and layers in the place of others:
``deepspeed.utils.module_utils`` and kin.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn


def recursive_getattr(model: Any, module_name: str) -> Any:
    """What ``model.a.b.c`` is, for "a.b.c". Raises AttributeError."""
    for name in module_name.split("."):
        model = getattr(model, name)
    return model


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set ``model.a.b.c``, for "a.b.c". Raises AttributeError where there is no ``model.a.b``."""
    folder, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, folder) if folder else model, name, module)


def module_replacement(
    model: nn.Module, module_name: str, compression_technique: Any = None, mpu: Any = None
) -> Any:
    """The module of this name; techniques are switched on by the section ``compression_training``
    instead.

    Raises NotImplementedError for a technique.
    """
    if compression_technique is not None:
        raise NotImplementedError(
            "module_replacement(compression_technique=...): init_compression and the section "
            "compression_training of "
            "the config choose the layers and how they are compressed"
        )
    return recursive_getattr(model, module_name)


def convert_conv1d_to_linear(
    model: Any, convert_type: type[nn.Module] | Sequence[type[nn.Module]]
) -> Any:
    """The model, with an `nn.Linear` of the same weights in the place of each layer of
    `convert_type`.

    convert_type: a class whose weight is (in, out), as that of transformers' Conv1D.
    ``model.module`` is what is changed where there is one. The weights are those of the layer,
    transposed: parameters of new names and shapes.
    """
    inside = getattr(model, "module", model)
    kinds = (convert_type,) if inspect.isclass(convert_type) else tuple(convert_type)
    for name, layer in list(inside.named_modules()):
        if not isinstance(layer, kinds):
            continue
        weight: Any = layer.weight
        bias: Any = getattr(layer, "bias", None)
        # On the meta device: its own weights would be made only to be replaced.
        linear = nn.Linear(weight.shape[0], weight.shape[1], bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(
            weight.detach().t().contiguous(), requires_grad=weight.requires_grad
        )
        if bias is not None:
            linear.bias = bias
        recursive_setattr(inside, name, linear)
    return model
