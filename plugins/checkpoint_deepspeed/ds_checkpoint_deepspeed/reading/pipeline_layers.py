"""Pipelines of DeepSpeed: a file per layer, which all stages' weights are in, whatever ZeRO's
stage.

A layer's parameters are named by its number, ``7.weight``, those of tied layers by their key,
``tied_modules.embed.weight``. A tied layer's file has its number as well, so its key is known from
ZeRO's files only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ds_run_state.slices import param_of
from torch import Tensor

from ds_checkpoint_deepspeed.reading.folder import Files, load
from ds_checkpoint_deepspeed.reading.foreign import Part, whole
from ds_checkpoint_deepspeed.reading.stage0 import read_stage0, shape_of

TIED = "tied_modules."


def _layer_tensors(files: Files, tp: int) -> dict[int, dict[str, Tensor]]:
    """Layer -> its state dict, of one tensor-parallel rank.

    With several of them, they are named by it.
    """
    ranks = sorted({rank for _, rank in files.layers})
    tp = tp if tp in ranks else ranks[0]
    return {layer: load(path) for (layer, rank), path in sorted(files.layers.items()) if rank == tp}


def with_layers(files: Files, tp: int, buffers: set[str], part: Part) -> Part:
    """`part`, all stages under ZeRO of one tensor-parallel rank, with what only layers' files have:
    buffers, and weights that are not trained."""
    trained = {
        param_of(p.name): tuple(p.shape) for p in part.pieces if p.name.startswith("module/")
    }
    tied: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in trained.items():
        if name.startswith(TIED):
            key, _, rest = name.removeprefix(TIED).partition(".")
            tied.setdefault(key, {})[rest] = shape
    more: dict[str, Tensor] = {}
    for layer, tensors in _layer_tensors(files, tp).items():
        prefix = f"{layer}."
        if not any(prefix + key in trained for key in tensors):
            shapes = {key: tuple(t.shape) for key, t in tensors.items()}
            prefix = next(
                (f"{TIED}{k}." for k, params in tied.items() if params.items() <= shapes.items()),
                prefix,
            )
        more |= {prefix + key: t for key, t in tensors.items() if prefix + key not in trained}
    pieces = [*part.pieces, *(whole(f"module/{name}", t) for name, t in more.items())]
    frozen = list(dict.fromkeys([*part.frozen, *(n for n in more if n not in buffers)]))
    return dataclasses.replace(part, pieces=pieces, frozen=frozen)


def stages_without_zero(files: Files, models: Sequence[dict[str, Any]], tp: int) -> list[Part]:
    """The stages of one tensor-parallel rank; the layers of each follow from the shapes that its
    optimizer has.
    """
    layers = _layer_tensors(files, tp)
    savers = [model.get("optimizer") for model in models]
    buffers = {n for model in models for n in model.get("buffer_names") or ()}
    owned = _owned([_sizes(saved) for saved in savers], layers, buffers)
    if owned is None:
        module = {
            f"{layer}.{key}": t for layer, tensors in layers.items() for key, t in tensors.items()
        }
        why = (
            "the optimizer's states are left out: stage 0 stores them without names, and shapes do "
            "not tell which "
            "layers each pipeline stage had; save with stage 1 to keep them, and where layers are "
            "tied"
        )
        return [dataclasses.replace(read_stage0(module, buffers, None), missing=[why])]
    modules = [
        {f"{layer}.{key}": t for layer in own for key, t in layers[layer].items()} for own in owned
    ]
    return [read_stage0(m, buffers, saved) for m, saved in zip(modules, savers, strict=True)]


def _sizes(saved: Any) -> list[tuple[int, ...] | None] | None:
    """The shapes of a saved optimizer's parameters, in order, None for those without states; None
    where it is in groups or missing."""
    if not isinstance(saved, dict):
        return None
    inner = saved.get("optimizer_state_dict", saved)
    if len(inner["param_groups"]) != 1:
        return None
    masters = [m for group in saved.get("fp32_groups") or () for m in group]
    numbers = inner["param_groups"][0]["params"]
    return [tuple(m.shape) for m in masters] or [
        shape_of(inner["state"].get(n, {})) for n in numbers
    ]


def _owned(
    wanted: Sequence[list[tuple[int, ...] | None] | None],
    layers: dict[int, dict[str, Tensor]],
    buffers: set[str],
) -> list[list[int]] | None:
    """The layers of each stage, which are neighbours; None where the shapes do not tell."""
    numbers = sorted(layers)
    owned = []
    place = 0
    for shapes in wanted:
        if shapes is None:
            return None
        left = list(shapes)
        begin = place
        while left and place < len(numbers):
            number = numbers[place]
            tensors = [
                tuple(t.shape)
                for key, t in layers[number].items()
                if f"{number}.{key}" not in buffers
            ]
            if len(left) < len(tensors) or any(
                a not in (None, b) for a, b in zip(left, tensors, strict=False)
            ):
                return None
            left = left[len(tensors) :]
            place += 1
        if left:
            return None
        owned.append(numbers[begin:place])
    owned[-1] += numbers[place:]  # of layers without parameters
    return owned if not any(layers[n] for n in numbers[place:]) else None
