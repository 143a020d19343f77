"""Tiled layers against the whole ones, forward and backward, in float64."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from ds_zero.tiling import TiledLinear, TiledLinearReturnBias
from torch import Tensor, nn
from torch.nn import functional as F

IN = 7
OUT = 5
SPLITS = [(i, o) for i in (1, 2, 3, 7) for o in (1, 2, 3, 5)]


def whole(bias: bool = True) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(IN, OUT, bias=bias, dtype=torch.float64)


def tiled(linear: nn.Linear, cls: type[Any] = TiledLinear, **options: Any) -> Any:
    bias = linear.bias is not None
    return cls(
        linear.in_features,
        linear.out_features,
        bias,
        init_linear=linear,
        dtype=torch.float64,
        **options,
    )


def inputs(*shape: int) -> Tensor:
    return torch.randn(
        *shape, IN, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    ).requires_grad_()


def gradients(layer: Any, rows: list[slice], columns: list[slice]) -> tuple[Tensor, Tensor | None]:
    """The tiles' gradients, put together as those of the whole layer."""
    weight = torch.full((OUT, IN), torch.nan, dtype=torch.float64)
    for row, tiles in zip(rows, layer.linears, strict=True):
        for column, tile in zip(columns, tiles, strict=True):
            weight[row, column] = tile.weight.grad
    biases = [tiles[-1].bias for tiles in layer.linears]
    return weight, None if biases[0] is None else torch.cat([b.grad for b in biases])


def slices(features: int, splits: int) -> list[slice]:
    """Cuts as the document has them, written out: pieces near-equal, the first ones longer by
    one."""
    ends = [0]
    for i in range(splits):
        ends.append(ends[-1] + features // splits + (i < features % splits))
    assert ends[-1] == features
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def close(a: Tensor | None, b: Tensor | None) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)], ids=["1-d", "2-d", "3-d"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_splits", "out_splits"), SPLITS)
def test_equals_the_whole_layer(
    in_splits: int, out_splits: int, bias: bool, shape: tuple[int, ...]
) -> None:
    linear = whole(bias)
    x = inputs(*shape)
    layer = tiled(linear, in_splits=in_splits, out_splits=out_splits)
    expected = linear(x)
    weights = torch.arange(expected.numel(), dtype=torch.float64).view_as(expected)
    (x_grad,) = torch.autograd.grad((expected * weights).sum(), x, retain_graph=True)
    (expected * weights).sum().backward(inputs=list(linear.parameters()))

    out = layer(x)
    close(out, expected)
    (out * weights).sum().backward()
    close(x.grad, x_grad)
    weight, bias_grad = gradients(layer, slices(OUT, out_splits), slices(IN, in_splits))
    close(weight, linear.weight.grad)
    close(bias_grad, linear.bias.grad if bias else None)


def test_the_grid() -> None:
    """Near-equal tiles, the first longer, named by row and column, a bias on the last of each
    row."""
    layer = TiledLinear(IN, OUT, in_splits=3, out_splits=2, device="meta")
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes == {
        "linears.0.0.weight": (3, 3),
        "linears.0.1.weight": (3, 2),
        "linears.0.2.weight": (3, 2),
        "linears.0.2.bias": (3,),
        "linears.1.0.weight": (2, 3),
        "linears.1.1.weight": (2, 2),
        "linears.1.2.weight": (2, 2),
        "linears.1.2.bias": (2,),
    }
    assert all(p.is_meta for p in layer.parameters())
    assert "in_features=7, out_features=5, bias=True, in_splits=3, out_splits=2" in repr(layer)


def test_tiles_run_one_after_the_other_as_modules() -> None:
    """Row by row, through the modules' own calls: this is where stage 3 gathers and releases."""
    layer = TiledLinear(IN, OUT, in_splits=2, out_splits=2)
    ran = []
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda m, args, name=name: ran.append(("in", name)))
            module.register_forward_hook(lambda m, args, out, name=name: ran.append(("out", name)))
    layer(torch.ones(IN))
    tiles = ["linears.0.0", "linears.0.1", "linears.1.0", "linears.1.1"]
    assert ran == [(what, name) for name in tiles for what in ("in", "out")]


@pytest.mark.parametrize("in_splits", [1, 3])
def test_input_that_is_already_split(in_splits: int) -> None:
    linear = whole()
    x = inputs(2, 3)
    layer = tiled(linear, in_splits=in_splits, out_splits=2, input_is_already_split=True)
    parts = [x[..., columns] for columns in slices(IN, in_splits)]
    close(layer(parts), linear(x))
    close(layer(tuple(parts)), linear(x))


def test_outputs_left_apart() -> None:
    linear = whole()
    x = inputs(4)
    out = tiled(linear, in_splits=2, out_splits=3, combine_out_splits=False)(x)
    assert isinstance(out, list)
    assert [t.shape for t in out] == [(4, 2), (4, 2), (4, 1)]
    close(torch.cat(out, dim=-1), linear(x))
    (only,) = tiled(linear, combine_out_splits=False)(x)
    close(only, linear(x))


class Doubled(nn.Linear):
    """Counts the instances that were made with `tag`, and is no plain linear."""

    tags: list[tuple[int, int, bool, str]] = []

    def __init__(self, inputs: int, outputs: int, bias: bool, tag: str) -> None:
        super().__init__(inputs, outputs, bias, dtype=torch.float64)
        self.tags.append((inputs, outputs, bias, tag))

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_another_class_of_tiles_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Doubled, "tags", [])
    linear = whole()
    x = inputs(4)
    layer = TiledLinear(
        IN, OUT, in_splits=2, out_splits=2, linear_cls=Doubled, init_linear=linear, tag="t"
    )
    assert Doubled.tags == [
        (4, 3, False, "t"),
        (3, 3, True, "t"),
        (4, 2, False, "t"),
        (3, 2, True, "t"),
    ]
    close(layer(x), 2 * linear(x))


def test_without_a_layer_to_copy_tiles_initialise_themselves() -> None:
    torch.manual_seed(3)
    layer = TiledLinear(IN, OUT, in_splits=2)
    torch.manual_seed(3)
    first = nn.Linear(4, OUT, bias=False)
    second = nn.Linear(3, OUT)
    assert torch.equal(layer.linears[0][0].weight, first.weight)
    assert torch.equal(layer.linears[0][1].weight, second.weight)
    assert torch.equal(layer.linears[0][1].bias, second.bias)


def test_copies_into_the_same_parameters() -> None:
    """A later copy writes values, converts them, and keeps the parameters and what optimizers hold
    of them.
    """
    layer = TiledLinear(IN, OUT, in_splits=3, out_splits=2)
    linear = whole()
    x = inputs(4)
    before = list(layer.parameters())
    layer.copy_params_from(linear)
    assert all(a is b for a, b in zip(before, layer.parameters(), strict=True))
    assert all(
        p.dtype == torch.float32 and p.requires_grad and p.is_leaf for p in layer.parameters()
    )
    torch.testing.assert_close(layer(x.float()), linear(x).float())
    linear.weight.data.zero_()
    assert all(p.any() for p in layer.parameters())


class Megatron(nn.Linear):
    """A linear class of the kind that returns its bias and skips adding it."""

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        return F.linear(input, self.weight), self.bias


@pytest.mark.parametrize("cls", [nn.Linear, Megatron])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_splits", "out_splits"), SPLITS)
def test_bias_returned(in_splits: int, out_splits: int, bias: bool, cls: type[nn.Linear]) -> None:
    linear = whole(bias)
    x = inputs(2, 3)
    options = {"in_splits": in_splits, "out_splits": out_splits, "linear_cls": cls}
    layer = tiled(linear, TiledLinearReturnBias, **options)
    out, added = layer(x)
    close(out, F.linear(x, linear.weight))
    close(added, linear.bias)
    (out + added if bias else out).square().sum().backward()
    linear(x).square().sum().backward(inputs=list(linear.parameters()))
    weight, bias_grad = gradients(layer, slices(OUT, out_splits), slices(IN, in_splits))
    close(weight, linear.weight.grad)
    close(bias_grad, linear.bias.grad if bias else None)

    outs, biases = tiled(linear, TiledLinearReturnBias, combine_out_splits=False, **options)(x)
    assert [t.shape[-1] for t in outs] == [s.stop - s.start for s in slices(OUT, out_splits)]
    close(torch.cat(outs, dim=-1), out)
    assert (
        (biases is None) if not bias else [b.shape for b in biases] == [t.shape[-1:] for t in outs]
    )


def test_the_returned_bias_is_a_copy() -> None:
    """A parameter handed out would keep its tile gathered under stage 3."""
    layer = TiledLinearReturnBias(IN, OUT)
    _, bias = layer(torch.ones(IN))
    assert bias is not layer.linears[0][0].bias
    assert torch.equal(bias, layer.linears[0][0].bias)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_splits": 0}, "in_splits is 0; use 1 to 7"),
        ({"in_splits": 8}, r"in_splits is 8; use 1 to 7 \(in_features\)"),
        ({"out_splits": -1}, "out_splits is -1; use 1 to 5"),
        ({"out_splits": 6}, r"out_splits is 6; use 1 to 5 \(out_features\)"),
    ],
)
@pytest.mark.parametrize("cls", [TiledLinear, TiledLinearReturnBias])
def test_splits_out_of_range(cls: type[Any], options: dict[str, int], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        cls(IN, OUT, **options)


@pytest.mark.parametrize(
    ("split", "given", "message"),
    [
        (False, torch.ones(2, 6), r"\(\.\.\., 7\), not one of shape \(2, 6\)"),
        (False, torch.tensor(1.0), r"not one of shape \(\)"),
        (False, [torch.ones(4), torch.ones(3)], r"not a list of 2 with shapes \[\(4,\), \(3,\)\]"),
        (
            True,
            torch.ones(2, 7),
            r"a list of 2 tensors with last dimensions \[4, 3\], not one of shape \(2, 7\)",
        ),
        (True, [torch.ones(7)], r"not a list of 1 with shapes \[\(7,\)\]"),
        (True, [torch.ones(3), torch.ones(4)], r"not a list of 2 with shapes \[\(3,\), \(4,\)\]"),
        (True, [torch.ones(4), 3], r"not a list of 2"),
        (True, None, "not a NoneType"),
    ],
)
def test_inputs_of_another_shape(split: bool, given: Any, message: str) -> None:
    layer = TiledLinear(IN, OUT, in_splits=2, input_is_already_split=split)
    with pytest.raises(RuntimeError, match=message):
        layer(given)


class Partitioned(nn.Linear):
    """As stage 3 leaves a layer between its passes."""

    def __init__(self) -> None:
        super().__init__(IN, OUT)
        self.weight.data = torch.empty(0)


@pytest.mark.parametrize(
    ("source", "bias", "message"),
    [
        (
            nn.Linear(OUT, IN),
            True,
            r"weight of Linear must have shape \(5, 7\), not one of shape \(7, 5\)",
        ),
        (nn.Identity(), True, "weight of Identity must have shape .*, not a NoneType"),
        (
            nn.Linear(IN, OUT, bias=False),
            True,
            "has no bias and the tiled one has a bias; .* with bias=False",
        ),
        (nn.Linear(IN, OUT), False, "has a bias and the tiled one has no bias; .* with bias=True"),
        (
            Partitioned(),
            True,
            r"weight of Partitioned must have shape \(5, 7\), not one of shape \(0,\)",
        ),
    ],
)
def test_a_layer_that_does_not_fit_is_not_copied(
    source: nn.Module, bias: bool, message: str
) -> None:
    layer = TiledLinear(IN, OUT, bias, in_splits=2, out_splits=2)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(RuntimeError, match=message):
        layer.copy_params_from(source)
    assert all(torch.equal(before[k], v) for k, v in layer.state_dict().items())


def test_nothing_is_written_when_one_tile_does_not_fit() -> None:
    layer = TiledLinear(IN, OUT, in_splits=2)
    layer.linears[0][1].weight.data = torch.empty(0)
    before = layer.linears[0][0].weight.clone()
    with pytest.raises(
        RuntimeError, match=r"weight of Linear must have shape \(5, 3\), not one of shape \(0,\)"
    ):
        layer.copy_params_from(nn.Linear(IN, OUT))
    assert torch.equal(layer.linears[0][0].weight, before)


def test_each_class_names_the_other_for_tiles_of_the_other_kind() -> None:
    with pytest.raises(RuntimeError, match="use TiledLinearReturnBias"):
        TiledLinear(IN, OUT, linear_cls=Megatron)(torch.ones(IN))
    with pytest.raises(RuntimeError, match="or use TiledLinear"):
        TiledLinearReturnBias(IN, OUT, linear_cls=Doubled, tag="")(inputs())


# -- under stage 3 ---------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """A tiled layer whose forward gives the output with its bias, whoever adds it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return out[0] + out[1] if isinstance(out, tuple) else out


def _train_tiled(cls_name: str, splits: int) -> dict[str, Any]:
    """Two steps of stage 3 with 8 x 8 weights; the weights, and the most elements that were
    gathered at once.
    """
    from ds_testing.truth import whole_weights

    import ds_core
    from ds_core import comm

    torch.manual_seed(4)
    linear = nn.Linear(8, 8, dtype=torch.float64)
    cls = {"TiledLinear": TiledLinear, "TiledLinearReturnBias": TiledLinearReturnBias}[cls_name]
    layer = cls(8, 8, in_splits=splits, out_splits=splits, init_linear=linear, dtype=torch.float64)
    zero = {
        "stage": 3,
        "param_persistence_threshold": 0,
        "prefetch_bucket_size": 0,
        "max_reuse_distance": 0,
    }
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": zero,
    }
    engine, *_ = ds_core.initialize(model=Wrapped(layer), config=config)
    for step in range(2):
        x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x[4 * comm.rank() :][:4]).square().mean())
        engine.step()
    weights = whole_weights(engine)
    peak = engine.partitioner.gathering.peak
    other = nn.Linear(8, 8, dtype=torch.float64)
    layer.copy_params_from(other)  # of partitioned tiles; rank 0's counts
    after = whole_weights(engine)
    comm.broadcast(other.weight.data, src=0)
    tiles = [[after[f"layer.linears.{i}.{j}.weight"] for j in range(splits)] for i in range(splits)]
    assert torch.equal(torch.cat([torch.cat(row, dim=1) for row in tiles]), other.weight)
    assert engine.partitioner.gathering.peak == peak
    engine.destroy()

    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    for step in range(2):
        x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        linear(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    truth = cls(8, 8, in_splits=splits, out_splits=splits, init_linear=linear, dtype=torch.float64)
    error = max(
        (weights[f"layer.{name}"] - p).abs().max().item() for name, p in truth.named_parameters()
    )
    return {"error": error, "peak": peak}


@pytest.mark.parametrize("cls", ["TiledLinear", "TiledLinearReturnBias"])
def test_stage_3_holds_one_tile_at_a_time(cls: str) -> None:
    """The training of the whole layer, with no more gathered than the largest tile and its bias."""
    for splits, peak in ((1, 64 + 8), (2, 16 + 4), (4, 4 + 2)):
        for answer in run_ranks(2, _train_tiled, cls, splits):
            assert answer["error"] < 1e-12
            # a part is rounded up by up to 2
            assert answer["peak"] <= peak + 2, f"{splits} x {splits} tiles"
