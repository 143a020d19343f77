"""Recomputation by hand: gradients of plain autograd, what is kept, and what is said where it
cannot work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ds_activation_checkpointing import CheckpointFunction, checkpoint
from ds_activation_checkpointing.inputs import Keeper
from ds_activation_checkpointing.recompute import Options, recompute
from ds_run_state.random_streams import STREAMS
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from ds_core.errors import UsageError

Call = Callable[..., Any]


def plainly(function: Call, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def keeping(function: Call, *args: Any, **kwargs: Any) -> Any:
    return recompute(function, args, kwargs, Options("block", policy="keep_matmuls"))


def keeping_attention(function: Call, *args: Any, **kwargs: Any) -> Any:
    return recompute(function, args, kwargs, Options("block", policy="keep_attention"))


def to_the_end(function: Call, *args: Any, **kwargs: Any) -> Any:
    return recompute(function, args, kwargs, Options("block", stop_early=False))


def by_function(function: Call, *args: Any, **kwargs: Any) -> Any:
    return CheckpointFunction.apply(lambda *given: function(*given, **kwargs), [], *args)


@pytest.fixture
def streams() -> Any:
    yield
    STREAMS.reset()


class Block(nn.Module):
    """Dropout in two streams, attention, keyword, nested and other arguments, a tuple of
    results."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)

    def forward(
        self, x: Tensor, scale: float, *, pair: tuple[Tensor, Tensor], mode: str
    ) -> tuple[Tensor, str, Tensor]:
        q, k, v = self.qkv(self.norm(x)).view(2, 3, 2, 12).chunk(3, -1)
        x = x + self.out(
            scaled_dot_product_attention(q * pair[0], k, v, dropout_p=0.3).reshape(2, 3, 8)
        )
        with STREAMS.fork():
            x = dropout(x, 0.4)
        hidden = gelu(self.up(x)) * scale + pair[1]
        return x + dropout(self.down(hidden), 0.2), mode, hidden.mean()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("call", [checkpoint, keeping, keeping_attention, to_the_end, by_function])
def test_gradients_and_random_numbers_are_those_of_plain_autograd(
    call: Call, autocast: bool, streams: None
) -> None:
    torch.manual_seed(0)
    blocks = [Block() for _ in range(2)]

    def run(call: Call) -> list[Tensor]:
        STREAMS.seed_model_parallel(3, 1)
        x = torch.linspace(-1, 1, 48).view(2, 3, 8).requires_grad_()
        pair = (torch.linspace(0, 1, 4).requires_grad_(), torch.linspace(1, 2, 16))
        for block in blocks:
            block.zero_grad()
        total: Any = 0
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out: Any = x
            for block in blocks:
                out, mode, mean = call(block, out, 0.5, pair=pair, mode="m")
                assert mode == "m"
                total = total + mean
        (total + out.float().square().sum()).backward()
        grads = [p.grad for block in blocks for p in block.parameters()]
        with STREAMS.fork():
            drawn = torch.rand(2)
        return [x.grad, pair[0].grad, *grads, torch.rand(2), drawn]  # type: ignore[list-item]

    for wanted, got in zip(run(plainly), run(call), strict=True):
        assert torch.equal(wanted, got)


def saved_bytes(run: Callable[[], Any]) -> int:
    """Bytes that a forward leaves behind, counted by the allocator."""
    with torch.profiler.profile(profile_memory=True) as profile:
        out = run()
    total = sum(event.self_cpu_memory_usage for event in profile.key_averages())
    del out
    return int(total)


def test_only_inputs_are_kept() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    x = torch.randn(100, 64, requires_grad=True)
    row = 100 * 4

    def run(call: Call) -> Tensor:
        out = x
        for layer in layers:
            out = call(layer, out)
        return out.sum()

    inputs = 64 * row
    hidden = 256 * row
    random = 4 * len(torch.get_rng_state())
    assert saved_bytes(lambda: run(plainly)) == pytest.approx(3 * inputs + 4 * 2 * hidden, rel=0.05)
    assert saved_bytes(lambda: run(checkpoint)) == pytest.approx(3 * inputs + random, rel=0.05)
    # The output of the first product; that of the last one is never asked for again.
    assert saved_bytes(lambda: run(keeping)) == pytest.approx(
        3 * inputs + 4 * hidden + random, rel=0.05
    )


def test_matmuls_are_not_computed_again() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    layer = nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)
    )

    def flops(call: Call) -> int:
        with FlopCounterMode(display=False) as counter:
            call(layer, torch.ones(4, 8, requires_grad=True)).sum().backward()
        return counter.get_total_flops()

    plain = flops(plainly)
    first = 2 * 4 * 8 * 16
    second = 2 * 4 * 16 * 8
    # the last product is after the last tensor that is wanted
    assert flops(checkpoint) == plain + first + second
    assert flops(keeping) == plain + second  # its output is changed in place, so it cannot be kept


def test_a_second_backward_finds_what_the_first_computed() -> None:
    calls = []
    layer = nn.Linear(4, 4)

    def function(x: Tensor) -> Tensor:
        calls.append(1)
        return layer(x).tanh().square()  # type: ignore[no-any-return]

    x = torch.ones(2, 4, requires_grad=True)
    loss = checkpoint(function, x).sum()
    (first,) = torch.autograd.grad(loss, [x], retain_graph=True)
    (second,) = torch.autograd.grad(loss, [x])
    assert torch.equal(first, second)
    assert len(calls) == 2
    with torch.no_grad():
        checkpoint(function, x)
    assert len(calls) == 3


def test_recomputation_inside_recomputation_is_part_of_it() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def outer(inner: Call) -> Call:
        return lambda x: inner(layer, inner(layer, x).tanh())

    from functools import partial

    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    def grad(call: Call, inner: Call) -> Tensor:
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        call(outer(inner), x).square().sum().backward()
        assert x.grad is not None
        return x.grad

    theirs = partial(torch_checkpoint, use_reentrant=False)
    wanted = grad(plainly, plainly)
    for call, inner in [
        (checkpoint, checkpoint),
        (checkpoint, theirs),
        (theirs, checkpoint),
        (keeping, checkpoint),
    ]:
        assert torch.equal(grad(call, inner), wanted)


class TestErrors:
    def test_an_input_that_is_changed_in_place(self) -> None:
        x = torch.ones(3, requires_grad=True)
        with pytest.raises(
            UsageError, match="an input of .*lambda.* was changed in place by its own forward"
        ):
            checkpoint(lambda t: t.mul_(2).exp(), x * 1)
        given = x * 1
        out = checkpoint(torch.exp, given)
        given.mul_(2)
        with pytest.raises(
            UsageError, match=r"input of .*exp was changed in place after its forward"
        ):
            out.sum().backward()

    def test_a_function_that_does_something_else(self) -> None:
        count = iter(range(9))
        out = checkpoint(
            lambda x: x.exp() if next(count) else x.exp().tanh(), torch.ones(3, requires_grad=True)
        )
        with pytest.raises(
            UsageError, match="saved 2 tensors for backward, and 1 when it was computed again"
        ):
            out.sum().backward()
        count = iter(range(9))
        out = checkpoint(lambda x: x[next(count) :].exp(), torch.ones(3, requires_grad=True))
        with pytest.raises(
            UsageError, match=r"tensor 0 .* was float32 \[3\], and is float32 \[2\] .*caches that"
        ):
            out.sum().backward()


def test_a_kept_input_has_its_strides() -> None:
    seen: list[tuple[int, ...]] = []

    def function(x: Tensor) -> Tensor:
        seen.append(x.stride())
        return x.exp()

    class Copies:
        def out(self, tensor: Tensor) -> Tensor:
            return tensor.clone()

        def prefetch(self, copy: Any) -> None:
            pass

        def settle(self) -> None:
            pass

        def back(self, copy: Tensor) -> Tensor:
            return copy.clone()

    x = torch.randn(3, 4, 5, requires_grad=True)
    for given in (x.permute(2, 0, 1), x[:, ::2], x.expand(2, 3, 4, 5), x):
        recompute(
            function,
            (given * 1 if given is x else given,),
            {},
            Options("f", Keeper(copies=Copies())),
        ).sum().backward()
    assert seen[0] == seen[1]
    assert seen[6] == seen[7]


class Attention(nn.Module):
    """Two products around attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        result: Tensor = self.out(
            scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        ).sin()
        return result


AGAIN = {"all": (1, 2), "keep_matmuls": (0, 0), "keep_attention": (0, 2)}
"""How often attention and a product run in backward."""


class Counted(TorchDispatchMode):
    """Counts forward operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize("policy", AGAIN)
def test_what_a_policy_computes_again(policy: str) -> None:
    x = torch.randn(2, 3, 8, requires_grad=True)
    block = Attention()
    out = recompute(block, (x,), {}, Options("block", policy=policy))
    with Counted() as counted:
        out.sum().backward()
    assert (counted.ran[FLASH], counted.ran["addmm"]) == AGAIN[policy]


@pytest.mark.fast_cases("keep_matmuls", "keep_attention")
@pytest.mark.parametrize("policy", AGAIN)
def test_a_compiled_region_computes_the_same_again(policy: str) -> None:
    """As one graph; operators are counted in the graph of its backward."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    found: list[Counter[str]] = []

    def backward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(
            Counter(getattr(n.target, "__name__", "").split(".")[0] for n in graph.graph.nodes)
        )
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=backward
    )
    block = Attention()
    x = torch.randn(2, 3, 8)

    def run(call: Call) -> list[Tensor]:
        given = x.clone().requires_grad_()
        call(given).sum().backward()
        grads = [given.grad, *(p.grad for p in block.parameters())]
        block.zero_grad()
        return grads  # type: ignore[return-value]

    options = Options("block", policy=policy)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda given: recompute(block, (given,), {}, options), backend=backend, fullgraph=True
    )
    for wanted, got in zip(run(block), run(compiled), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    # torch saves the output of an operator that may draw random numbers, as attention is, with
    # every policy.
    assert [(ran[FLASH], ran["addmm"]) for ran in found] == [(0, AGAIN[policy][1])]
