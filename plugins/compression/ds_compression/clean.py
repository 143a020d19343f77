"""`redundancy_clean`: compressed layers become ordinary ones, with the weights that they used, and
smaller where asked.

[Note: cutting] A pruned row is cut out of a layer only where the config names the
``related_modules`` that would miss it; their inputs are cut with it, so the model calculates what
it did with zeros. Otherwise the zeros stay.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from ds_run_state.lazy import lazy_weight
from torch import Tensor, nn

from ds_compression import clock
from ds_compression.apply import apply_section
from ds_compression.config import CompressionConfig
from ds_compression.layers.layer import (
    Compression,
    Mask,
    compressed_modules,
    compression_of,
    matrix,
    plain,
)
from ds_compression.matching import is_transposed, kind_of, matching, refuse, sizes
from ds_compression.reading import inner, section_of
from ds_core.errors import UsageError
from ds_core.process import log_once

log = logging.getLogger("ds_compression")

HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads")


@dataclass(frozen=True, slots=True)
class _Cut:
    """Outputs of `owner` (inputs, for heads) to keep, and what is cut with it.

    path: of the config's key.
    """

    path: str
    mask: Mask
    owner: nn.Module
    related: tuple[tuple[str, nn.Module], ...]


@torch.no_grad()
def redundancy_clean(
    model: nn.Module, deepspeed_config: Any, mpu: None = None, *, tell_heads: bool = True
) -> nn.Module:
    """Bake compression into the weights of `model`, in place, and return it.

    Weights get their values at the end of the schedule (target bits, nearest level, masks), masks
    and scores disappear, and what is pruned of layers with ``related_modules`` is cut out. All
    names are the model's own again. Quantised inputs stay: they are no property of weights. An
    optimizer or engine of the model is of no use any more. A model that is not compressed yet is an
    architecture: it gets the shapes, to load a cleaned state into.
    tell_heads: write the number of heads that are left into the modules that have it.

    Raises ConfigError where related modules do not fit, UsageError where weights are partitioned
    over ranks.
    """
    if mpu is not None:
        raise UsageError(
            "redundancy_clean takes no mpu: layers that are divided over ranks cannot be compressed"
        )
    section = section_of(deepspeed_config)
    target = inner(model)
    if any(lazy_weight(p) is not None or hasattr(p, "ds_shape") for p in target.parameters()):
        raise UsageError(
            "the weights are sharded over ranks: save them (engine.save_16bit_model, or a "
            "checkpoint and its "
            "export), load them into a model after init_compression, and clean that one"
        )
    if clock.progress_of(target) is None:
        apply_section(target, section)
    clock.read_buffers(target)
    # Everything is checked before the first weight changes.
    cuts = list(_cuts(target, section))
    for cut in cuts:
        _check(cut)
    kept = [_kept(cut.owner, cut.mask) for cut in cuts]
    _write(target, {m: _final(m, c) for m, c in compressed_modules(target)})
    for module, compression in list(compressed_modules(target)):
        _finish(module, compression)
    for cut, mask in zip(cuts, kept, strict=True):
        _apply(target, cut, mask, tell_heads)
    clock.stop(target)
    return model


# -- weights ---------------------------------------------------------------------------------------


def _final(module: nn.Module, compression: Compression) -> dict[str, Tensor]:
    """The values of weight and bias at the end of the schedule."""
    quantiser = compression.quantiser
    if quantiser is not None:
        quantiser.bits = quantiser.target
        quantiser.share = 1.0
        quantiser.seed = None
    for mask in compression.masks:
        mask.active = mask.pattern is None or mask.made
    used = {name: getattr(module, name) for name in ("weight", "bias")}
    return {name: value.detach().clone() for name, value in used.items() if value is not None}


def _write(model: nn.Module, final: dict[nn.Module, dict[str, Tensor]]) -> None:
    """Write final values into parameters; layers that use different values of one parameter get one
    each.
    """
    holders: dict[nn.Parameter, list[tuple[nn.Module, str, Tensor]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                value = final.get(module, {}).get(name, parameter.detach())
                holders.setdefault(parameter, []).append((module, name, value))
    for parameter, rows in holders.items():
        first = rows[0][2]
        if all(torch.equal(value, first) for _, _, value in rows):
            parameter.data = first.clone()
            parameter.grad = None
            continue
        for module, name, value in rows:
            if name in final.get(module, {}):
                module._parameters[name] = nn.Parameter(
                    value, requires_grad=parameter.requires_grad
                )


def _finish(module: nn.Module, compression: Compression) -> None:
    """Make it an ordinary layer; with quantised inputs it stays compressed."""
    for mask in compression.masks:
        tensors: dict[str, Any] = module._parameters if mask.learned else module._buffers
        del tensors[mask.tensor]
    compression.masks = []
    compression.quantiser = None
    if compression.inputs is None:
        plain(module)
    else:
        compression.inputs.active = True


def _kept(module: nn.Module, mask: Mask) -> Tensor:
    """True for what the mask of `module` keeps: outputs, or heads.

    By absolute values, where it is not made yet.
    """
    if mask.learned or not mask.made:
        parameter = module._parameters["weight"]
        assert parameter is not None
        scores = module._parameters.get(mask.tensor)
        return mask.calculate(scores if scores is not None else matrix(module, parameter)).view(-1)
    buffer = module._buffers[mask.tensor]
    assert buffer is not None
    return buffer.bool().view(-1)


# -- shapes ----------------------------------------------------------------------------------------


def _cuts(model: nn.Module, section: CompressionConfig) -> Iterator[_Cut]:
    """Every layer with related modules.

    They pair in the model's order: the first match with the first match.
    """
    for technique, kind, layer in (
        ("row_pruning", "row", "linear"),
        ("head_pruning", "head", "linear"),
        ("channel_pruning", "channel", "conv"),
    ):
        part = section.techniques().get(technique)
        for name, group in part.different_groups.items() if part is not None else ():
            for index, pattern in enumerate(
                group.modules if group.related_modules is not None else ()
            ):
                path = f"compression_training.{technique}.different_groups.{name}.related_modules[{index}]"
                owners = list(matching(model, pattern, (layer,)))
                columns = []
                for related in group.related_modules[index]:
                    found = list(matching(model, related, ("linear", "conv", "norm")))
                    # One list serves several models: of layers that this one has not, there is
                    # nothing to cut.
                    if not found and len(group.related_modules[index]) > 1:
                        log_once(
                            log,
                            logging.WARNING,
                            f"{path}: {related!r} matches no layer, and is passed over",
                        )
                        continue
                    if len(found) != len(owners):
                        why = (
                            f"{related!r} matches {len(found)} layers, and {pattern!r} "
                            f"{len(owners)}"
                        )
                        refuse(path, why, "each layer needs the ones that are cut with it")
                    columns.append(found)
                for place, (_, owner) in enumerate(owners):
                    mask = _mask_of(owner, kind)
                    yield _Cut(path, mask, owner, tuple(column[place] for column in columns))


def _mask_of(module: nn.Module, kind: str) -> Mask:
    compression = compression_of(module)
    assert compression is not None
    return next(m for m in compression.masks if m.kind == kind)


def _check(cut: _Cut) -> None:
    """Raise ConfigError where a related module has not what is cut."""
    outputs, inputs = sizes(cut.owner)
    whole = inputs if cut.mask.kind == "head" else outputs
    for name, module in cut.related:
        related = sizes(module)
        size = (
            related[0]
            if cut.mask.kind == "head" or kind_of(module) == "norm"
            else _features(module)
        )
        if size % whole:
            what = "outputs" if cut.mask.kind == "head" else "inputs"
            refuse(
                cut.path,
                f"{name} has {size} {what}, which are no multiple of {whole}",
                "name the layers that fit",
            )
        if isinstance(module, nn.Conv2d) and module.groups != 1:
            refuse(
                cut.path,
                f"{name} has {module.groups} groups",
                "a convolution with groups cannot be cut",
            )


def _features(module: nn.Module) -> int:
    """Its inputs: channels, for a convolution."""
    return module.in_channels if isinstance(module, nn.Conv2d) else sizes(module)[1]


def _apply(model: nn.Module, cut: _Cut, kept: Tensor, tell_heads: bool) -> None:
    """Cut the owner and its related modules."""
    if cut.mask.kind == "head":
        inputs = kept.repeat_interleave(sizes(cut.owner)[1] // kept.numel())
        _keep(cut.owner, inputs, inputs=True)
        for name, module in cut.related:
            _keep(module, inputs.repeat(sizes(module)[0] // inputs.numel()), inputs=False)
            if tell_heads:
                _fewer_heads(model, name, cut.mask.parts, int(kept.sum()))
        return
    _keep(cut.owner, kept, inputs=False)
    for _, module in cut.related:
        if kind_of(module) == "norm":
            _keep_norm(module, kept)
        else:  # a linear layer after a convolution has each channel several times
            _keep(module, kept.repeat_interleave(_features(module) // kept.numel()), inputs=True)


def _keep(module: nn.Module, kept: Tensor, *, inputs: bool) -> None:
    """Keep these outputs or inputs of a layer, in its weight, its bias and its sizes."""
    dim = int(inputs) ^ int(is_transposed(module))
    weight = module._parameters["weight"]
    bias = module._parameters.get("bias")
    assert weight is not None
    _replace(module, "weight", weight, kept, dim)
    if bias is not None and not inputs:
        _replace(module, "bias", bias, kept, 0)
    count = int(kept.sum())
    for name in (
        ("in_features", "in_channels", "nx") if inputs else ("out_features", "out_channels", "nf")
    ):
        if name in module.__dict__:
            setattr(module, name, count)


def _keep_norm(module: nn.Module, kept: Tensor) -> None:
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            _replace(module, name, parameter, kept, 0)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.dim() == 1:
            module._buffers[name] = _index(buffer, kept, 0)
    module.__dict__["num_features"] = int(kept.sum())


def _replace(module: nn.Module, name: str, parameter: nn.Parameter, kept: Tensor, dim: int) -> None:
    """A new parameter: a graph that has used the old one remembers its shape."""
    made = _index(parameter.detach(), kept, dim)
    module._parameters[name] = nn.Parameter(made, requires_grad=parameter.requires_grad)


def _index(tensor: Tensor, kept: Tensor, dim: int) -> Tensor:
    return tensor.index_select(dim, kept.nonzero().view(-1).to(tensor.device)).contiguous()


def _fewer_heads(model: nn.Module, name: str, before: int, after: int) -> None:
    """Tell the module that has the projection `name` how many heads there are now, where it has
    their number.
    """
    parent = model.get_submodule(name.rpartition(".")[0])
    for attribute in HEADS:
        if parent.__dict__.get(attribute) == before:
            setattr(parent, attribute, after)
            if isinstance(width := parent.__dict__.get("all_head_size"), int):
                parent.__dict__["all_head_size"] = width // before * after
