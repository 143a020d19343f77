"""Gating against the plainly written masks, capacities against golden values, and what each option
changes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from ds_moe.gating import Routing, TopKGate, capacity_of, top1, top2, topk
from moe_reference import masks_top1, masks_top2, masks_topk

from ds_core.errors import UsageError

CAPACITIES = [None, 1, 2, 5, 100]


def _logits(tokens: int = 23, experts: int = 5, seed: int = 0) -> torch.Tensor:
    values = torch.randn(
        tokens, experts, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    values[:, 0] += 0.8  # one expert that is liked more than the others
    return values.requires_grad_()


def _same(
    routing: Routing, combine: torch.Tensor, l_aux: torch.Tensor, counts: torch.Tensor, logits: Any
) -> None:
    """Weights per token and expert, loss, counts and gradients are the masks'."""
    shares = torch.zeros_like(logits).scatter_add(
        1, routing.experts.clamp(min=0), routing.weights * (routing.experts >= 0)
    )
    torch.testing.assert_close(shares, combine.sum(2), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(routing.l_aux, l_aux, rtol=1e-12, atol=0)
    assert routing.counts.tolist() == counts.tolist()
    kept = (combine.detach() != 0).sum()
    assert int(routing.counts.sum() - routing.dropped()) == int(kept)
    factors = torch.randn_like(shares)
    ours = torch.autograd.grad((shares * factors).sum() + routing.l_aux, logits, retain_graph=True)[
        0
    ]
    theirs = torch.autograd.grad((combine.sum(2) * factors).sum() + l_aux, logits)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("tokens", "experts", "factor", "least", "answer"),
    [
        (10, 4, 1.0, 4, 4),
        (100, 4, 1.0, 4, 25),
        (100, 8, 1.25, 4, 16),
        (7, 4, 1.0, 1, 2),
        (7, 4, 1.0, 4, 4),
    ],
)
def test_capacity_golden_values(
    tokens: int, experts: int, factor: float, least: int, answer: int
) -> None:
    assert capacity_of(tokens, experts, factor, least) == answer


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("extra", ["plain", "random", "noise", "used"])
def test_top1_is_the_masks(capacity: int | None, extra: str) -> None:
    logits = _logits()
    given: dict[str, Any] = {
        "plain": {},
        "random": {"priority": torch.rand(23, generator=torch.Generator().manual_seed(1))},
        "noise": {"gumbel": 2 * torch.randn(23, 5, dtype=torch.float64)},
        "used": {"used": (torch.arange(23) % 3 != 0).double()},
    }[extra]
    _same(top1(logits, capacity, **given), *masks_top1(logits, capacity, **given), logits)


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("noisy", [False, True])
def test_top2_is_the_masks(capacity: int | None, noisy: bool) -> None:
    logits = _logits()
    gumbel = 2 * torch.randn(23, 5, dtype=torch.float64) if noisy else None
    _same(top2(logits, capacity, gumbel=gumbel), *masks_top2(logits, capacity, gumbel), logits)


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("k", [3, 4])
def test_topk_is_the_masks(k: int, capacity: int | None, policy: str) -> None:
    logits = _logits()
    _same(
        topk(logits, k, capacity, policy=policy), *masks_topk(logits, k, capacity, policy), logits
    )


def test_no_tokens_at_all() -> None:
    logits = _logits(0)
    for routing in (top1(logits, None), top2(logits, None), topk(logits, 3, 4)):
        assert routing.l_aux.item() == 0
        assert routing.counts.tolist() == [0] * 5
        routing.l_aux.backward()  # the graph is there all the same


def test_each_argument_of_the_gate_does_something() -> None:
    """Two gates that differ in one argument route differently, in the mode the argument is for."""
    x = torch.randn(64, 8)

    def route(training: bool = True, seed: int = 1, scale: float = 1.0, **options: Any) -> Routing:
        torch.manual_seed(0)
        gate = TopKGate(8, 4, **options).train(training)
        with torch.no_grad():
            gate.wg.weight[0] += 0.3
            gate.wg.weight *= scale
        torch.manual_seed(seed)
        return gate(x)

    def differ(a: Routing, b: Routing) -> bool:
        return not (torch.equal(a.experts, b.experts) and torch.equal(a.weights, b.weights))

    plain = {"use_rts": False}
    assert differ(route(**plain), route(**plain, capacity_factor=2.0))
    assert not differ(route(**plain), route(**plain, eval_capacity_factor=2.0))
    assert differ(route(False, **plain), route(False, **plain, eval_capacity_factor=2.0))
    assert differ(route(**plain), route(**plain, min_capacity=30))
    assert route(drop_tokens=False).dropped() == 0 < route(**plain).dropped()
    assert differ(route(seed=1), route(seed=2))  # use_rts
    assert not differ(route(seed=1, **plain), route(seed=2, **plain))
    for noise in ("RSample", "Jitter"):
        noisy = {"drop_tokens": False, "noisy_gate_policy": noise}
        assert differ(route(seed=1, **noisy), route(seed=2, **noisy)), noise
        assert not differ(route(False, 1, **noisy), route(False, 2, **noisy)), noise
    assert not differ(route(noisy_gate_policy="None", **plain), route(**plain))
    both = {"k": 2, "drop_tokens": False}
    assert differ(route(seed=1, **both), route(seed=2, **both))
    quiet = {**both, "top2_2nd_expert_sampling": False}
    assert not differ(route(seed=1, **quiet), route(seed=2, **quiet))
    assert differ(route(k=3), route(k=3, drop_policy="position"))


def test_the_gate_computes_in_fp32() -> None:
    gate = TopKGate(8, 4, use_rts=False).bfloat16()
    x = torch.randn(16, 8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = gate(x)
    wanted = (x.float() @ gate.wg.weight.float().t()).softmax(1)
    assert routing.weights.dtype == torch.float32
    torch.testing.assert_close(routing.weights[:, 0], wanted.max(1).values)
    assert TopKGate(8, 4).double()(x.double()).weights.dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"noisy_gate_policy": "loud"},
            "noisy_gate_policy 'loud' is unknown; use 'Jitter', 'RSample' or None",
        ),
        ({"k": 5}, "k is 5, and there are 4 experts; use 1 to 4"),
        ({"drop_policy": "luck"}, "drop_policy 'luck' is unknown; use 'probs' or 'position'"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TopKGate(8, 4, **options)


def test_errors_while_routing() -> None:
    with pytest.raises(UsageError, match="got 3 tokens, fewer than min_capacity 4"):
        TopKGate(8, 4)(torch.randn(3, 8))
    assert TopKGate(8, 4, drop_tokens=False)(torch.randn(3, 8)).experts.shape == (3, 1)
    with pytest.raises(UsageError, match="used_token is for top-1 gating, and this layer has k=2"):
        TopKGate(8, 4, k=2)(torch.randn(3, 8), torch.ones(3))
    with pytest.raises(UsageError, match="drop_policy 'luck' is unknown"):
        topk(_logits(), 3, None, policy="luck")
    with pytest.raises(UsageError, match="at least 3 experts, not 2"):
        topk(_logits(4, 2), 3, None)
    with pytest.raises(UsageError, match="at least 2 experts, not 1"):
        top2(_logits(4, 1), None)
