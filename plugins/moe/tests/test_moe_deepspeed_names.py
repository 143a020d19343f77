"""Names of `deepspeed.moe` that layers of a script's own use: gating as dense tensors, and exchange
of tokens.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ds_moe import deepspeed_names as names
from ds_moe.utils import split_params_grads_into_shared_and_expert_params
from ds_testing import run_ranks
from torch import Tensor, nn

from ds_core import comm
from ds_core.errors import UsageError

LOGITS = torch.tensor([[4.0, 1, 0], [3, 2, 0], [5, 0, 1], [0, 1, 4], [6, 3, 0], [2, 1, 0]])


def by_hand(experts: list[list[int]], capacity: int, weights: Tensor, order: str) -> Tensor:
    """Combine weights: each expert's places are taken one after the other, what finds none is
    dropped.
    """
    combine = torch.zeros(len(experts), 3, capacity)
    taken = [0, 0, 0]
    k = len(experts[0])
    places = [(t, c) for t in range(len(experts)) for c in range(k)]
    for token, choice in sorted(places, key=(lambda p: p[::-1]) if order == "choice" else None):
        expert = experts[token][choice]
        if taken[expert] < capacity:
            combine[token, expert, taken[expert]] = weights[token, expert]
        taken[expert] += 1
    return combine


def test_top1_drops_what_comes_too_late() -> None:
    loss, combine, mask, counts = names.top1gating(LOGITS, 1.0, 0, use_rts=False)
    gates = LOGITS.softmax(1)
    wanted = by_hand([[0], [0], [0], [2], [0], [0]], 2, gates, "token")
    assert torch.allclose(combine, wanted) and torch.equal(mask, wanted > 0)
    assert counts.tolist() == [5, 0, 1]
    share = torch.tensor([5, 0, 1]) / 6
    assert torch.allclose(loss, 3 * (gates.mean(0) * share).sum())


def test_top2_gives_first_choices_the_first_places() -> None:
    _, combine, _, counts = names.top2gating(LOGITS, 0.75, 0, top2_2nd_expert_sampling=False)
    chosen = LOGITS.topk(2, 1).indices.tolist()
    capacity = 3  # ceil(6 / 3 * 1.5)
    kept = by_hand(chosen, capacity, LOGITS.softmax(1), "choice")
    assert torch.allclose(combine, kept / kept.sum((1, 2), keepdim=True).clamp(min=1e-9))
    assert counts.tolist() == [5, 5, 2]


def test_topk_without_dropping_and_sparse() -> None:
    _, combine, mask, counts = names.topkgating(LOGITS, 2, 1.0, 0, drop_tokens=False)
    assert combine.shape == (6, 3, int(counts.max()))
    assert torch.allclose(combine.sum((1, 2)), torch.ones(6)) and int(mask.sum()) == 12
    _, capacity, experts, indices, places, weights, _ = names.topkgating(
        LOGITS, 2, 0.5, 0, sparse_routes=True
    )
    _, dense, _, _ = names.topkgating(LOGITS, 2, 0.5, 0)
    again = torch.zeros(6, experts, capacity)
    for choice in range(2):
        for token in range(6):
            if indices[choice, token] >= 0:
                again[token, indices[choice, token], places[choice, token]] = weights[choice, token]
    assert torch.equal(again, dense) and bool((indices < 0).any())


def test_gates_reach_the_router() -> None:
    logits = LOGITS.clone().requires_grad_()
    _, combine, mask, _ = names.topkgating(logits, 2, 1.0, 1)
    tokens = torch.randn(6, 4)
    out = names.einsum("sec,ecm->sm", combine, names.einsum("sec,sm->ecm", mask.float(), tokens))
    out.sum().backward()
    assert logits.grad is not None and bool((logits.grad != 0).any())
    with pytest.raises(UsageError, match="fewer than min_capacity 8"):
        names.top1gating(LOGITS, 1.0, 8)
    assert names._capacity(LOGITS, torch.tensor(1.5), torch.tensor(1)) == 3


def test_experts_gradients_are_told_apart() -> None:
    params = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    params[1].allreduce = False  # type: ignore[attr-defined]
    for number, param in enumerate(params[:2]):
        param.grad = torch.full((1,), float(number))
    shared, experts = split_params_grads_into_shared_and_expert_params(params)
    assert [g.item() for g in shared] == [0] and [g.item() for g in experts] == [1]


class TensorParallel:
    """The mesh of an engine whose layers are divided over all ranks."""

    def has(self, axis: str) -> bool:
        return axis == "tp"

    def size(self, axis: str) -> int:
        return comm.world_size()

    def group(self, *axes: str) -> Any:
        return dist.group.WORLD


def exchange() -> dict[str, Any]:
    rank = comm.rank()
    x = (torch.arange(4.0) + 10 * rank).view(2, 2).requires_grad_()
    out = names._AllToAll.apply(None, x)
    (out * (rank + 1)).sum().backward()
    assert x.grad is not None
    found = {
        "out": out.tolist(),
        "grad": x.grad.tolist(),
        "same": names.gather_tokens(names.drop_tokens(x)) is x,
    }
    with pytest.MonkeyPatch.context() as patch:
        engine = SimpleNamespace(ctx=SimpleNamespace(mesh=TensorParallel()))
        patch.setattr(names, "STATE", SimpleNamespace(engines=[engine]))
        whole = torch.arange(8.0).view(2, 4).requires_grad_()
        part = names.drop_tokens(whole, dim=1)
        again = names.gather_tokens(part * part, dim=1)
        again.sum().backward()
    assert whole.grad is not None
    return {**found, "part": part.tolist(), "again": again.tolist(), "whole": whole.grad.tolist()}


def test_tokens_go_to_their_ranks_and_gradients_back() -> None:
    first, second = run_ranks(2, exchange)
    assert first["out"] == [[0, 1], [10, 11]] and second["out"] == [[2, 3], [12, 13]]
    assert first["grad"] == [[1, 1], [2, 2]]
    assert first["same"]  # there is no tensor parallelism without an engine
    assert first["part"] == [[0, 1], [4, 5]] and second["part"] == [[2, 3], [6, 7]]
    assert first["again"] == second["again"] == [[0, 1, 4, 9], [16, 25, 36, 49]]
    assert first["whole"] == second["whole"] == [[0, 2, 4, 6], [8, 10, 12, 14]]
