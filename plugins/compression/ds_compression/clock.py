"""Where training stands: what each compressed layer does follows from the number of optimizer steps
that are done.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from ds_compression.layers.layer import UNSET, Compression, compressed_modules
from ds_compression.schedule import bits_at, share_at
from ds_core.errors import Problem, UsageError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from ds_compression.config import CompressionConfig

log = logging.getLogger("ds_compression")

_ATTRIBUTE = "_ds_compression_progress"


@dataclass(slots=True)
class Progress:
    """What a model was prepared with, and how far it is.

    step: optimizer steps done; None: not known, or buffers were loaded.
    hooks: those on the model; the first notices loaded states, the second follows an engine.
    missing: patterns of the config that match nothing in this rank's part.
    factor: of a layer's period, by eigenvalues, where there are.
    """

    section: CompressionConfig
    step: int | None = None
    missing: list[Problem] = field(default_factory=list)
    factor: Callable[[str], int] | None = None
    hooks: list[RemovableHandle] = field(default_factory=list)


def progress_of(model: nn.Module) -> Progress | None:
    """The `Progress` of a model, or of a part of it, that `init_compression` has prepared."""
    for module in model.modules():
        if (found := module.__dict__.get(_ATTRIBUTE)) is not None:
            return found  # type: ignore[no-any-return]
    return None


def start(model: nn.Module, section: CompressionConfig) -> Progress:
    """Remember what `model` was prepared with, at step 0."""
    progress = model.__dict__[_ATTRIBUTE] = Progress(section)
    progress.hooks.append(model.register_load_state_dict_post_hook(_loaded))
    set_step(model, 0)
    return progress


def _loaded(model: nn.Module, keys: Any) -> None:
    """A hook after ``load_state_dict``: masks and ranges may be others."""
    progress = progress_of(model)
    if progress is not None:
        step, progress.step = progress.step, None
        set_step(model, step or 0)


def stop(model: nn.Module) -> None:
    """Forget it."""
    for module in model.modules():
        found: Progress | None = module.__dict__.pop(_ATTRIBUTE, None)
        for hook in found.hooks if found is not None else ():
            hook.remove()


def set_step(model: nn.Module, step: int) -> None:
    """Make the compressed layers of `model` do what the config says for `step`, counted from 0.

    An engine calls it by itself; a loop of your own, before the forward of each step. Raises
    UsageError for a model that `init_compression` has not prepared.
    """
    progress = progress_of(model)
    if progress is None:
        raise UsageError(
            "this model is not compressed; give it to ds_compression.init_compression first"
        )
    if progress.step == step:
        return
    layers = [c for _, c in compressed_modules(model)]
    if progress.step is None or step != progress.step + 1:
        read_buffers(model)
    before = _bits(layers)
    progress.step = step
    for layer in layers:
        _advance(layer, step, progress.factor)
    if progress.section.weight_quantization.shared_parameters.quantize_verbose:
        for group, bits in _bits(layers).items():
            if bits != before.get(group):
                log.info("step %d: weights of %s have %d bits", step, group, bits)


def read_buffers(model: nn.Module) -> None:
    """Look which masks and ranges there are: buffers may have been loaded."""
    for module, compression in compressed_modules(model):
        for mask in compression.masks:
            buffer = module._buffers.get(mask.tensor)
            mask.made = buffer is not None and not bool((buffer == UNSET).any())
        if compression.inputs is not None and compression.inputs.static:
            seen = module._buffers["activation_range"]
            compression.inputs.known = seen is not None and bool(seen.any())


def _advance(layer: Compression, step: int, factor: Callable[[str], int] | None) -> None:
    if (q := layer.quantiser) is not None:
        age = step - q.offset
        if q.pace is not None and age >= 0:
            q.pace.advance(
                age, q.start - q.target, q.period, factor(layer.name) if factor is not None else 1
            )
            q.bits = q.start - q.pace.lost
            q.share = 1.0 if q.mix is None else min(1.0, q.mix * (age - q.pace.last + 1))
        else:
            q.bits = bits_at(age, q.start, q.target, q.period) if age >= 0 else 0
            q.share = (
                share_at(age, q.start, q.target, q.period, q.mix)
                if q.mix is not None and age >= 0
                else 1.0
            )
        q.seed = (
            zlib.crc32(f"{layer.name} {step}".encode()) if q.stochastic and q.bits > 2 else None
        )
    if layer.inputs is not None:
        layer.inputs.active = step >= layer.inputs.offset
    for mask in layer.masks:
        mask.active = step >= mask.offset and (mask.pattern is None or mask.made)


def _bits(layers: Iterable[Compression]) -> dict[str, int]:
    return {
        c.quantiser.group: c.quantiser.bits
        for c in layers
        if c.quantiser is not None and c.quantiser.bits
    }
