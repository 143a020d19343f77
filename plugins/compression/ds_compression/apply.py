"""`init_compression`: the layers that a config names become compressed layers."""

from __future__ import annotations

import logging
import math
import os
import zlib
from typing import Any

import torch
from ds_run_state.lazy import with_shapes
from torch import Tensor, nn

from ds_compression import clock
from ds_compression.config import CompressionConfig, Ratio, SparseGroup
from ds_compression.layers.layer import (
    UNSET,
    Compression,
    InputQuantiser,
    Mask,
    WeightQuantiser,
    compress,
    compression_of,
)
from ds_compression.layers.masks import PerRow, parse_pattern
from ds_compression.matching import chosen, is_transposed, kind_of, refuse, sizes
from ds_compression.reading import ROOT, inner, section_of
from ds_compression.student import copy_layers
from ds_core import comm
from ds_core.errors import ConfigError, Problem, UsageError

log = logging.getLogger("ds_compression")


def init_compression(
    model: nn.Module,
    deepspeed_config: Any,
    teacher_model: nn.Module | None = None,
    mpu: None = None,
) -> nn.Module:
    """Prepare `model` for training with compression, in place, and return it.

    deepspeed_config: a config with the section ``compression_training``: a dict or a file.
    teacher_model: where ``layer_reduction`` takes weights from. Parameters keep their names;
    learned masks add parameters, so call it before an optimizer is made. ``initialize`` does it
    too, unless it is done, and follows the schedule from there; a loop of your own calls
    `set_step`. Not collective.

    Raises ConfigError where a pattern matches nothing or a technique does not fit a layer,
    UsageError where a teacher is missing or the model is compressed already. Where several ranks
    run, another may have the layers that a pattern
    means (a stage of a pipeline): then it is a warning here, and ``initialize`` asks all of them.
    """
    if mpu is not None:
        raise UsageError(
            "init_compression takes no mpu: layers that are divided over ranks cannot be compressed"
        )
    section = section_of(deepspeed_config)
    target = inner(model)
    if section.layer_reduction.enabled:
        if teacher_model is None:
            raise UsageError(
                f"{ROOT}.layer_reduction is enabled: pass its teacher, init_compression(model, "
                "config, teacher)"
            )
        copy_layers(target, inner(teacher_model), section.layer_reduction)
    # A pattern without a match is an error, unless another rank may have the layers.
    missing = apply_section(target, section)
    alone = (
        comm.world_size() == 1
        if comm.is_initialized()
        else comm.find_rendezvous(os.environ) is None
    )
    if missing and alone:
        raise ConfigError(missing)
    for problem in missing:
        log.warning("%s: `initialize` asks whether another rank has some", problem)
    return model


def apply_section(model: nn.Module, section: CompressionConfig) -> list[Problem]:
    """Make layers of `model` compressed layers, at step 0; gives the patterns that match none.

    Other errors as `init_compression`.
    """
    if clock.progress_of(model) is not None:
        raise UsageError("the model is compressed already; call init_compression once")
    on = section.techniques()
    missing: list[Problem] = []
    with with_shapes(model):  # weights may be kept elsewhere, as after ds_zero.Init
        for name, attach in _TECHNIQUES.items():
            if name in on:
                attach(model, on[name], missing)
    clock.start(model, section).missing = missing
    return missing


# -- techniques ------------------------------------------------------------------------------------


def _weights(model: nn.Module, part: Any, missing: list[Problem]) -> None:
    shared = part.shared_parameters
    kinds = ("linear", "conv", "embedding")
    for group, name, module in chosen(
        model, "weight_quantization", part.different_groups, kinds, missing
    ):
        bits = part.different_groups[group].params
        (outputs, inputs) = sizes(module)
        groups = outputs if kind_of(module) == "embedding" else shared.quantize_groups
        if (outputs * inputs) % groups:
            key = f"{ROOT}.weight_quantization.shared_parameters.quantize_groups"
            refuse(
                key,
                f"{groups} groups do not divide the {outputs * inputs} weights of {name}",
                "choose a divisor",
            )
        mixed = shared.fp16_mixed_quantize
        _on(name, module).quantiser = WeightQuantiser(
            group=group,
            offset=shared.schedule_offset,
            start=bits.start_bits,
            target=bits.target_bits,
            period=max(1, bits.quantization_period),
            groups=groups,
            symmetric=shared.quantization_type == "symmetric",
            stochastic=shared.rounding == "stochastic",
            mix=mixed.quantize_change_ratio if mixed.enabled else None,
        )


def _inputs(model: nn.Module, part: Any, missing: list[Problem]) -> None:
    shared = part.shared_parameters
    kinds = ("linear", "conv")
    for group, name, module in chosen(
        model, "activation_quantization", part.different_groups, kinds, missing
    ):
        static = shared.range_calibration == "static"
        _on(name, module).inputs = InputQuantiser(
            group=group,
            offset=shared.schedule_offset,
            bits=part.different_groups[group].params.bits,
            symmetric=shared.quantization_type == "symmetric",
            static=static,
            images=kind_of(module) == "conv",
        )
        if static:
            module.register_buffer("activation_range", torch.zeros(2, device=_device(module)))


def sparse_groups(part: Any) -> dict[str, SparseGroup]:
    """The groups of sparse_pruning; snip_momentum has one of all layers where none is given."""
    shared = part.shared_parameters
    if shared.method == "snip_momentum" and not part.different_groups:
        return {"all": SparseGroup(params=Ratio(dense_ratio=shared.dense_ratio))}
    groups: dict[str, SparseGroup] = part.different_groups
    return groups


def _sparse(model: nn.Module, part: Any, missing: list[Problem]) -> None:
    shared = part.shared_parameters
    groups = sparse_groups(part)
    pattern = parse_pattern(shared.block_pattern) if shared.method == "snip_momentum" else None
    rows = list(
        chosen(
            model, "sparse_pruning", groups, ("linear", "conv"), missing, shared.excluded_modules
        )
    )
    if pattern is not None and (odd := [name for _, name, m in rows if not pattern.fits(sizes(m))]):
        key = f"{ROOT}.sparse_pruning.shared_parameters.block_pattern"
        fix = "add them to excluded_modules, or choose another pattern"
        refuse(key, f"{shared.block_pattern} does not divide the weights of {', '.join(odd)}", fix)
    for group, name, module in rows:
        ratio = groups[group].params.dense_ratio
        if isinstance(pattern, PerRow):
            ratio = 1 - pattern.pruned / pattern.of
        learned = shared.method == "topk"
        tensor = "sparse_mask_scores" if learned else "sparse_pruning_mask"
        mask = Mask(
            group, "sparse", shared.schedule_offset, ratio, learned, tensor, pattern=pattern
        )
        _attach(name, module, mask, _weight_shape(module))


def _rows(model: nn.Module, part: Any, missing: list[Problem]) -> None:
    _outputs(model, part, missing, "row", "linear")


def _channels(model: nn.Module, part: Any, missing: list[Problem]) -> None:
    _outputs(model, part, missing, "channel", "conv")


def _outputs(model: nn.Module, part: Any, missing: list[Problem], kind: str, layer: str) -> None:
    shared = part.shared_parameters
    for group, name, module in chosen(
        model, f"{kind}_pruning", part.different_groups, (layer,), missing
    ):
        if isinstance(module, nn.Conv2d) and module.groups != 1:
            why = f"{name} has {module.groups} groups, so its channels depend on each other"
            refuse(
                f"{ROOT}.channel_pruning.different_groups.{group}.modules",
                why,
                "leave it out of the patterns",
            )
        learned = shared.method == "topk"
        tensor = f"{kind}_mask_scores" if learned else f"{kind}_pruning_mask"
        ratio = part.different_groups[group].params.dense_ratio
        shape = (sizes(module)[0], *(1 for _ in _weight_shape(module)[1:]))
        _attach(
            name, module, Mask(group, kind, shared.schedule_offset, ratio, learned, tensor), shape
        )


def _heads(model: nn.Module, part: Any, missing: list[Problem]) -> None:
    shared = part.shared_parameters
    heads = shared.num_heads
    for group, name, module in chosen(
        model, "head_pruning", part.different_groups, ("linear",), missing
    ):
        if sizes(module)[1] % heads:
            key = f"{ROOT}.head_pruning.shared_parameters.num_heads"
            why = f"{heads} heads do not divide the {sizes(module)[1]} inputs of {name}"
            refuse(key, why, "give the model's number of heads")
        ratio = part.different_groups[group].params.dense_ratio
        mask = Mask(
            group, "head", shared.schedule_offset, ratio, True, "head_pruning_scores", parts=heads
        )
        _attach(name, module, mask, (1, heads))


_TECHNIQUES = {
    "weight_quantization": _weights,
    "activation_quantization": _inputs,
    "sparse_pruning": _sparse,
    "row_pruning": _rows,
    "head_pruning": _heads,
    "channel_pruning": _channels,
}
"""In the order in which they change a weight."""


# -- one layer -------------------------------------------------------------------------------------


def _on(name: str, module: nn.Module) -> Compression:
    """What is done to `module`, which is a compressed layer from now on."""
    found = compression_of(module)
    if found is None:
        found = Compression(name, is_transposed(module))
        compress(module, found)
    return found


def _attach(name: str, module: nn.Module, mask: Mask, shape: tuple[int, ...]) -> None:
    """Give `module` a mask, and the scores or the buffer that it needs, of `shape`."""
    if mask.learned:
        weight = module._parameters["weight"]
        assert weight is not None
        scores = _scores(f"{name}.{mask.tensor}", shape).to(_device(module), weight.dtype)
        module.register_parameter(mask.tensor, nn.Parameter(scores))
    else:
        unset = torch.full(shape, UNSET, dtype=torch.uint8, device=_device(module))
        module.register_buffer(mask.tensor, unset)
    _on(name, module).masks.append(mask)


def _scores(name: str, shape: tuple[int, ...]) -> Tensor:
    """Uniform in +-1/sqrt(fan_in), He's bound for slope sqrt(5); from the name, so equal on all
    ranks.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(math.prod(shape[1:]))


def _weight_shape(module: nn.Module) -> tuple[int, ...]:
    """Of the weight, outputs first."""
    weight = module._parameters["weight"]
    assert weight is not None
    return tuple(weight.shape[::-1] if is_transposed(module) else weight.shape)


def _device(module: nn.Module) -> torch.device:
    weight = module._parameters["weight"]
    assert weight is not None
    return torch.device("cpu") if weight.device.type == "meta" else weight.device
