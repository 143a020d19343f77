"""Linear layers of which each rank has a part: some outputs (column) or some inputs (row).

As Megatron-LM pairs them (Shoeybi et al. 2019, section 3): Y = f(X A) B with A sharded by columns
and B by rows needs one sum of Y in forward and one of the gradient of X in backward.

Dimensions: ``batch`` any leading ones, ``inputs`` and ``outputs`` of the layer on this rank or in
full, as the docstring says.

[Note: full until bound] A layer is made in full, like `nn.Linear`, with its names and its initial
values. `bind` cuts it when the mesh is known, within ``ds_core.initialize``; until then it is a
plain layer. So a model of these layers runs in one process too, and one that is written in
`nn.Linear` becomes one of these: `column` and `row` change the class of a layer in place, so that
its hooks, its name and its parameters stay.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from ds_comm_autograd import copy_to, gather, reduce_from, reduce_scatter, split
from ds_run_state.divided import Divided
from torch import Tensor, nn
from torch.nn import functional

from ds_tensor_parallel.layers.overlap import Overlapped, can_overlap
from ds_tensor_parallel.planning.division import Division

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Place:
    """This rank's place among those that divide a layer."""

    group: ProcessGroup
    size: int
    rank: int

    def __deepcopy__(self, memo: Any) -> Place:
        """Copies of a layer have the same parts; groups cannot be copied."""
        return self


@dataclass(frozen=True, slots=True)
class Cut:
    """How one parameter of a layer is cut."""

    dim: int
    division: Division


class Siblings:
    """Column-parallel layers that are given the same tensor: its gradient is then summed over ranks
    once.

    overlap: the sum runs while gradients of weights are computed, where that is possible.
    """

    def __init__(self, overlap: bool = False) -> None:
        self.layers: list[Any] = []
        self._overlap = overlap

        # Of the forward under way; see `forget`.
        # The tensor that the layers are given.
        self._given: Tensor | None = None
        # Its copy, whose backward sums the gradient.
        self._copied: Tensor | None = None
        # The same with overlap.
        self._way: Overlapped | None = None

    def add(self, layer: Any, plain: bool) -> None:
        """One more layer.

        plain: it computes as `nn.Linear` does, or with a transposed weight.
        """
        self.layers.append(layer)
        # One backward for all: with a forward of its own, or another layout, a layer cannot take
        # part.
        alike = is_transposed(layer) == is_transposed(self.layers[0])
        self._overlap = self._overlap and plain and alike

    def way(self, x: Tensor, group: ProcessGroup) -> Overlapped | None:
        """`x` on its way through the layers, where its gradient can be summed meanwhile."""
        if not self._overlap or not can_overlap(x):
            return None
        # The first sibling that is given this tensor starts; the others use what it made.
        if self._given is not x or self._way is None:
            self._given = x
            self._copied = None
            self._way = Overlapped(self.layers, x, group, is_transposed(self.layers[0]))
        return self._way

    def copied(self, x: Tensor, group: ProcessGroup) -> Tensor:
        """`copy_to(x)`, the same tensor for all siblings."""
        # Autograd adds the gradients of the siblings at the copy, and the sum over ranks is made
        # once.
        if self._given is not x or self._copied is None:
            self._given = x
            self._copied = copy_to(x, group)
            self._way = None
        return self._copied

    def forget(self, *_: Any) -> None:
        """Let go of the tensors: called when the module around the layers begins and ends."""
        self._given = None
        self._copied = None
        self._way = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies of the model begin without tensors, which belong to a graph and cannot be
        copied."""
        return {**vars(self), "_given": None, "_copied": None, "_way": None}


class _Parallel(nn.Module):
    """What both kinds have."""

    tp: Place | None
    """None until bound."""
    division: Division

    def cuts(self) -> dict[str, Cut]:
        """How each parameter is cut; parameters that are not listed stay full."""
        raise NotImplementedError

    def bind(self, place: Place, division: Division) -> None:
        """Work as this rank's part from now on.

        The parameters are cut by the caller, as `cuts` says.
        """
        self.division = division
        self.tp = place


class Column(_Parallel):
    """A layer of which each rank computes some outputs."""

    gather_output: bool
    siblings: Siblings | None
    divides_loss = False
    """Of an output head: outputs stay sharded in training, and the loss is computed from them."""
    copies = True
    """False where what is in front of the layer, or around it, sums the gradient of its input over
    the ranks.
    """

    def cuts(self) -> dict[str, Cut]:
        """The rows of the weight, which is [outputs, inputs], and the bias."""
        return {
            name: Cut(param.dim() - 1 if is_transposed(self) else 0, self.division)
            for name, param in self.named_parameters(recurse=False)
        }

    def bind(self, place: Place, division: Division) -> None:
        """See the base class."""
        super().bind(place, division)
        _set_widths(self, outputs=division.size(place.rank))

    @property
    def ds_divided(self) -> Divided | None:
        """See `ds_run_state.divided`."""
        return some_outputs(self.tp, self.division, self.gather_output)

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        """This rank's outputs, or all of them with `gather_output`."""
        if self.tp is None:
            return cast(Tensor, super().forward(x))
        y = self._outputs(x, self.tp.group)
        # Divided logits are for the loss of a training step; in evaluation users expect logits.
        # fp64 logits are gathered for torch's own loss.
        divided = (
            self.divides_loss
            and self.training
            and torch.is_grad_enabled()
            and y.dtype != torch.float64
        )
        return (
            gather_columns(y, self.tp, self.division) if self.gather_output and not divided else y
        )

    def _outputs(self, x: Tensor, group: ProcessGroup) -> Tensor:
        # The layer is linear in x, so each rank has a part of x's gradient: `copy_to` is the
        # identity, and sums gradients in backward (Megatron's f).
        if not self.copies:
            return cast(Tensor, super().forward(x))
        if self.siblings is None:
            return cast(Tensor, super().forward(copy_to(x, group)))
        if (way := self.siblings.way(x, group)) is not None:
            return way.outputs(self)
        return cast(Tensor, super().forward(self.siblings.copied(x, group)))


class Copied(Column):
    """A layer of which each rank computes the outputs that it needs, some of them on several ranks.

    For keys and values of a rank's own queries. Weight and bias are full on every rank, and their
    gradients are summed over the ranks.
    """

    outputs: Sequence[tuple[int, int]] = ()
    """(first, size) of this rank's."""

    def cuts(self) -> dict[str, Cut]:
        """Nothing."""
        return {}

    def choose(self, place: Place, outputs: Sequence[tuple[int, int]]) -> None:
        """Compute these from now on."""
        self.tp = place
        self.outputs = outputs
        _set_widths(self, outputs=sum(size for _, size in outputs))

    @property
    def ds_divided(self) -> Divided | None:
        """See `ds_run_state.divided`."""
        if self.tp is None:
            return None
        return Divided(self.tp.rank, self.tp.size, outputs=self.outputs, whole_weight=True)

    def _outputs(self, x: Tensor, group: ProcessGroup) -> Tensor:
        if self.copies:
            x = copy_to(x, group) if self.siblings is None else self.siblings.copied(x, group)
        layer: Any = self
        # Full weights, used for different outputs on each rank: their gradients are summed by
        # `copy_to` too.
        bias = None if layer.bias is None else self._own(layer.bias, group)
        return functional.linear(x, self._own(layer.weight, group), bias)

    def _own(self, whole: Tensor, group: ProcessGroup) -> Tensor:
        """Its rows for this rank's outputs."""
        shared = copy_to(whole, group)
        return torch.cat([shared.narrow(0, first, size) for first, size in self.outputs])


class Row(_Parallel):
    """A layer of which each rank has some inputs: outputs are summed over the ranks."""

    split_input: bool
    sums = True
    """False where the module around the layer sums its outputs over the ranks."""
    sequence_dim: int | None = None
    """The dimension along which each rank gets the outputs of a part of the tokens; None: all ranks
    get all.
    """

    def cuts(self) -> dict[str, Cut]:
        """The columns of the weight, which is [outputs, inputs]; the bias stays whole."""
        return {"weight": Cut(0 if is_transposed(self) else 1, self.division)}

    def bind(self, place: Place, division: Division) -> None:
        """See the base class."""
        super().bind(place, division)
        _set_widths(self, inputs=division.size(place.rank))

    @property
    def ds_divided(self) -> Divided | None:
        """See `ds_run_state.divided`."""
        if self.tp is None:
            return None
        inputs = self.division.ranges(self.tp.rank)
        return Divided(
            self.tp.rank, self.tp.size, inputs=inputs, sums=self.sums, sizes=self.division.sizes()
        )

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*some_batch outputs"]:
        """The full output, on every rank, or of a part of the tokens; the bias is added once."""
        if self.tp is None:
            return cast(Tensor, super().forward(x))
        if self.split_input:
            x = split_columns(x, self.tp, self.division)
        layer: Any = self
        weight = layer.weight.t() if is_transposed(self) else layer.weight
        y = functional.linear(x, weight)
        dim = self.sequence_dim
        # The sum over ranks is made further out: each rank adds its share of the bias.
        if not self.sums:
            return y if layer.bias is None else y + layer.bias.to(y.dtype) / self.tp.size
        # Megatron's g: the sum of all ranks in forward, the identity in backward; with sequence
        # parallelism each rank gets the sums of its own tokens only.
        if dim is None:
            y = reduce_from(y, self.tp.group)
        else:
            y = reduce_scatter(y, self.tp.group, dim, parts(y.shape[dim], self.tp.size))
        return y if layer.bias is None else y + layer.bias.to(y.dtype)


def parts(length: int, ranks: int) -> list[int] | None:
    """The lengths of the ranks' parts of a sequence; None where they are equal."""
    return Division.by_unit((length,), 1, ranks).sizes() if length % ranks else None


def gather_columns(
    y: Float[Tensor, "*batch outputs"], place: Place, division: Division
) -> Float[Tensor, "*batch all_outputs"]:
    """All outputs from the ranks' parts, in the order of the full layer."""
    whole = gather(y, place.group, -1, None if division.even else division.sizes())
    # Rank by rank, each part has pieces of all fused matrices; sorted by matrix again.
    order = division.order()
    return (
        whole
        if order is None
        else torch.cat([whole.narrow(-1, first, size) for first, size in order], -1)
    )


def some_outputs(place: Place | None, division: Division, gathers: bool) -> Divided | None:
    """The `ds_run_state.divided.Divided` of a layer that has some of the outputs; None while it is
    full.
    """
    if place is None:
        return None
    outputs = division.ranges(place.rank)
    return Divided(place.rank, place.size, outputs=outputs, gathers=gathers, sizes=division.sizes())


def split_columns(
    x: Float[Tensor, "*batch all_inputs"], place: Place, division: Division
) -> Float[Tensor, "*batch inputs"]:
    """This rank's part of inputs of which every rank has all."""
    if len(division.segments) == 1:
        return split(x, place.group, -1, None if division.even else division.sizes())
    # With fused matrices a part is not contiguous: the inputs are first sorted by rank.
    order = [piece for rank in range(division.ranks) for piece in division.ranges(rank)]
    sorted_by_rank = torch.cat([x.narrow(-1, first, size) for first, size in order], -1)
    return split(sorted_by_rank, place.group, -1, division.sizes())


class ColumnParallelLinear(Column, nn.Linear):
    """`nn.Linear` of which each rank computes some outputs: the first layer of a pair.

    gather_output: every rank gets all outputs.
    segments: the lengths of matrices that are fused along the outputs (such as queries, keys and
        values), each of which is cut by itself.
    unit: outputs are cut at multiples of it, such as the size of a head.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        segments: Sequence[int] | None = None,
        unit: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.segments = _check_segments(segments, out_features, "out_features")
        self.unit = unit
        self.tp = None
        self.siblings = None
        self.gather_output = gather_output


class RowParallelLinear(Row, nn.Linear):
    """`nn.Linear` of which each rank has some inputs, those that a column-parallel layer leaves it.

    split_input: every rank is given the full input, and uses its part.
    segments, unit: as of `ColumnParallelLinear`, of the inputs.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        split_input: bool = False,
        segments: Sequence[int] | None = None,
        unit: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.segments = _check_segments(segments, in_features, "in_features")
        self.unit = unit
        self.tp = None
        self.split_input = split_input


def leaves_part(layer: nn.Module) -> bool:
    """Whether each rank has other outputs of it."""
    return isinstance(layer, Column) and layer.tp is not None and not layer.gather_output


def accepts_part(layer: nn.Module) -> bool:
    """Whether each rank gives it other inputs, and its outputs are whole."""
    return isinstance(layer, Row) and layer.tp is not None and not layer.split_input


# -- layers of others ------------------------------------------------------------------------------


def column(layer: Any, *, gather_output: bool = False, siblings: Siblings | None = None) -> Any:
    """Make `layer`, a linear layer or a subclass of one, column-parallel in place."""
    plain = is_plain(layer)
    # The class alone changes: see [Note: full until bound].
    layer.__class__ = _subclass(Column, layer.__class__, ColumnParallelLinear)
    layer.tp = None
    layer.siblings = siblings
    layer.gather_output = gather_output
    if siblings is not None:
        siblings.add(layer, plain)
    return layer


def copied(layer: Any, siblings: Siblings) -> Any:
    """Make `layer`, an `nn.Linear` with torch's forward, one of which each rank computes some
    outputs, in place.
    """
    assert is_plain(layer) and not is_transposed(layer), type(layer)
    layer.__class__ = _subclass(Copied, layer.__class__, None)
    layer.tp = None
    layer.siblings = siblings
    layer.gather_output = False
    siblings.add(layer, plain=False)
    return layer


def row(layer: Any, *, split_input: bool = False) -> Any:
    """Make `layer`, a linear layer without a forward of its own, row-parallel in place."""
    assert is_plain(layer), type(layer)
    layer.__class__ = _subclass(Row, layer.__class__, RowParallelLinear)
    layer.tp = None
    layer.split_input = split_input
    return layer


@functools.cache
def _subclass(kind: Any, base: Any, plain: Any) -> Any:
    """The class of layers of class `base` that are parallel."""
    # Of plain layers the written class, so that isinstance knows both ways of making one.
    if base is nn.Linear and plain is not None:
        return plain
    return type(f"{kind.__name__}Parallel{base.__name__}", (kind, base), {"__module__": __name__})


def is_transposed(layer: nn.Module) -> bool:
    """Whether the weight is [inputs, outputs], as in GPT-2's Conv1D."""
    return not isinstance(layer, nn.Linear) and "nf" in layer.__dict__


def is_plain(layer: nn.Module) -> bool:
    """Whether it computes as `nn.Linear` does, or with a transposed weight."""
    return type(layer).forward is nn.Linear.forward or is_transposed(layer)


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer: `nn.Linear` and subclasses, and GPT-2's Conv1D."""
    if isinstance(module, nn.Linear):
        return True
    weight = getattr(module, "weight", None)
    return "nf" in module.__dict__ and isinstance(weight, nn.Parameter) and weight.dim() == 2


def widths(layer: nn.Module) -> tuple[int, int]:
    """(inputs, outputs)."""
    shape = layer.weight.shape
    assert isinstance(shape, torch.Size)
    return (shape[0], shape[1]) if is_transposed(layer) else (shape[1], shape[0])


def _set_widths(layer: Any, inputs: int | None = None, outputs: int | None = None) -> None:
    """The attributes in which a layer says how wide it is."""
    for names, value in ((("in_features", "nx"), inputs), (("out_features", "nf"), outputs)):
        for name in names:
            if value is not None and name in layer.__dict__:
                setattr(layer, name, value)


def _check_segments(segments: Sequence[int] | None, width: int, name: str) -> tuple[int, ...]:
    if segments is not None and sum(segments) != width:
        raise ValueError(
            f"segments {list(segments)} add up to {sum(segments)}, and {name} is {width}"
        )
    return tuple(segments) if segments is not None else (width,)
