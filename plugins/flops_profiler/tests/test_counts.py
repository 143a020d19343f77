"""Counts of single layers and whole models: by hand, and against torch's own counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ds_flops_profiler import Counter, get_model_profile
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula


def counted(model: nn.Module, *args: Any) -> tuple[int, int]:
    flops, macs, _ = get_model_profile(
        model, args=args, print_profile=False, as_string=False, warm_up=0
    )
    return flops, macs


class Calls(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


X = torch.ones(2, 5, 8)
IMAGE = torch.ones(2, 4, 6, 6)
LINE = torch.ones(2, 4, 9)
Q = torch.ones(2, 3, 5, 8)
PRODUCTS: dict[str, tuple[nn.Module, Any, int, int]] = {
    # model, argument, MACs, FLOPs that are no products
    "linear, without its bias": (nn.Linear(8, 3), X, 10 * 8 * 3, 0),
    "matrix by vector": (Calls(lambda x: x @ torch.ones(8)), X[0], 5 * 8, 0),
    "vector by vector": (Calls(lambda x: x @ torch.ones(8)), X[0, 0], 8, 0),
    "batch of matrices": (Calls(lambda x: x @ x.transpose(1, 2)), X, 2 * 5 * 8 * 5, 0),
    "addmm": (
        Calls(lambda x: torch.addmm(torch.ones(5, 3), x, torch.ones(8, 3))),
        X[0],
        5 * 8 * 3,
        0,
    ),
    "baddbmm": (
        Calls(lambda x: torch.baddbmm(torch.ones(2, 5, 3), x, torch.ones(2, 8, 3))),
        X,
        2 * 5 * 8 * 3,
        0,
    ),
    "einsum": (Calls(lambda x: torch.einsum("bsh,bth->bst", x, x)), X, 2 * 5 * 5 * 8, 0),
    "bilinear": (nn.Bilinear(8, 8, 3), (X, X), 10 * 3 * 8 * 8, 0),
    "grouped convolution": (nn.Conv2d(4, 6, 3, groups=2), IMAGE, 2 * 6 * 16 * 2 * 9, 2 * 6 * 16),
    "convolution, one dimension": (
        nn.Conv1d(4, 6, 3, stride=2, bias=False),
        LINE,
        2 * 6 * 4 * 4 * 3,
        0,
    ),
    "convolution, three dimensions": (
        nn.Conv3d(4, 2, 2),
        torch.ones(1, 4, 3, 3, 3),
        2 * 8 * 4 * 8,
        2 * 8,
    ),
    "transposed convolution": (
        nn.ConvTranspose2d(4, 6, 3, groups=2),
        IMAGE,
        2 * 4 * 36 * 3 * 9,
        2 * 6 * 64,
    ),
    "attention": (
        Calls(lambda q: F.scaled_dot_product_attention(q, q, q)),
        Q,
        2 * 3 * (2 * 5 * 5 * 8),
        0,
    ),
    "attention, causal": (
        Calls(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True)),
        Q,
        2 * 3 * (2 * 5 * 5 * 8),
        0,
    ),
    "attention in parts": (
        Calls(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)),
        Q,
        2 * 3 * (2 * 5 * 5 * 8),
        0,
    ),
    "attention by hand, with its softmax": (
        Calls(lambda q: (q @ q.transpose(2, 3)).softmax(-1) @ q),
        Q,
        2 * 3 * (2 * 5 * 5 * 8),
        2 * 3 * 5 * 5,
    ),
    "LSTM": (nn.LSTM(8, 4), X, 10 * 4 * 4 * (8 + 4), 10 * 4 * 5),
    "LSTM cell": (nn.LSTMCell(8, 4), X[0], 5 * 4 * 4 * (8 + 4), 5 * 4 * 5),
    "GRU, two layers and directions": (
        nn.GRU(8, 4, 2, bidirectional=True),
        X,
        10 * 2 * 3 * 4 * ((8 + 4) + (8 + 4)),
        10 * 4 * 4 * 3,
    ),
    "RNN": (nn.RNN(8, 4), X, 10 * 4 * (8 + 4), 10 * 4),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("grad", [True, False])
def test_products_by_hand(name: str, grad: bool) -> None:
    model, given, macs, more = PRODUCTS[name]
    with torch.inference_mode(not grad):
        assert counted(model, *(given if isinstance(given, tuple) else (given,))) == (
            2 * macs + more,
            macs,
        )


NUMEL = IMAGE.numel()
PER_ELEMENT: dict[str, tuple[nn.Module, int]] = {
    "layer norm": (nn.LayerNorm(6), 5 * NUMEL),
    "layer norm without weight": (nn.LayerNorm(6, elementwise_affine=False), 4 * NUMEL),
    "group norm": (nn.GroupNorm(2, 4), 5 * NUMEL),
    "instance norm": (nn.InstanceNorm2d(4), 4 * NUMEL),
    "batch norm in evaluation": (nn.BatchNorm2d(4), 2 * NUMEL),
    "batch norm": (Calls(lambda x: F.batch_norm(x, None, None, training=True)), 4 * NUMEL),
    **{
        type(module).__name__: (module, NUMEL)
        for module in (
            *(
                nn.ReLU(),
                nn.ReLU6(),
                nn.ReLU(inplace=True),
                nn.LeakyReLU(),
                nn.PReLU(),
                nn.ELU(),
                nn.SELU(),
                nn.CELU(),
            ),
            *(
                nn.GELU(),
                nn.SiLU(),
                nn.Mish(),
                nn.Sigmoid(),
                nn.Tanh(),
                nn.Softplus(),
                nn.Hardswish(),
                nn.LogSigmoid(),
            ),
            *(nn.Softmax(1), nn.LogSoftmax(1), nn.GLU(1)),
            *(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2), nn.AdaptiveMaxPool2d(2)),
        )
    },
    "pooling to one position": (nn.AdaptiveAvgPool2d(1), NUMEL),
    "resizing": (nn.Upsample(scale_factor=2), 4 * NUMEL),
    "dropout": (nn.Dropout(), 0),
    "addition": (Calls(lambda x: x + x * 2), 0),
}


@pytest.mark.parametrize("name", PER_ELEMENT)
def test_elements_by_hand(name: str) -> None:
    model, flops = PER_ELEMENT[name]
    assert counted(model, IMAGE.clone()) == (flops, 0)


def test_embedding_costs_nothing() -> None:
    assert counted(nn.Embedding(7, 4), torch.zeros(3, dtype=torch.int64)) == (0, 0)


def test_a_training_dropout_costs_nothing() -> None:
    counter = Counter(model := nn.Dropout())
    counter.attach()
    with counter.measuring():
        model(X)
    assert counter.total(model).flops == 0


class Block(nn.Module):
    """As in ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.convs[0](x)))
        return F.relu(x + self.norms[1](self.convs[1](y)))


def resnet() -> nn.Module:
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, stride=2), nn.BatchNorm2d(8), Block(8), nn.MaxPool2d(2), *head
    )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(*x.shape[:2], 2, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = (q @ k.transpose(2, 3) / 8**0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Experts(nn.Module):
    """Each token to the expert with the highest score."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            y[chosen == index] = expert(x[chosen == index])
        return y


def transformer(checkpointed: bool = False) -> nn.Module:
    layers = [m for _ in range(2) for m in (nn.LayerNorm(16), Attention(), Experts())]
    body = nn.Sequential(*layers)
    run = Calls(lambda x: checkpoint(body, x, use_reentrant=False)) if checkpointed else body
    if checkpointed:
        run.body = body
    return nn.Sequential(nn.Embedding(11, 16), run, nn.Linear(16, 11))


IDS = torch.arange(12).reshape(2, 6) % 11


@pytest.mark.parametrize(
    ("model", "given"), [(resnet(), torch.ones(2, 4, 12, 12)), (transformer(), IDS)]
)
def test_products_are_those_of_torchs_counter_forward_and_backward(
    model: nn.Module, given: Tensor
) -> None:
    with FlopCounterMode(display=False) as torchs:
        out = model(given)
    forward = torchs.get_total_flops()
    with FlopCounterMode(display=False) as torchs:
        out.sum().backward()
    counter = Counter(model)
    counter.attach()
    with counter.measuring():
        model(given).sum().backward()
    counter.detach()
    assert 2 * counter.total(model).macs == forward
    assert counter.backward.flops == 2 * counter.backward.macs == torchs.get_total_flops()
    assert counter.unknown == set()


def test_tokens_of_experts_are_those_that_they_get() -> None:
    """Whatever the gate does, each token has one expert: 2 * 16 * 32 MACs."""
    model = Experts()
    assert counted(model, X.new_ones(10, 16))[1] == 10 * (16 * 3 + 2 * 16 * 32)


def test_by_hand_a_transformer() -> None:
    flops, macs = counted(transformer(), IDS)
    tokens = 12
    scores = 2 * 2 * 6 * 6
    layer = tokens * (16 * 48 + 16 * 16) + 2 * scores * 8 + tokens * (16 * 3 + 2 * 16 * 32)
    assert macs == 2 * layer + tokens * 16 * 11
    assert flops == 2 * macs + 2 * (5 * tokens * 16 + scores + tokens * 32)


def test_checkpointed_forwards_count_once_and_again_in_the_backward() -> None:
    plain = transformer()
    again = transformer(checkpointed=True)
    assert counted(plain, IDS) == counted(again, IDS)
    again.train()
    counter = Counter(again)
    counter.attach()
    with counter.measuring():
        again(IDS).sum().backward()
    counter.detach()
    body = counter.total(again[1])
    assert counter.total(again).flops == counted(plain, IDS)[0]
    # what the backward does not need is not recomputed
    assert 0 < counter.recomputed.flops <= body.flops
    assert counter.recomputed.flops < counter.backward.flops


def test_a_module_with_two_places_counts_as_often_as_it_is_called() -> None:
    one = nn.Linear(8, 8)
    flops, macs, params = get_model_profile(
        nn.Sequential(one, one, nn.ModuleDict({"again": one})["again"]),
        (2, 8),
        print_profile=False,
        as_string=False,
    )
    assert (flops, macs, params) == (3 * 2 * 2 * 64, 3 * 2 * 64, 72)


def test_a_custom_function_counts_what_it_does() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x @ x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grads[0] @ x.T + x.T @ grads[0]

    counter = Counter(model := Calls(Doubled.apply))
    counter.attach()
    with counter.measuring():
        model(torch.ones(4, 4, requires_grad=True)).sum().backward()
    assert (counter.total(model).macs, counter.backward.macs) == (64, 128)


def test_an_operation_without_a_formula_is_named_until_it_has_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @torch.library.custom_op("flops_test::cube", mutates_args=())
    def cube(x: Tensor) -> Tensor:
        return x**3

    model = Calls(cube)
    get_model_profile(model, (2, 3), as_string=False)
    assert (
        "Not counted, since there is no formula: flops_test.cube.default" in capsys.readouterr().out
    )
    register_flop_formula(torch.ops.flops_test.cube)(lambda shape, **_: 4 * shape[0] * shape[1])
    assert counted(model, torch.ones(2, 3)) == (24, 12)


def test_autocast_and_compiled_models_count_the_same() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    plain = counted(model, X)
    with torch.autocast("cpu", torch.bfloat16):
        assert counted(model, X) == plain
    compiled = torch.compile(model, backend="eager")
    compiled(X)
    assert counted(compiled, X) == plain  # type: ignore[arg-type]


def test_on_meta_nothing_is_computed() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    x = torch.ones(2, 6, 16)
    assert get_model_profile(
        model, args=[x], device="meta", print_profile=False
    ) == get_model_profile(model, args=[x], print_profile=False)
    assert next(model.parameters()).device.type == "cpu"
    with torch.device("meta"):
        huge = nn.Linear(1 << 20, 1 << 20)
    flops, _, params = get_model_profile(huge, (1, 1 << 20), print_profile=False, as_string=False)
    assert (flops, params) == (1 << 41, (1 << 40) + (1 << 20))
