"""The core's own partitioner and runner pass the kits that everybody's must pass."""

from __future__ import annotations

import pytest
from ds_testing import run_ranks
from ds_testing.kits.parallel.runner import RunnerConformance
from ds_testing.kits.train.partitioner import PartitionerConformance
from ds_testing.models import complex_run


class TestReplicated(PartitionerConformance):
    pass


class TestSequential(RunnerConformance):
    pass


@pytest.mark.parametrize("world", [1, 2])
def test_complex_parameters(world):
    for error in run_ranks(world, complex_run, {}):
        assert error < 1e-5


def _bucketed(limit):
    """Tiny buckets, so that many reductions overlap with backward."""
    from ds_testing.kits.train.partitioner import _train_and_compare

    from ds_core.gradients import buckets

    old = buckets.BUCKET_BYTES
    launched = []
    launch = buckets.Bucket.launch

    def counting(self, grads):
        launched.append(len(self.params))
        launch(self, grads)

    buckets.BUCKET_BYTES = limit
    buckets.Bucket.launch = counting
    try:
        report = _train_and_compare({"model": "plain", "gas": 2}, {}, [], "manual")
    finally:
        buckets.BUCKET_BYTES = old
        buckets.Bucket.launch = launch
    return [max(report.values()), len(launched)]


@pytest.mark.parametrize(("limit", "per_step"), [(1, 6), (10**9, 1)])
def test_one_reduction_per_bucket_and_boundary(limit, per_step):
    for error, launches in run_ranks(2, _bucketed, limit):
        assert error < 1e-12
        # four steps of two micro-batches: reduced at boundaries only
        assert launches == 4 * per_step


def _overlap():
    """How many buckets are on their way before backward has ended."""
    import torch
    from torch import nn

    import ds_core
    from ds_core.gradients import buckets

    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(engine.partitioner._next)
            return grad

    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    old, buckets.BUCKET_BYTES = buckets.BUCKET_BYTES, 1
    try:
        engine, *_ = ds_core.initialize(
            model=net,
            config={"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
        )
        x = torch.randn(1, 8, requires_grad=True)
        engine.backward(engine(Spy.apply(x)).sum())
    finally:
        buckets.BUCKET_BYTES = old
    return seen


def test_reduction_overlaps_with_backward():
    for (launched,) in run_ranks(2, _overlap):
        assert launched >= 6  # of 8 buckets, when backward reaches the first layer's input


def _buffers():
    import torch

    import ds_core
    from ds_core import comm

    net = torch.nn.BatchNorm1d(3)
    net.running_mean.fill_(comm.rank() + 1.0)
    net.weight.data.fill_(comm.rank() + 5.0)
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    ds_core.initialize(model=net, config=config)
    return [net.running_mean.tolist(), net.weight.tolist()]


def test_weights_and_buffers_are_those_of_rank_0_at_the_start():
    assert run_ranks(2, _buffers) == [[[1.0] * 3, [5.0] * 3]] * 2


def _sparse():
    import torch
    from torch import nn

    import ds_core
    from ds_core import comm

    errors = []
    for sparse in (True, False):
        torch.manual_seed(0)
        net = nn.Embedding(10, 4, sparse=sparse).double()
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        }
        engine, *_ = ds_core.initialize(model=net, config=config)
        for step in range(2):
            engine.backward(engine(torch.tensor([step, comm.rank() + 3])).square().sum())
            engine.step()
        errors.append(net.weight.detach())
    return float((errors[0] - errors[1]).abs().max())


@pytest.mark.parametrize("world", [1, 2])
def test_sparse_embedding_gradients_train_as_dense_ones(world):
    assert max(run_ranks(world, _sparse)) == 0


def test_the_norm_takes_mixed_dtypes():
    import torch

    from ds_core.partition import squared_norm

    tensors = [torch.ones(3, dtype=d) for d in (torch.float64, torch.float32, torch.bfloat16)]
    assert squared_norm(tensors).item() == pytest.approx(9)
    assert squared_norm(tensors).dtype == torch.float64
    assert squared_norm(tensors[1:]).dtype == torch.float32
    assert squared_norm([]).item() == 0
