"""A layer whose weight is compressed wherever it is read: the class it gets, and what that class
knows.

[Note: names] torch's parametrizations rename a weight (``parametrizations.weight.original``), and
with it every entry of a checkpoint. Here the parameter stays where it is, under its name. The
layer's class becomes a subclass with a property ``weight`` that reads it, so the layer itself, its
parent and tied layers all see the compressed weight, and checkpoints, exports and ZeRO see the
parameter. Masks and scores are the layer's own buffers and parameters; they have the names that
DeepSpeed gives them.

[Note: memory] A matrix product keeps its weight for backward: a compressed one beside each
parameter, and under ZeRO 3 all of them whole. So a forward of such a layer keeps how to make it
instead, and backward makes it again, from the parameter, which ZeRO 3 has gathered by then.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ds_compression.layers.masks import Pattern, largest
from ds_compression.layers.quantise import (
    StraightThrough,
    in_range,
    noise_for,
    quantise_rows,
    widened,
)
from ds_compression.schedule import Pace

_ATTRIBUTE = "_ds_compression"
UNSET = 2
"""In a buffer of a mask: it is not made yet."""


@dataclass(slots=True)
class WeightQuantiser:
    """How the weight is quantised."""

    # -- as the config says
    group: str
    # The step at which quantisation begins.
    offset: int
    # Bits at first and in the end; one less after every `period` steps.
    start: int
    target: int
    period: int
    # Ranges of one weight, each with a scale of its own.
    groups: int
    symmetric: bool
    stochastic: bool
    # By how much the quantised value's share grows each step; None: it is used alone.
    mix: float | None
    # When bits go, where eigenvalues decide it.
    pace: Pace | None = None
    # -- at this step
    # 0: not quantised yet.
    bits: int = 0
    # The quantised value's share in the weight that is used.
    share: float = 1.0
    # The seed of stochastic rounding; None: round to the nearest level.
    seed: int | None = None

    def __call__(self, weight: Tensor) -> Tensor:
        """`weight`, a matrix, as it is used now."""
        noise = None
        rows = weight.reshape(self.groups, -1)
        if self.seed is not None:
            noise = noise_for(rows, self.seed)
        quantised = quantise_rows(rows, self.bits, self.symmetric, noise).view(weight.shape)
        return quantised if self.share == 1 else torch.lerp(weight, quantised, self.share)


@dataclass(slots=True)
class InputQuantiser:
    """How inputs are quantised."""

    # -- as the config says
    group: str
    # The step at which quantisation begins.
    offset: int
    bits: int
    symmetric: bool
    # By the running range in the layer's buffer ``activation_range``, not by the inputs' own.
    static: bool
    # One range per image, instead of per token.
    images: bool
    # -- at this step
    active: bool = False
    # Whether the buffer has a range.
    known: bool = False
    # The range of the inputs of this step, as one tensor; empty before the first.
    seen: list[Tensor] = field(default_factory=list)

    def __call__(self, inputs: Tensor, given: Tensor | None) -> Tensor:
        """`inputs` quantised; given: [low, high], or None for their own ranges."""
        if given is not None:
            wide = in_range(widened(inputs), given[0], given[1], self.bits, self.symmetric)
            return wide.to(inputs.dtype)
        rows = inputs.flatten(1) if self.images else inputs.reshape(-1, inputs.shape[-1])
        return quantise_rows(rows, self.bits, self.symmetric).view(inputs.shape)


@dataclass(slots=True)
class Mask:
    """Which weights are kept."""

    # -- as the config says
    group: str
    # sparse, row, channel or head.
    kind: str
    # The step at which pruning begins.
    offset: int
    # The part that is kept.
    ratio: float
    # By scores, which are a parameter.
    learned: bool
    # The name of the scores, or of the buffer with the mask.
    tensor: str
    # Heads; 0 for other kinds.
    parts: int = 0
    # The pattern of snip_momentum, whose masks come from `ds_compression.training`.
    pattern: Pattern | None = None
    # -- at this step
    active: bool = False
    # Whether the buffer has the mask.
    made: bool = False

    def calculate(self, source: Tensor) -> Tensor:
        """The mask of the scores, or of the weight as a matrix."""
        if self.learned:
            return largest(source, self.ratio)
        sizes = widened(source).abs()
        return largest(sizes if self.kind == "sparse" else sizes.sum(1), self.ratio)

    def spread(self, mask: Tensor, inputs: int) -> Tensor:
        """`mask` in a shape that broadcasts over the weight as a matrix with so many `inputs`."""
        if self.kind == "sparse":
            return mask.view(-1, inputs)
        if self.kind == "head":
            return mask.reshape(1, -1).repeat_interleave(inputs // self.parts, 1)
        return mask.reshape(-1, 1)

    def fold(self, grad: Tensor, scores: Tensor) -> Tensor:
        """The gradient of the spread mask, as that of the `scores`."""
        if self.kind == "head":
            grad = grad.sum(0).view(self.parts, -1).sum(1)
        elif self.kind != "sparse":
            grad = grad.sum(1)
        return grad.view(scores.shape).to(scores.dtype)


@dataclass(slots=True)
class Compression:
    """What is done to one layer."""

    # In its model.
    name: str
    # Its weight has inputs first, as transformers' Conv1D.
    transposed: bool
    quantiser: WeightQuantiser | None = None
    inputs: InputQuantiser | None = None
    masks: list[Mask] = field(default_factory=list)
    # Its forward runs, and remembers in `used` the weight that it uses; see [Note: memory].
    running: bool = False
    used: Tensor | None = None
    # Second derivatives will be needed.
    twice: bool = False

    @property
    def by_operations(self) -> bool:
        """Whether all is to be made of torch's own operations: others have no second derivatives,
        nor a trace.
        """
        return self.twice or torch.compiler.is_compiling()

    @property
    def active(self) -> list[Mask]:
        """The masks that are used now."""
        return [m for m in self.masks if m.active]

    @property
    def quantises(self) -> bool:
        """Whether the weight is quantised now."""
        return self.quantiser is not None and self.quantiser.bits > 0


def compression_of(module: nn.Module) -> Compression | None:
    """What is done to `module`; None for an ordinary one."""
    found = module.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, Compression) else None


def compressed_modules(model: nn.Module) -> Iterator[tuple[Compressed, Compression]]:
    """The compressed layers of `model`, in its order."""
    for module in model.modules():
        if isinstance(module, Compressed):
            yield module, module.__dict__[_ATTRIBUTE]


def compress(module: nn.Module, compression: Compression) -> None:
    """Make `module` a compressed layer, in place: the same object with the same parameters, of
    another class.
    """
    module.__dict__[_ATTRIBUTE] = compression
    if not isinstance(module, Compressed):
        kind: Any = type(module)
        module.__class__ = _class_for(kind)


def plain(module: nn.Module) -> None:
    """Give a compressed layer its own class back."""
    del module.__dict__[_ATTRIBUTE]
    module.__class__ = type(module).__mro__[2]


@functools.cache
def _class_for(kind: Any) -> Any:
    return type(f"Compressed{kind.__name__}", (Compressed, kind), {"__module__": __name__})


def matrix(module: nn.Module, tensor: Tensor) -> Tensor:
    """A weight of `module` as a matrix of outputs times inputs; a view."""
    return tensor.t() if module.__dict__[_ATTRIBUTE].transposed else tensor.flatten(1)


class Compressed(nn.Module):
    """The first base of every compressed layer; the second is the layer's own class.

    See [Note: names].
    """

    @property
    def weight(self) -> Tensor:
        """The weight as it is used now."""
        try:
            return _used_weight(self)
        # nn.Module would take it for a missing attribute, and give the parameter
        except AttributeError as error:
            raise RuntimeError(
                f"the weight of {self.__dict__[_ATTRIBUTE].name}: {error}"
            ) from error

    @property
    def bias(self) -> Tensor | None:
        """The bias, without that of pruned outputs."""
        try:
            return _used_bias(self)
        except AttributeError as error:
            raise RuntimeError(f"the bias of {self.__dict__[_ATTRIBUTE].name}: {error}") from error

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward, of quantised inputs where that is asked for."""
        compression: Compression = self.__dict__[_ATTRIBUTE]
        if compression.inputs is not None and args:
            args = (_used_input(self, compression.inputs, args[0]), *args[1:])
        changed = compression.quantises or compression.active
        if not changed or compression.by_operations or not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        with _made_again(self, compression):
            return super().forward(*args, **kwargs)


# -- inputs ----------------------------------------------------------------------------------------


def _used_input(module: nn.Module, quantiser: InputQuantiser, inputs: Tensor) -> Tensor:
    given = None
    if quantiser.static:
        if module.training and torch.is_grad_enabled():
            with torch.no_grad():
                quantiser.seen[:] = [
                    _wider([*quantiser.seen, torch.stack([-inputs.amin(), inputs.amax()]).float()])
                ]
        if not quantiser.known:
            return inputs
        given = module._buffers["activation_range"]
    if not quantiser.active:
        return inputs
    if module.__dict__[_ATTRIBUTE].by_operations:
        return inputs + (quantiser(inputs.detach(), given) - inputs).detach()
    return _apply(StraightThrough, inputs, functools.partial(quantiser, given=given))


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    made: Tensor = function.apply(*args)
    return made


def _wider(ranges: list[Tensor]) -> Tensor:
    """The range, as [-low, high], that contains all of `ranges`."""
    return functools.reduce(torch.maximum, ranges)


# -- weights ---------------------------------------------------------------------------------------


def _used_weight(module: nn.Module) -> Tensor:
    compression: Compression = module.__dict__[_ATTRIBUTE]
    weight = module._parameters["weight"]
    assert weight is not None
    active = compression.active
    for mask in active:
        _make(module, mask, weight)
    if not active and not compression.quantises:
        return weight
    sources = [_source(module, mask) for mask in active]
    if compression.by_operations:
        return _by_operations(module, weight, active, sources)
    # One operation of autograd's: it keeps the parameter, not the steps in between.
    used = _apply(_Use, weight, module, tuple(active), *sources)
    if compression.running:
        compression.used = used.detach()
    return used


def _used_bias(module: nn.Module) -> Tensor | None:
    bias: Tensor | None = module._parameters.get("bias")
    compression: Compression = module.__dict__[_ATTRIBUTE]
    for mask in compression.active:
        if bias is not None and mask.kind in ("row", "channel"):
            _make(module, mask, module._parameters["weight"])
            source = _source(module, mask)
            bias = bias * _factor(mask, source, bias.dtype).view(-1)
    return bias


def _source(module: nn.Module, mask: Mask) -> Tensor:
    """The scores, or the mask itself."""
    source = module._parameters[mask.tensor] if mask.learned else module._buffers[mask.tensor]
    assert source is not None
    return source


def _factor(mask: Mask, source: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask in `dtype`; gradients go to the scores as they are, where there are scores."""
    if not mask.learned:
        return source.to(dtype)
    return mask.calculate(source).to(dtype) + (source - source.detach()).to(dtype)


@torch.no_grad()
def _make(module: nn.Module, mask: Mask, weight: Tensor | None) -> None:
    """Fill the buffer of a mask by absolute values, when it is used for the first time."""
    if mask.made or mask.learned or mask.pattern is not None:
        return
    assert weight is not None
    buffer = _source(module, mask)
    buffer.copy_(mask.calculate(matrix(module, weight)).view(buffer.shape))
    mask.made = True


def _masks(
    matrix_like: Tensor, masks: tuple[Mask, ...], sources: tuple[Tensor, ...]
) -> list[Tensor]:
    inputs = matrix_like.shape[1]
    made = (m.calculate(s) if m.learned else s.bool() for m, s in zip(masks, sources, strict=True))
    return [m.spread(kept, inputs) for m, kept in zip(masks, made, strict=True)]


class _Use(torch.autograd.Function):
    """The weight as it is used: quantised, then masked.

    Gradients pass quantisation unchanged, and masks where 1.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, module: nn.Module, masks: tuple[Mask, ...], *sources: Tensor
    ) -> Tensor:
        ctx.module = module
        ctx.masks = masks
        ctx.save_for_backward(weight, *sources)
        return _calculate(module, weight, masks, sources)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *sources = ctx.saved_tensors
        module = ctx.module
        masks = ctx.masks
        rows = matrix(module, grad)
        kept = _masks(rows, masks, tuple(sources))
        grads: list[Tensor | None] = []
        for index, mask in enumerate(masks):
            if not mask.learned:
                grads.append(None)
                continue
            # The derivative by one mask: the weight, the gradient and all other masks.
            product = rows * _quantised(module, weight)
            for other, factor in enumerate(kept):
                product = product if other == index else product * factor
            grads.append(mask.fold(product, sources[index]))
        for factor in kept:
            rows = rows * factor
        return (_back(module, rows, grad), None, None, *grads)


def _quantised(module: nn.Module, weight: Tensor) -> Tensor:
    compression: Compression = module.__dict__[_ATTRIBUTE]
    rows = matrix(module, weight)
    return (
        compression.quantiser(rows)
        if compression.quantiser is not None and compression.quantises
        else rows
    )


@torch.no_grad()
def _calculate(
    module: nn.Module, weight: Tensor, masks: tuple[Mask, ...], sources: tuple[Tensor, ...]
) -> Tensor:
    rows = _quantised(module, weight)
    for factor in _masks(rows, masks, sources):
        rows = rows * factor
    return _back(module, rows, weight)


def _by_operations(
    module: nn.Module, weight: Tensor, masks: list[Mask], sources: list[Tensor]
) -> Tensor:
    """What `_Use` calculates, by operations that torch.compile knows the derivatives of."""
    rows = matrix(module, weight)
    if module.__dict__[_ATTRIBUTE].quantises:
        rows = rows + (_quantised(module, weight.detach()) - rows).detach()
    inputs = rows.shape[1]
    for mask, source in zip(masks, sources, strict=True):
        rows = rows * mask.spread(_factor(mask, source, rows.dtype), inputs)
    return _back(module, rows, weight)


def _back(module: nn.Module, rows: Tensor, like: Tensor) -> Tensor:
    """A matrix in the shape of the weight."""
    return rows.t() if module.__dict__[_ATTRIBUTE].transposed else rows.reshape(like.shape)


# -- memory ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _made_again(module: nn.Module, compression: Compression) -> Iterator[None]:
    """Inside, operations that keep the used weight for backward keep how to make it; see [Note:
    memory].
    """

    def pack(kept: Tensor) -> Any:
        # Only the used weight is made again; other tensors are kept as ever.
        used = compression.used
        if used is None or kept.untyped_storage().data_ptr() != used.untyped_storage().data_ptr():
            return kept
        masks = tuple(compression.active)
        place = (kept.size(), kept.stride(), kept.storage_offset())
        return functools.partial(_view, module, masks, *place)

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept()

    compression.running = True
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        compression.running = False
        compression.used = None


def _view(
    module: nn.Module, masks: tuple[Mask, ...], size: Any, stride: Any, offset: Any
) -> Tensor:
    """A view of the used weight, which is made again."""
    weight = module._parameters["weight"]
    assert weight is not None
    made = _calculate(
        module, weight.detach(), masks, tuple(_source(module, m).detach() for m in masks)
    )
    return made.as_strided(size, stride, offset)
