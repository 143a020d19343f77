"""Weights of files into a model, one at a time: of a divided layer only this rank's part is read.

A model that was made on the device ``meta`` (``set_empty_params``) gets its memory weight by
weight, so that no second copy of it is ever in memory.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ds_run_state.slices import Slice
from safetensors.torch import save_file
from torch import Tensor, nn

from ds_core import comm
from ds_core.context import Context
from ds_core.errors import CheckpointError
from ds_inference.weights.sources import PARTS, Source

log = logging.getLogger("ds_inference")


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor of the model."""

    # All its names: of tied weights several.
    names: tuple[str, ...]
    # The modules that have it, and by which name.
    owners: tuple[tuple[nn.Module, str], ...]
    # As it is now.
    tensor: Tensor

    def put(self, value: Tensor) -> None:
        """Let all owners have `value`."""
        new: Tensor = value
        if isinstance(self.tensor, nn.Parameter):
            new = nn.Parameter(
                value, requires_grad=self.tensor.requires_grad and value.is_floating_point()
            )
        for module, name in self.owners:
            table = module._parameters if isinstance(self.tensor, nn.Parameter) else module._buffers
            table[name] = new  # type: ignore[assignment]


def _places(model: nn.Module) -> Iterator[_Place]:
    """Parameters and the buffers that checkpoints hold."""
    names: dict[int, list[str]] = defaultdict(list)
    owners: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    tensors: dict[int, Tensor] = {}
    for prefix, module in model.named_modules():
        held = [(k, v) for k, v in module._parameters.items() if v is not None]
        held += [
            (k, v)
            for k, v in module._buffers.items()
            if v is not None and k not in _fleeting(module)
        ]
        for key, tensor in held:
            # By identity: tied weights are one place with several names.
            tensors[id(tensor)] = tensor
            names[id(tensor)].append(f"{prefix}.{key}" if prefix else key)
            owners[id(tensor)].append((module, key))
    for key_, tensor in tensors.items():
        yield _Place(tuple(names[key_]), tuple(owners[key_]), tensor)


def _fleeting(module: nn.Module) -> set[str]:
    """Buffers that checkpoints do not hold."""
    return set(module._non_persistent_buffers_set)


def is_empty(model: nn.Module) -> bool:
    """Whether parameters have no memory."""
    return any(p.is_meta for p in model.parameters())


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Weights to `dtype`, one after the other.

    Buffers that no checkpoint holds keep theirs (rotary frequencies).
    """
    for place in _places(model):
        if place.tensor.is_floating_point() and place.tensor.dtype != dtype:
            if place.tensor.is_meta:
                # A parameter on `meta` has no data to replace: its owners get another.
                place.put(place.tensor.detach().to(dtype))
            else:
                place.tensor.data = place.tensor.data.to(dtype)


@torch.no_grad()
def fill(
    model: nn.Module, source: Source, slices: Mapping[str, Slice], device: torch.device
) -> None:
    """Give every weight of `model` its values.

    CheckpointError names weights that `source` lacks, or of other shapes.

    slices: of parameters of which only a part is here, by name.
    """
    # Those that no file has.
    _make_buffers(model, device)
    places = list(_places(model))
    recipes = _recipes(model, source, {name for place in places for name in place.names})
    missing = [place for place in places if not any(n in recipes for n in place.names)]
    # A buffer that is in memory may be missing: it has the values that the module gave it.
    absent = [p for p in missing if isinstance(p.tensor, nn.Parameter) or p.tensor.is_meta]
    if absent:
        some = ", ".join(p.names[0] for p in absent[:5]) + (
            f" and {len(absent) - 5} more" if len(absent) > 5 else ""
        )
        has = ", ".join(source.names()[:3])
        raise CheckpointError(
            f"{source.where} lacks {some}; it has names such as {has}: is it of this model?"
        )
    used: set[str] = set()
    for place in places:
        # Any of a tied weight's names will do: files have one of them.
        name = next((n for n in place.names if n in recipes), None)
        if name is None:
            continue
        recipe = recipes[name]
        used.update(recipe.sources)
        # Where ranks divide the layer: only this rank's part is read.
        piece = next((slices[n] for n in place.names if n in slices), None)
        whole = piece.shape if piece is not None else tuple(place.tensor.shape)
        if recipe.shape is not None and recipe.shape != whole:
            raise CheckpointError(
                f"{source.where}: {name} has shape {recipe.shape}, and the model's {whole}"
            )
        value = recipe.read(piece)
        if value.shape != place.tensor.shape:
            raise CheckpointError(
                f"{source.where}: {name} has shape {tuple(value.shape)}, and the model's "
                f"{tuple(place.tensor.shape)}"
            )
        if place.tensor.is_meta:
            # One weight at a time, so that no second copy of the model is ever in memory.
            place.put(value.to(device=device, dtype=place.tensor.dtype).contiguous())
        else:
            place.tensor.data.copy_(value)
    if left := [n for n in source.names() if n not in used]:
        some = ", ".join(left[:5]) + (", ..." if len(left) > 5 else "")
        log.info(
            "%s has %d weights that the model has no use for: %s", source.where, len(left), some
        )


# -- names -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a weight of the model is read."""

    # The names in the file that it is made from.
    sources: tuple[str, ...]
    # The shape of the full weight, if it is known beforehand.
    shape: tuple[int, ...] | None
    # What a slice keeps of it, or all of it for None.
    read: Callable[[Slice | None], Tensor]


def _recipes(model: nn.Module, source: Source, wanted: set[str]) -> dict[str, _Recipe]:
    """Name in the model -> how to read it: by its own name, or by those that transformers reads it
    from.
    """
    found: dict[str, _Recipe] = {}
    rest = []
    for name in source.names():
        if name in wanted:
            found[name] = _plain(source, name)
        else:
            rest.append(name)
    # Its conversions are only of use for its own models, which have imported it already.
    if rest and "transformers" in sys.modules and hasattr(model, "base_model_prefix"):
        for name, recipe in _convert(model, source, rest, wanted).items():
            found.setdefault(name, recipe)
    return found


def _plain(source: Source, name: str) -> _Recipe:
    return _Recipe((name,), source.shape(name), lambda piece: source.read(name, piece))


def _convert(
    model: Any, source: Source, names: Sequence[str], wanted: set[str]
) -> dict[str, _Recipe]:
    """By the conversions that transformers has for the model: other names, and experts that are
    stacked.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    known = dict.fromkeys(wanted, True)
    found: dict[str, _Recipe] = {}
    merged: dict[str, list[tuple[str, str]]] = defaultdict(list)
    # Experts are stacked in the order of their numbers.
    for name in sorted(names, key=_natural):
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, known
        )
        if target not in wanted:
            # Without conversions: only the prefix of the base model is added or removed.
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, known)
        if target not in wanted:
            continue
        if pattern is None:
            found[target] = _plain(source, name)
        else:
            merged[target].append((name, pattern))
    for target, parts in merged.items():
        converter = by_pattern[parts[0][1]]
        found[target] = _Recipe(
            tuple(n for n, _ in parts), None, _merge(source, target, parts, converter, model)
        )
    return found


def _merge(
    source: Source, target: str, parts: Sequence[tuple[str, str]], converter: Any, model: Any
) -> Callable[[Slice | None], Tensor]:
    def read(piece: Slice | None) -> Tensor:
        from copy import deepcopy

        # A converter collects tensors; this one is used once for each weight that it makes.
        own = deepcopy(converter)
        for name, pattern in parts:
            own.add_tensor(target, name, pattern, source.read(name))
        made = own.convert(target, model=model, config=model.config)[target]
        whole: Tensor = made[0] if isinstance(made, list) else made
        return whole if piece is None else piece.take(whole)

    return read


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Numbers in a name count as numbers: experts.10 comes after experts.9."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def _make_buffers(model: nn.Module, device: torch.device) -> None:
    """Buffers that no checkpoint holds, of a model without memory: made again as the module makes
    them.
    """
    for name, module in model.named_modules():
        lost = [
            k
            for k in _fleeting(module)
            if module._buffers.get(k) is not None and module._buffers[k].is_meta
        ]
        if not lost:
            continue
        initialise = getattr(model, "_init_weights", None)
        if not callable(initialise):
            raise CheckpointError(
                f"{name}.{lost[0]} is a buffer that no checkpoint holds, and nobody says how to "
                "make it; build the "
                f"model with memory, or register the buffer as persistent"
            )
        for key in lost:
            buffer = module._buffers[key]
            assert buffer is not None
            # Memory first: the model's own initialisation then writes into it.
            module._buffers[key] = torch.full_like(buffer, 0, device=device)
        # Initialising would overwrite weights that are in memory.
        flags = [p for p in module.parameters(recurse=False) if not p.is_meta]
        assert not flags, name
        initialise(module)


# -- saving ----------------------------------------------------------------------------------------


def save_parts(model: nn.Module, ctx: Context, slices: Mapping[str, Slice], folder: str) -> Path:
    """Write what each rank has as ``rank_00000.safetensors``, and JSON that says which part of a
    weight is where.

    It loads as `checkpoint` with any number of ranks. Collective; the JSON file.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"save_mp_checkpoint_path: {folder} cannot be made: {error.strerror}"
        ) from error
    group = ctx.mesh.group("tp") if ctx.mesh.has("tp") else comm.ALONE
    place = 0
    ranks = ctx.mesh.size("tp") if ctx.mesh.has("tp") else 1
    place = ctx.mesh.index("tp") if ranks > 1 else 0
    mine: dict[str, Tensor] = {}
    entries: dict[str, Any] = {}
    for item in _places(model):
        piece = next((slices[n] for n in item.names if n in slices), None)
        # What every rank has is written by the first.
        if piece is None and place:
            continue
        name = item.names[0]
        mine[name] = item.tensor.detach().to("cpu").contiguous()
        ranges = (piece or Slice.of(item.tensor.shape)).ranges
        entries[name] = {
            "shape": list(piece.shape if piece is not None else item.tensor.shape),
            "ranges": ranges,
        }
    # Ranks along other axes have the same weights.
    if ctx.mesh.size(*[a for a in ctx.mesh.names if a != "tp"]) == 1 or ctx.mesh.index("dp") == 0:
        save_file(mine, path / f"rank_{place:05d}.safetensors", metadata={"format": "pt"})
    # One rank's file says what it has; the index says which parts make a weight.
    every = comm.all_gather_json(entries, group=group) if ranks > 1 else [entries]
    weights: dict[str, Any] = {}
    for rank, found in enumerate(every):
        for name, entry in found.items():
            known = weights.setdefault(name, {"shape": entry["shape"], "parts": []})
            known["parts"].append({"file": rank, "ranges": entry["ranges"]})
    index = path / "ds_inference_config.json"
    if place == 0:
        files = [f"rank_{rank:05d}.safetensors" for rank in range(ranks)]
        text = json.dumps(
            {
                "type": PARTS,
                "version": 1,
                "tp_size": ranks,
                "checkpoints": files,
                "weights": weights,
            }
        )
        index.write_text(text)
    return index
