"""Which tensors are gathered under `ds_zero.Init` is the same on all ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable

import ds_zero
import pytest
import torch
from ds_testing import run_ranks
from ds_zero.init.sharded_param import untracked
from torch import Tensor, nn

from ds_core.errors import UsageError
from plugins.zero.tests.init_models import D, config


class Restless(nn.Module):
    """Its children are written to again and again, so each empty tensor that stands in for them is
    soon replaced.
    """

    def __init__(self, looked: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(D, D) for _ in range(3)])
        for _ in range(2):
            for layer in self.layers:
                looked(self)
                nn.init.normal_(layer.weight)
        looked(self)


@untracked
def addresses(module: nn.Module) -> set[int]:
    """Where the storages are that the partitioned parameters have now."""
    return {p.untyped_storage()._cdata for p in module.parameters() if ds_zero.is_zero_param(p)}


@untracked
def empty_at(places: set[int], limit: int = 20_000) -> Tensor:
    """A fresh empty tensor whose storage has one of these addresses; torch hands memory that is
    free out again.
    """
    tried = []
    while (tensor := torch.empty(0)).untyped_storage()._cdata not in places:
        tried.append(tensor)  # or the next one would get the same place
        assert len(tried) < limit, (
            "torch uses none of these places again: this test needs another way"
        )
    return tensor


def check_reused_addresses() -> None:
    """What transformers does with ``torch.tensor([]).device``, where chance gives it a place that
    was a weight's.
    """
    from ds_zero.init.sharded_param import ShardedParam

    from ds_core import comm

    def alone(self: ShardedParam) -> Tensor:
        raise AssertionError(f"init.{self.serial} is gathered for a stranger, on one rank only")

    gather = ShardedParam.gather
    seen = set[int]()
    torch.manual_seed(0)
    plain = Restless(lambda module: None)
    with ds_zero.Init():
        torch.manual_seed(0)
        model = Restless(lambda module: seen.update(addresses(module)))
        if comm.rank() == 1:  # and nothing of the kind on the other
            stranger = empty_at(seen - addresses(model))
            ShardedParam.gather = alone  # type: ignore[method-assign]
            try:
                assert stranger.sum().item() == 0.0
            finally:
                ShardedParam.gather = gather  # type: ignore[method-assign]
            assert stranger.shape == (0,)
        nn.init.ones_(model.layers[0].weight)  # the ranks are still in step
    nn.init.ones_(plain.layers[0].weight)
    with ds_zero.GatheredParameters(model):
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_an_address_that_was_a_weights_means_nothing() -> None:
    run_ranks(2, check_reused_addresses)


def check_garbage() -> None:
    """A tensor that torch did not tell of is gathered, whether or not a rank has collected the
    parameter already.
    """
    from ds_core import comm

    torch.manual_seed(0)
    truth = nn.Linear(D, D).weight.detach().clone()
    torch.manual_seed(0)
    with ds_zero.Init():
        held = [nn.Linear(D, D)]
    gc.disable()
    try:
        held.append(held)  # type: ignore[arg-type]
        alias = nn.Parameter(held[0].weight)
        assert alias.shape == (0,)
        del held
        if comm.rank() == 1:
            gc.collect()
        with ds_zero.Init():
            assert torch.equal(alias, truth)
    finally:
        gc.enable()


def test_no_garbage_collector_decides_what_is_gathered() -> None:
    run_ranks(2, check_garbage)


def test_a_tensor_made_of_a_weight_that_an_engine_has_taken_says_so() -> None:
    import ds_core

    with ds_zero.Init():
        model = nn.Linear(D, D)
    name = model.weight.ds_id
    alias = nn.Parameter(model.weight)
    engine, *_ = ds_core.initialize(model=model, config=config())
    with ds_zero.Init():
        assert alias.requires_grad
        with pytest.raises(
            UsageError, match=rf"made of parameter '{name}' of shape \(6, 6\).*GatheredParameters"
        ):
            alias.sum()
    engine.destroy()
