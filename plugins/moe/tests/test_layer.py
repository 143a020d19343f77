"""The layer on one process against the plainly written one, and the three ways in which experts
run.
"""

from __future__ import annotations

import copy
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from ds_moe import Experts, Groups, MoE
from ds_moe.dispatch import dispatch
from ds_moe.ffn import FFN, match
from ds_testing import run_ranks
from moe_reference import ReferenceMoE
from torch import Tensor, nn

from ds_core.errors import UsageError

HIDDEN = 6


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, 10, bias=False)
        self.w3 = nn.Linear(HIDDEN, 10, bias=False)
        self.w2 = nn.Linear(10, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Branching(nn.Module):
    """Linear layers only, and a forward that cannot be traced; gives a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(HIDDEN, 9)
        self.b = nn.Linear(9, HIDDEN)

    def forward(self, x: Tensor) -> Any:
        if x.shape[0] > -1:
            x = self.b(torch.sin(self.a(x))) + x
        return x, None


class Mixing(nn.Module):
    """Linear layers only, but rows of one expert see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) - x.sum(0, keepdim=True)


class Normed(nn.Module):
    """A parameter outside of linear layers, and one that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.a = nn.Linear(HIDDEN, HIDDEN)
        self.b = nn.Linear(HIDDEN, HIDDEN)
        self.b.weight = self.a.weight
        self.register_buffer("shift", torch.full((HIDDEN,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(self.norm(x)))) + self.shift


def _mlp(act: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(
        nn.Linear(HIDDEN, 11), act or nn.GELU(), nn.Dropout(0.0), nn.Linear(11, HIDDEN)
    )


EXPERTS: dict[str, tuple[Any, str]] = {
    "mlp": (_mlp, "ffn"),
    "gated": (Gated, "ffn"),
    "branching": (Branching, "grouped"),
    "linear": (lambda: nn.Linear(HIDDEN, HIDDEN), "grouped"),
    "mixing": (Mixing, "loop"),
    "normed": (Normed, "loop"),
    "nothing": (nn.Tanh, "loop"),
}


def _spread(module: nn.Module) -> None:
    """Experts begin as copies of one module; make them differ."""
    with torch.no_grad():
        for param in module.parameters():
            param.add_(torch.randn_like(param), alpha=0.3)


def _pair(name: str = "mlp", num: int = 4, k: int = 1, **options: Any) -> tuple[MoE, ReferenceMoE]:
    torch.manual_seed(3)
    expert = EXPERTS[name][0]().double()
    options = {"use_rts": False, "top2_2nd_expert_sampling": False, **options}
    residual = options.pop("use_residual", False)
    ours = MoE(HIDDEN, expert, num, k=k, use_residual=residual, **options).double()
    _spread(ours)
    theirs = ReferenceMoE(HIDDEN, expert, num, k, residual=residual, **options).double()
    copy_weights(ours, theirs)
    return ours, theirs


@torch.no_grad()
def copy_weights(ours: MoE, theirs: ReferenceMoE) -> None:
    """Give the plain layer the weights of the stacked one."""
    theirs.wg.weight.copy_(ours.gate.wg.weight)
    stacked = dict(ours.experts.stacked.named_parameters())
    for i, expert in enumerate(theirs.experts):
        for n, p in expert.named_parameters():
            p.copy_(stacked[n][i])
    for part in ("mlp", "coefficient") if ours.use_residual else ():
        getattr(theirs, part).load_state_dict(getattr(ours, part).state_dict())


def _tokens(*shape: int) -> Tensor:
    x = torch.randn(*shape, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return x.requires_grad_()


def _compare(ours: MoE, theirs: ReferenceMoE, x: Tensor, used: Any = None) -> None:
    """Outputs, auxiliary loss, counts, and every gradient."""
    mine = x.detach().clone().requires_grad_()
    out, l_aux, counts = ours(mine, used)
    want, l_want, c_want = theirs(x.reshape(-1, HIDDEN), None if used is None else used.reshape(-1))
    assert out.shape == x.shape
    close = {"rtol": 1e-11, "atol": 1e-13}
    torch.testing.assert_close(out.reshape(-1, HIDDEN), want, **close)
    torch.testing.assert_close(l_aux, l_want, **close)
    assert counts.tolist() == c_want.tolist()
    factors = torch.randn_like(out)
    ((out * factors).sum() + l_aux).backward()
    ((want * factors.reshape(-1, HIDDEN)).sum() + l_want).backward()
    torch.testing.assert_close(mine.grad, x.grad, **close)
    torch.testing.assert_close(ours.gate.wg.weight.grad, theirs.wg.weight.grad, **close)
    for n, p in ours.experts.stacked.named_parameters():
        grads = [dict(e.named_parameters())[n].grad for e in theirs.experts]
        wanted = torch.stack([torch.zeros_like(p[0]) if g is None else g for g in grads])
        torch.testing.assert_close(p.grad, wanted, msg=lambda m, n=n: f"{n}: {m}", **close)


@pytest.mark.parametrize("name", list(EXPERTS))
def test_every_kind_of_expert(name: str) -> None:
    """No dropping: the buffers of the plain layer hold rows of zeros else, which a module that
    mixes rows sees.
    """
    ours, theirs = _pair(name, drop_tokens=False)
    assert ours.experts.way == EXPERTS[name][1]
    x = _tokens(37)
    if name == "mixing":  # zeros in the buffers are no tokens
        out, *_ = ours(x)
        gates = theirs.wg(x).softmax(1)
        for e in range(4):
            rows = gates.argmax(1) == e
            want = theirs.experts[e](x[rows]) * gates[rows, e, None]
            torch.testing.assert_close(out[rows], want)
        return
    _compare(ours, theirs, x)


@pytest.mark.fast_cases("True-2", "False-1", "False-4")
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("drop", [True, False])
def test_the_layer_is_the_plain_one(k: int, drop: bool) -> None:
    for factor, least in itertools.product((0.5, 1.0, 3.0), (1, 4)):
        ours, theirs = _pair(
            num=5, k=k, drop_tokens=drop, capacity_factor=factor, min_capacity=least
        )
        _compare(ours, theirs, _tokens(3, 11))
        ours.eval(), theirs.eval()
        _compare(ours, theirs, _tokens(3, 11))


def test_residual_and_unused_tokens() -> None:
    _compare(*_pair(use_residual=True, k=2), _tokens(5, 7))
    ours, theirs = _pair()
    used = (torch.arange(33) % 4 != 0).double().view(3, 11)
    _compare(ours, theirs, _tokens(3, 11), used)
    assert not ours(_tokens(3, 11), used)[0][used == 0].any()


def test_tokens_of_one_expert_and_no_tokens() -> None:
    """Experts without a token get gradients of zeros, as in the plain layer."""
    ours, theirs = _pair(drop_tokens=False)
    with torch.no_grad():
        for gate in (ours.gate.wg, theirs.wg):
            gate.weight.zero_()
            gate.weight[2] = 1.0
    x = _tokens(9).detach().abs().requires_grad_()
    _compare(ours, theirs, x)
    out, l_aux, counts = ours(_tokens(0))
    (out.sum() + l_aux).backward()
    assert out.shape == (0, HIDDEN)
    assert counts.tolist() == [0, 0, 0, 0]


def test_frozen_experts_and_a_single_one() -> None:
    ours, _ = _pair()
    ours.experts.requires_grad_(False)
    out, *_ = ours(_tokens(20))
    out.sum().backward()
    assert all(p.grad is None for p in ours.experts.parameters())
    assert ours.gate.wg.weight.grad is not None
    _compare(*_pair(num=1), _tokens(12))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: _mlp(nn.ReLU()), FFN("0", "3", "relu")),
        (lambda: _mlp(nn.GELU("tanh")), FFN("0", "3", "gelu_tanh")),
        (lambda: _mlp(nn.SiLU(inplace=True)), FFN("0", "3", "silu")),
        (lambda: _mlp(nn.Tanh()), None),
        (Gated, FFN("w3", "w2", "silu", "w1")),
        (Branching, None),
        (Normed, None),
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 6)), None),
        (lambda: nn.Linear(6, 6), None),
    ],
)
def test_what_is_known_of_an_expert(make: Any, what: FFN | None) -> None:
    assert match(make()) == what


def test_dropout_in_an_expert_is_dropout() -> None:
    expert = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 6))
    ours = Experts(expert, 2, 6)
    assert ours.way == "grouped"
    rows = torch.randn(9, 6)
    groups = Groups(torch.tensor([5, 4]))
    assert not torch.equal(ours(rows, groups), ours(rows, groups))
    ours.eval()
    torch.testing.assert_close(ours(rows, groups), expert.eval()(rows))


def test_dispatch_by_hand() -> None:
    """Dropped choices add nothing, weights act before or after, and all gradients are right."""
    torch.manual_seed(0)
    experts = torch.tensor([[0, 2], [1, -1], [-1, -1], [2, 0], [2, 1]])
    x = torch.randn(5, 3, dtype=torch.float64)
    w = torch.rand(5, 2, dtype=torch.float64)
    factors = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)

    def run(rows: Tensor, groups: Groups) -> Tensor:
        return rows.square() * factors[groups.expert_of_row, None]

    shares = torch.zeros(5, 3, dtype=torch.float64).scatter_add(
        1, experts.clamp(min=0), w * (experts >= 0)
    )
    after = (shares @ factors)[:, None] * x.square()
    torch.testing.assert_close(dispatch(x, experts, w, run, num_experts=3), after)
    squares = torch.zeros(5, 3, dtype=torch.float64).scatter_add(
        1, experts.clamp(min=0), w.square() * (experts >= 0)
    )
    before = (squares @ factors)[:, None] * x.square()
    torch.testing.assert_close(dispatch(x, experts, w, run, num_experts=3, weigh="before"), before)
    for weigh in ("after", "before"):
        assert torch.autograd.gradcheck(
            lambda x, w, weigh=weigh: dispatch(x, experts, w, run, num_experts=3, weigh=weigh),
            (x.requires_grad_(), w.requires_grad_()),
        )


def test_wrong_arguments() -> None:
    with pytest.raises(UsageError, match="ep_size 3 does not divide num_experts 4; use 1, 2, 4"):
        MoE(HIDDEN, _mlp(), 4, 3)
    with pytest.raises(
        UsageError, match="has 1/2 of 4 experts; give the model to ds_core.initialize"
    ):
        MoE(HIDDEN, _mlp(), 4, 2)(torch.randn(8, HIDDEN))
    with pytest.raises(UsageError, match=r"has shape \(0,\), so its values are not here"):
        MoE(HIDDEN, nn.Sequential(nn.Linear(6, 6), nn.PReLU(0)), 4)


def test_memory_is_linear_in_tokens() -> None:
    """What is kept for backward, per token, does not grow with tokens or experts."""
    kept: dict[tuple[int, int], float] = {}
    for tokens, num in ((256, 4), (1024, 4), (1024, 16)):
        layer = MoE(HIDDEN, _mlp(), num, drop_tokens=False)
        total = 0
        weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}

        def pack(t: Tensor, weights: set[int] = weights) -> Tensor:
            nonlocal total
            total += (
                0 if t.untyped_storage().data_ptr() in weights else t.numel() * t.element_size()
            )
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            layer(torch.randn(tokens, HIDDEN, requires_grad=True))
        kept[tokens, num] = total / tokens
    assert kept[1024, 4] <= kept[256, 4] * 1.02
    # a few [tokens, experts] tensors of the gate
    assert kept[1024, 16] <= kept[1024, 4] + 12 * 4 * 6


def test_tutel_is_told_to_have_no_effect() -> None:
    with pytest.warns(UserWarning, match="use_tutel has no effect"):
        MoE(HIDDEN, _mlp(), 2, use_tutel=True)


class Between(nn.Module):
    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 4)
        self.moe = MoE(4, nn.Linear(4, 4), 4, ep_size, drop_tokens=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.moe(self.inp(x))[0]
        return out


def copies(stage: int) -> None:
    import ds_core
    from ds_core import comm

    ds_core.init_distributed()
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    engine = ds_core.initialize(model=Between(comm.world_size()), config=config)[0]
    x = torch.randn(8, 4)
    copied = copy.deepcopy(engine.module)
    assert torch.equal(copied(x), engine(x))
    engine.backward(engine(x).square().mean())
    engine.step()
    assert not torch.equal(copied(x), engine(x))
    engine.destroy()


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (0, 2), (3, 2)])
def test_copies_of_a_layer_in_an_engine_run(stage: int, ranks: int) -> None:
    run_ranks(ranks, copies, stage)


def test_experts_may_give_another_dtype_than_they_are_given() -> None:
    """As under autocast: tokens and weights stay in fp32, what linear layers give is in bf16."""
    torch.manual_seed(0)
    layer = MoE(4, nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), 2, drop_tokens=False)
    tokens = torch.randn(5, 4, requires_grad=True)
    wanted = layer(tokens)[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(tokens)[0]
    found.float().square().sum().backward()
    assert tokens.grad is not None
    torch.testing.assert_close(found.float(), wanted, rtol=0.05, atol=0.05)
