"""Tiled layers and losses by hand: their gradients are those without tiles, once per backward, or
there is an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ds_sequence_parallel import TileBytes, TiledFusedLogitsLoss, TiledMLP
from ds_testing.truth import same
from torch import Tensor, nn
from torch.nn import functional as F

from ds_core.errors import UsageError

WIDTH = 6
WORDS = 11
LENGTH = 13


class MLP(nn.Module):
    """Its gate and up projections are one parameter, as in models that share weights."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 9)
        self.up = nn.Linear(WIDTH, 9)
        self.down = nn.Linear(9, WIDTH)
        self.up.weight = self.gate.weight
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(F.silu(self.gate(x)) * self.up(x)))


class Head(nn.Linear):
    def loss(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        logits = self(x).flatten(0, -2)
        losses = F.cross_entropy(
            logits.to(torch.promote_types(x.dtype, torch.float32)), y.flatten(), reduction="none"
        )
        return losses.sum() if mask is None else (losses * mask.flatten()).sum()


def data(dtype: torch.dtype = torch.float64, batch: int = 2) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(batch, LENGTH, WIDTH, generator=random, dtype=torch.float64).to(dtype)
    return x, torch.randint(WORDS, (batch, LENGTH), generator=random)


def run(module: nn.Module, fn: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Tensor]:
    """The output and all gradients; the loss weighs positions differently."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    out = fn(x)
    weights = torch.arange(out.numel(), dtype=out.dtype).cos().view_as(out)
    (out * weights).sum().backward()
    return {
        "out": out.detach(),
        "x": x.grad,
        **{n: p.grad.clone() for n, p in module.named_parameters()},
    }  # type: ignore


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("shards", [2, 5, 99])
@pytest.mark.parametrize("batch", [1, 3])
def test_layer(shards: int, batch: int) -> None:
    mlp = MLP().double()
    (x, _) = data(batch=batch)
    same(
        run(mlp, lambda x: TiledMLP.apply(MLP.forward, mlp, x, shards), x), run(mlp, mlp, x), 1e-13
    )


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("masked", [False, True])
def test_loss(reduction: str, masked: bool) -> None:
    head = Head(WIDTH, WORDS).double()
    (x, y) = data()
    mask = (y % 2).double() if masked else None

    def whole(x: Tensor) -> Tensor:
        return head.loss(x, y, mask)

    def mean_of(module: Head, *tiles: Tensor) -> Tensor:
        return (
            module.loss(*tiles) if reduction == "sum" else module.loss(*tiles) / tiles[0].shape[1]
        )

    found = run(
        head, lambda x: TiledFusedLogitsLoss.apply(mean_of, head, x, y, mask, 4, None, reduction), x
    )
    wanted = run(head, lambda x: whole(x) if reduction == "sum" else whole(x) / LENGTH, x)
    same(found, wanted, 1e-13)
    with torch.no_grad():
        again = TiledFusedLogitsLoss.apply(mean_of, head, x, y, mask, 4, None, reduction)
    torch.testing.assert_close(again, wanted["out"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_lose_nothing_to_tiles(dtype: torch.dtype) -> None:
    """Sums over many tiles are in fp32, so errors are those without tiles."""
    x, y = data()
    for module in (MLP(), Head(WIDTH, WORDS)):
        loss = isinstance(module, Head)

        def whole(x: Tensor, module: Any = module) -> Tensor:
            return module.loss(x, y) / 7 if isinstance(module, Head) else module(x)

        def tiles(x: Tensor, module: Any = module) -> Tensor:
            if isinstance(module, Head):
                return (
                    TiledFusedLogitsLoss.apply(Head.loss, module, x, y, None, LENGTH, None, "sum")
                    / 7
                )
            return TiledMLP.apply(MLP.forward, module, x, LENGTH)

        exact = run(module.to(dtype).double(), whole, x.to(dtype).double())
        plain, found = (run(module.to(dtype), fn, x.to(dtype)) for fn in (whole, tiles))
        for name, value in exact.items():
            error, usual = ((one[name].double() - value).norm() for one in (found, plain))
            assert error <= 1.5 * usual + 1e-3 * value.norm() * loss, (name, loss)


def test_autocast_and_a_weight_used_outside_too() -> None:
    """Backward runs outside of autocast; the weight's second use still gets its gradient."""
    mlp = MLP()
    (x, _) = data(torch.float32)

    def both(layer: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def model(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return (layer(x) + mlp.down(F.linear(x, mlp.gate.weight))).float()

        return model

    found = run(mlp, both(lambda x: TiledMLP.apply(MLP.forward, mlp, x, 4)), x)
    wanted = run(mlp, both(mlp), x)
    same(found, wanted, 2e-2)
    assert not torch.is_autocast_enabled("cpu")


def test_dropout_repeats_in_backward() -> None:
    mlp = MLP(dropout=0.5).double()
    (x, _) = data()

    def by_hand(x: Tensor) -> Tensor:
        torch.manual_seed(7)
        ends = [i * LENGTH // 4 for i in range(5)]
        return torch.cat([mlp(x[:, a:b]) for a, b in itertools.pairwise(ends)], 1)

    def tiles(x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return TiledMLP.apply(MLP.forward, mlp, x, 4)

    wanted = run(mlp, by_hand, x)
    after = torch.rand(1)
    found = run(mlp, tiles, x)
    assert torch.rand(1) == after  # backward leaves the random state alone
    same(found, wanted, 1e-13)


def test_gradients_arrive_once() -> None:
    """Hooks of both kinds run once per backward, and with a graph that is kept, backward can run
    again.
    """
    mlp = MLP().double()
    (x, _) = data()
    calls: list[str] = []
    mlp.down.weight.register_hook(lambda grad: (calls.append("tensor"), grad * 3)[1])
    mlp.down.weight.register_post_accumulate_grad_hook(lambda p: calls.append("arrived"))
    mlp(x).sum().backward()
    assert mlp.down.weight.grad is not None
    wanted = mlp.down.weight.grad.clone()
    mlp.zero_grad()
    calls.clear()
    out = TiledMLP.apply(MLP.forward, mlp, x, 5).sum()
    out.backward(retain_graph=True)
    assert calls == ["tensor", "arrived"]
    torch.testing.assert_close(mlp.down.weight.grad, wanted)
    out.backward()
    torch.testing.assert_close(mlp.down.weight.grad, 2 * wanted)


def test_frozen_weights_and_inputs_without_gradient() -> None:
    mlp = MLP().double()
    (x, _) = data()
    mlp.gate.weight.requires_grad_(False)
    TiledMLP.apply(MLP.forward, mlp, x, 4).sum().backward()
    found = {n: None if p.grad is None else p.grad.clone() for n, p in mlp.named_parameters()}
    mlp.zero_grad()
    mlp(x).sum().backward()
    for name, param in mlp.named_parameters():
        assert (param.grad is None) == (found[name] is None) == (name == "gate.weight")
        if param.grad is not None:
            torch.testing.assert_close(found[name], param.grad)


def test_memory_is_that_of_one_tile() -> None:
    """What is alive at once, in the layer and the loss, with as many tiles as a budget asks for."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.weak import WeakTensorKeyDictionary

    class Meter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.live: Any = WeakTensorKeyDictionary()
            self.peak = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, Tensor):
                    self.live[tensor] = tensor.untyped_storage()
            storages = {s._cdata: s.nbytes() for s in self.live.values()}
            self.peak = max(self.peak, sum(storages.values()))
            return out

    def peak(fn: Callable[[Tensor], Tensor], module: nn.Module) -> int:
        module.zero_grad()
        x = torch.randn(1, 4096, WIDTH).requires_grad_()
        with Meter() as meter:
            fn(x).sum().backward()
        return meter.peak

    mlp = MLP()
    head = Head(WIDTH, 200)
    budget = 64 * 1024
    y = torch.zeros(1, 4096, dtype=torch.long)
    kept = 4 * 4096 * WIDTH * 4  # inputs, outputs and their gradients
    for tiles, whole, module in (
        (lambda x: TiledMLP.apply(MLP.forward, mlp, x, TileBytes(budget)), mlp, mlp),
        (
            lambda x: TiledFusedLogitsLoss.apply(
                Head.loss, head, x, y, None, TileBytes(budget), None, "sum"
            ),
            lambda x: head.loss(x, y),
            head,
        ),
    ):
        assert peak(tiles, module) < kept + 1.5 * budget < peak(whole, module)


def test_budgets() -> None:
    mlp = MLP().double()
    (x, _) = data()
    few = TileBytes(10**9)
    many = TileBytes(1)
    assert few.count(mlp, [x], 1, mlp) == 1
    assert many.count(mlp, [x], 1, mlp) == LENGTH
    dropping = MLP(dropout=0.5).double()
    state = torch.get_rng_state()
    middle = TileBytes(3000).count(dropping, [x], 1)
    assert 1 < middle < LENGTH
    assert torch.equal(torch.get_rng_state(), state)
    same(
        run(mlp, lambda x: TiledMLP.apply(MLP.forward, mlp, x, TileBytes(3000)), x),
        run(mlp, mlp, x),
        1e-13,
    )


class Stray(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * self.scale


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, y, m: TiledMLP.apply(MLP.forward, m, x, 0), "MLP: the number of tiles is 0"),
        (lambda x, y, m: TiledMLP.apply(MLP.forward, m, x[0, 0], 2), r"has the shape \(6,\)"),
        (
            lambda x, y, m: TiledMLP.apply(lambda m, x: (x, x), m, x, 2),
            "gives one tensor, not a tuple",
        ),
        (
            lambda x, y, m: TiledMLP.apply(lambda m, x: x.sum(1), m, x, 2),
            "in dimension 1 it gave the shape",
        ),
        (
            lambda x, y, m: TiledFusedLogitsLoss.apply(lambda m, x, y: x, m, x, y, None, 2),
            "a scalar, not a tensor of",
        ),
        (
            lambda x, y, m: TiledFusedLogitsLoss.apply(MLP.forward, m, x, y[:, 1:], None, 2),
            "one has the shape",
        ),
        (
            lambda x, y, m: TiledFusedLogitsLoss.apply(MLP.forward, m, x, y, None, 2, None, "max"),
            "not 'max'",
        ),
        (lambda x, y, m: TileBytes(0), "must be at least 1"),
    ],
)
def test_mistakes_in_forward(call: Callable[..., Any], message: str) -> None:
    x, y = data(torch.float32)
    with pytest.raises(UsageError, match=message):
        call(x.requires_grad_(), y, MLP())


def test_mistakes_in_backward() -> None:
    model = Stray()
    (x, _) = data(torch.float32)
    out = TiledMLP.apply(Stray.forward, model, x, 3, list(model.mlp.parameters()))
    with pytest.raises(
        UsageError,
        match=r"Stray: the tiled function uses parameter 'scale', which would get no grad",
    ):
        out.sum().backward()
    position = torch.ones(1, requires_grad=True)
    with pytest.raises(UsageError, match=r"uses a tensor of shape \(1,\) that requires a gradient"):
        TiledMLP.apply(lambda m, x: m(x) * position, model, x, 3).sum().backward()
    x.requires_grad_()
    out = TiledMLP.apply(Stray.forward, model, x, 3).square().sum()
    with pytest.raises(
        UsageError, match="Stray is computed in tiles, which give no second derivatives"
    ):
        torch.autograd.grad(out, x, create_graph=True)


def test_any_function_with_deepspeeds_arguments() -> None:
    from ds_sequence_parallel.tiles.sequence_tiled_compute import (
        SequenceTiledCompute,
        sequence_tiled_compute,
    )

    mlp = MLP().double()
    head = Head(WIDTH, WORDS).double()
    x, y = data()

    def layer(x: Tensor, module: nn.Module, scale: float) -> Tensor:
        return module(x) * scale

    def tiles(x: Tensor) -> Tensor:
        given: Any = (layer, LENGTH, 4, ["x"], ["module", "scale"], "x", None, 1, None, x, mlp, 0.5)
        return SequenceTiledCompute.apply(*given)

    same(run(mlp, tiles, x), run(mlp, lambda x: layer(x, mlp, 0.5), x), 1e-12)

    def loss(x: Tensor, y: Tensor, mask: Tensor | None, self: Head) -> Tensor:  # noqa: N805 (DeepSpeed's own scripts)
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten())

    def tiled_loss(x: Tensor) -> Tensor:
        shard: dict[str, Any] = {"y": y, "x": x, "mask": None}
        return sequence_tiled_compute(loss, LENGTH, 5, shard, {"self": head}, "x", None, 0, "mean")

    same(run(head, tiled_loss, x), run(head, lambda x: loss(x, y, None, head), x), 1e-12)
    with pytest.raises(
        UsageError,
        match=r"grad_requiring_tensor_key is 'z', which must be a tensor \[batch, 13, width\]",
    ):
        sequence_tiled_compute(loss, LENGTH, 5, {"x": x}, {}, "z")
    with pytest.raises(
        UsageError, match="or 0 with an output_reduction of 'mean' or 'sum'; it is 0 with None"
    ):
        sequence_tiled_compute(loss, LENGTH, 5, {"x": x}, {}, "x", None, 0, None)
