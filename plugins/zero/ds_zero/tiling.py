"""A large linear layer as a grid of small ones that run one after the other.

Under stage 3 each tile is gathered and released separately, so the memory for gathered weights (and
for their gradients) falls by the number of tiles, while the result stays that of the full layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_core.errors import UsageError
from ds_zero.gather.gathered_parameters import GatheredParameters
from ds_zero.gather.weights import handle_of


class _Tiles(nn.Module):
    """The grid ``linears[row][column]``: rows cut the outputs, columns cut the inputs.

    Cuts are nearly equal, the first ones longer by 1 where the sizes are not divisible. The last
    tile of a row has its share of the bias.

    nn_linear: the class that makes the tiles when `linear_cls` is ``nn.Linear``.
    """

    nn_linear: type[nn.Module] = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.in_splits = in_splits
        self.out_splits = out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_sizes = _cut("in", in_features, in_splits)
        self.out_sizes = _cut("out", out_features, out_splits)
        make = self.nn_linear if linear_cls is nn.Linear else linear_cls
        self.linears = nn.ModuleList(
            nn.ModuleList(
                make(columns, rows, bias=bias and i == in_splits - 1, **kwargs)
                for i, columns in enumerate(self.in_sizes)
            )
            for rows in self.out_sizes
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def extra_repr(self) -> str:
        """Sizes of the layer, which its tiles do not show."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}, in_splits={self.in_splits}, out_splits={self.out_splits}"
        )

    @torch.no_grad()
    def copy_params_from(self, linear: nn.Module) -> None:
        """Give the tiles the values of `linear`, a full layer.

        linear: has ``weight`` of (out_features, in_features), and ``bias`` of (out_features,) where
            this layer has one and None or none where it has not; any device, any dtype. Weights
            that are partitioned are gathered, one tile at a time, and the first rank's count; every
            rank calls it then.

        Raises UsageError when the layers do not fit; no value is changed then.
        """
        weight = _param(linear, "weight", (self.out_features, self.in_features))
        full = [weight]
        for rows, tiles in zip(self.out_sizes, self._rows(), strict=True):
            for columns, tile in zip(self.in_sizes, tiles, strict=True):
                _param(tile, "weight", (rows, columns))
        if self.use_bias != (getattr(linear, "bias", None) is not None):
            mine, other = ("a", "no") if self.use_bias else ("no", "a")
            raise UsageError(
                f"copy_params_from: the linear layer has {other} bias and the tiled one has {mine} "
                f"bias; make the tiled one with bias={not self.use_bias}"
            )
        if self.use_bias:
            full.append(_param(linear, "bias", (self.out_features,)))
            for rows, tiles in zip(self.out_sizes, self._rows(), strict=True):
                _param(tiles[-1], "bias", (rows,))
        with GatheredParameters(full):
            for target, part in self._pairs(*full):
                with GatheredParameters(target, modifier_rank=0):
                    target.copy_(part)

    def _pairs(self, weight: Tensor, bias: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter of the tiles, and the part of the full layer that belongs in it."""
        for rows, tiles in zip(weight.split(self.out_sizes), self._rows(), strict=True):
            for part, tile in zip(rows.split(self.in_sizes, dim=1), tiles, strict=True):
                yield _param(tile, "weight", part.shape), part
        if bias is not None:
            for part, tiles in zip(bias.split(self.out_sizes), self._rows(), strict=True):
                yield _param(tiles[-1], "bias", part.shape), part

    def _rows(self) -> list[list[nn.Module]]:
        return [list(row.children()) for row in self.linears]

    def _run(self, input_: Tensor | Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
        """One output per row, summed over its tiles, and the bias that its last tile returned with
        its output.
        """
        parts = self._split(input_)
        outputs = []
        biases = []
        for tiles in self._rows():
            total, bias = _call(tiles[0], parts[0])
            for tile, part in zip(tiles[1:], parts[1:], strict=True):
                output, bias = _call(tile, part)
                # Not in place: the tile may have saved its output, and hooks may look at it.
                total = total + output
            outputs.append(total)
            biases.append(bias)
        return outputs, biases

    def _split(self, input_: Tensor | Sequence[Tensor]) -> list[Tensor]:
        """The input of each column."""
        if not self.input_is_already_split:
            if not isinstance(input_, Tensor) or _width(input_) != self.in_features:
                raise UsageError(
                    f"the input must be a tensor of (..., {self.in_features}), not "
                    f"{_described(input_)}"
                )
            return list(input_.split(self.in_sizes, dim=-1))
        if not isinstance(input_, (list, tuple)) or [_width(t) for t in input_] != self.in_sizes:
            raise UsageError(
                f"the input is split already, so it must be a list of {self.in_splits} tensors "
                f"with last dimensions {self.in_sizes}, not {_described(input_)}"
            )
        return list(input_)


class TiledLinear(_Tiles):
    """``nn.Linear`` cut into a grid of `out_splits` x `in_splits` tiles, which run in sequence.

    in_features, out_features, bias: of the full layer.
    in_splits, out_splits: into how many nearly equal parts inputs and outputs are cut, 1 to the
        number of features.

    What forward accepts and returns:

    input_is_already_split: it accepts a list of `in_splits` tensors instead of one.
    combine_out_splits: it returns one tensor; False: the list of the `out_splits` tensors.

    How the tiles are made:

    linear_cls: makes a tile, as ``linear_cls(in, out, bias=..., **kwargs)``.
    init_linear: a full layer to copy the values from. Without it each tile is initialised by its
        class, for its own number of inputs not that of the full layer.

    Raises UsageError (a RuntimeError) for splits out of range and, in forward, for an input of
    another shape.
    """

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """The layer's output, (..., out_features); or the list of its parts, see
        `combine_out_splits`.

        The input is (..., in_features), or with `input_is_already_split` the list of its parts
        along its last dimension.
        """
        outputs, biases = self._run(input_)
        if any(b is not None for b in biases):
            raise UsageError("the tiles return (output, bias); use TiledLinearReturnBias")
        return _join(outputs) if self.combine_out_splits else outputs


class _LinearReturnBias(nn.Linear):
    """A linear layer whose caller adds the bias."""

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        # A copy: under stage 3 a returned parameter would keep the tile gathered while it is in
        # use.
        return F.linear(input, self.weight), None if self.bias is None else self.bias.clone()


class TiledLinearReturnBias(_Tiles):
    """`TiledLinear`, but forward returns ``(output, bias)`` and does not add the bias.

    linear_cls: its tiles return ``(output, bias)`` too, without the bias added; for ``nn.Linear``
    such a class is used.
    """

    nn_linear = _LinearReturnBias

    def forward(
        self, input_: Tensor | Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None] | tuple[list[Tensor], list[Tensor] | None]:
        """The output before the bias is added, (..., out_features), and the bias, (out_features,)
        or None without one.

        Without `combine_out_splits` both are lists, one entry per row of tiles.
        """
        outputs, returned = self._run(input_)
        biases = [b for b in returned if b is not None]
        if self.use_bias and len(biases) < self.out_splits:
            raise UsageError(
                "TiledLinearReturnBias: the tiles have a bias but do not return it; give a "
                "linear_cls whose forward returns (output, bias), or use TiledLinear"
            )
        if self.combine_out_splits:
            return _join(outputs), _join(biases) if biases else None
        return outputs, biases or None


def _cut(side: str, features: int, splits: int) -> list[int]:
    """`splits` nearly equal sizes with the sum `features`, the longer ones first."""
    if not 1 <= splits <= features:
        raise UsageError(f"{side}_splits is {splits}; use 1 to {features} ({side}_features)")
    size, longer = divmod(features, splits)
    return [size + 1] * longer + [size] * (splits - longer)


def _call(tile: nn.Module, part: Tensor) -> tuple[Tensor, Tensor | None]:
    """A tile's output, and its bias if it returns one too."""
    result = tile(part)
    return result if isinstance(result, tuple) else (result, None)


def _width(value: object) -> int | None:
    """The last dimension of a tensor; None of anything else."""
    return value.shape[-1] if isinstance(value, Tensor) and value.dim() else None


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _param(module: nn.Module, name: str, shape: Sequence[int]) -> Tensor:
    """A parameter of `module`, which must have `shape`."""
    param = getattr(module, name, None)
    handle = handle_of(param)
    found = (
        handle.shape if handle is not None else param.shape if isinstance(param, Tensor) else None
    )
    if not isinstance(param, Tensor) or found != tuple(shape):
        raise UsageError(
            f"copy_params_from: {name} of {type(module).__name__} must have shape {tuple(shape)}, "
            f"not {_described(param)}"
        )
    return param


def _described(value: object) -> str:
    """`value` in an error message."""
    if isinstance(value, Tensor):
        return f"one of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return (
            f"a {type(value).__name__} of {len(value)} with shapes "
            f"{[tuple(getattr(v, 'shape', ())) for v in value]}"
        )
    return f"a {type(value).__name__}"
