"""The engine over ranks: reductions, interrupted batches, and what no rank may do alone."""

from __future__ import annotations

import pytest
import torch
from ds_testing import run_ranks
from ds_testing.truth import difference, plain
from tiny_engine import Squares, data, initialized, model
from torch import nn

from ds_core.errors import DSError

pytestmark = pytest.mark.usefixtures("clean_ds")


# -- over ranks ------------------------------------------------------------------------------------


def _multi(how):
    from ds_core import comm

    rank = comm.rank()
    world = comm.world_size()
    engine, *_ = initialized(net=model(rank, torch.float64))
    xs = [data(4, seed=10 + r, dtype=torch.float64) for r in range(world)]
    for i in range(0, 4, 2):
        x, y = xs[rank][i : i + 2]
        losses = [engine(x).square().mean(), engine(y).square().mean()]
        if how == "two backwards":
            engine.backward(losses[0])
            engine.backward(losses[1])
        elif how == "two plain backwards":
            losses[0].backward()
            losses[1].backward()
        elif how == "no_sync":
            with engine.no_sync():
                engine.backward(losses[0])
            engine.backward(losses[1])
        elif how == "coalesce":
            with engine.coalesce_grad_reduction():
                engine.backward(losses[0])
                engine.backward(losses[1])
        engine.step()
    net = model(0, torch.float64)
    # Two backwards add up; only ranks are averaged.
    plain(
        net,
        lambda step, r: xs[r][2 * step : 2 * step + 2],
        2,
        count=world,
        loss=lambda net, pair: sum(net(x).square().mean() for x in pair),
    )
    return difference(net, engine.module)


@pytest.mark.parametrize("how", ["two backwards", "two plain backwards", "no_sync", "coalesce"])
def test_several_backwards_before_one_step(how):
    assert max(run_ranks(2, _multi, how)) < 1e-12


def _unfreeze():
    from ds_core import comm

    rank = comm.rank()
    world = comm.world_size()
    net = model(0, torch.float64)
    net[0].weight.requires_grad_(False)
    engine, *_ = initialized(net=net, model_parameters=list(net.parameters()))
    truth = model(0, torch.float64)
    truth[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(truth.parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            net[0].weight.requires_grad_(True)
            truth[0].weight.requires_grad_(True)
        xs = [data(4, seed=20 + r, dtype=torch.float64)[step] for r in range(world)]
        engine.backward(engine(xs[rank]).square().mean())
        engine.step()
        for x in xs:
            (truth(x).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return difference(truth, net)


def test_parameters_may_be_unfrozen_while_training():
    assert max(run_ranks(2, _unfreeze)) < 1e-12


def _sum_op():
    from ds_core import comm

    engine, *_ = initialized({"gradient_allreduce_op": "sum"}, net=model(0, torch.float64))
    xs = [data(1, seed=30 + r, dtype=torch.float64)[0] for r in range(comm.world_size())]
    engine.backward(engine(xs[comm.rank()]).square().mean())
    engine.step()
    truth = model(0, torch.float64)
    for x in xs:
        truth(x).square().mean().backward()
    torch.optim.SGD(truth.parameters(), lr=0.1).step()
    return difference(truth, engine.module)


def test_gradients_may_be_summed_instead_of_averaged():
    assert max(run_ranks(2, _sum_op)) < 1e-12


def test_gradients_travel_in_the_wire_dtype():
    answers = run_ranks(2, _wire_error)
    assert max(answers) > 1e-9
    assert max(answers) < 1e-2


def _wire_error():
    from ds_core import comm

    grads = []
    for dtype in ("bf16", "fp32"):
        engine, *_ = initialized({"communication_data_type": dtype})
        engine.backward(engine(data(1, seed=comm.rank())[0]).square().mean())
        grads.append(engine.module[0].weight.grad.clone())
        engine.destroy()
    return float((grads[0] - grads[1]).abs().max())


def _disagree(what):
    import os

    from ds_core import comm

    config = {"steps_per_print": 1 + comm.rank()} if what == "config" else {}
    if what == "secret":
        os.environ["X"] = "1"
    try:
        initialized(config)
    except DSError as error:
        return str(error)
    return ""


def test_ranks_with_different_configs_all_stop_and_name_the_key():
    for message in run_ranks(2, _disagree, "config"):
        assert "config.steps_per_print" in message
        assert "1" in message
        assert "2" in message


def _interrupted():
    """A forward that fails on every rank alike; training goes on as if that batch had not been."""
    from ds_core import comm

    net = Squares().double()
    engine, *_ = initialized({"gradient_accumulation_steps": 2}, net=net)
    xs = data(4, seed=comm.rank(), dtype=torch.float64)
    with pytest.raises(RuntimeError, match="shape"):
        engine.train_batch(iter([xs[0], torch.ones(2, 9, dtype=torch.float64)]))
    engine.train_batch(iter(xs[:2]))
    loss = engine(xs[2])
    loss.register_hook(lambda g: (_ for _ in ()).throw(ValueError("stop")))
    with pytest.raises(ValueError, match="stop"):
        engine.backward(loss)
    engine.zero_grad()
    engine.train_batch(iter(xs[2:]))
    truth = Squares().double()
    optimizer = torch.optim.SGD(truth.parameters(), lr=0.1)
    world = comm.world_size()
    for pair in range(2):
        for rank in range(world):
            for x in data(4, seed=rank, dtype=torch.float64)[2 * pair : 2 * pair + 2]:
                (truth(x) / 2 / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return difference(truth, net)


@pytest.mark.parametrize("world", [1, 2])
def test_an_interrupted_batch_leaves_nothing_behind(world):
    assert max(run_ranks(world, _interrupted)) < 1e-12


# -- what a review found ---------------------------------------------------------------------------


class _Shared(nn.Module):
    """One block used twice under re-entrant recomputation: its hooks fire for each use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(4, 4).double()
        self.block = nn.Linear(4, 4).double()

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        h = self.inp(x)
        for _ in range(2):
            h = torch.tanh(checkpoint(self.block, h, use_reentrant=True))
        return h.square().mean()


def _reentrant(direct, limit):
    from ds_core import comm
    from ds_core.gradients import buckets

    old, buckets.BUCKET_BYTES = buckets.BUCKET_BYTES, limit
    try:
        engine, *_ = initialized(net=_Shared())
        truth = _Shared()
        optimizer = torch.optim.SGD(truth.parameters(), lr=0.1)
        for step in range(3):
            xs = [data(3, seed=50 + r, dtype=torch.float64)[step] for r in range(comm.world_size())]
            loss = engine(xs[comm.rank()])
            loss.backward() if direct else engine.backward(loss)
            engine.step()
            for x in xs:
                (truth(x) / len(xs)).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        buckets.BUCKET_BYTES = old
    pairs = zip(truth.parameters(), engine.module.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


@pytest.mark.parametrize("limit", [1, 10**9])
@pytest.mark.parametrize("direct", [False, True])
def test_a_shared_block_under_reentrant_recomputation(direct, limit):
    assert max(run_ranks(2, _reentrant, direct, limit)) < 1e-12


def _channels_last(folder):
    from ds_core import comm

    def net():
        torch.manual_seed(0)
        return nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)

    def images(step, rank):
        generator = torch.Generator().manual_seed(10 * step + rank)
        return torch.randn(1, 3, 5, 5, dtype=torch.float64, generator=generator)

    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    engine, *_ = initialized(adam, net=net())
    truth = net()
    optimizer = torch.optim.AdamW(truth.parameters(), lr=0.01, weight_decay=0.0)
    for step in range(4):
        if step == 2:  # and through a checkpoint
            engine.save_checkpoint(folder)
            engine, *_ = initialized(adam, net=net())
            engine.load_checkpoint(folder)
        engine.backward(engine(images(step, comm.rank())).square().mean())
        engine.step()
        for rank in range(comm.world_size()):
            (truth(images(step, rank)).square().mean() / comm.world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(truth.parameters(), engine.module.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


@pytest.mark.parametrize("world", [1, 2])
def test_strides_of_parameters_are_kept(world, tmp_path):
    assert max(run_ranks(world, _channels_last, str(tmp_path))) < 1e-12


def _broken_plain_backward():
    from ds_core import comm

    net = Squares().double()
    engine, *_ = initialized(net=net)
    xs = data(3, seed=comm.rank(), dtype=torch.float64)
    loss = engine(xs[0])
    net.net[0].bias.register_hook(
        lambda g: (_ for _ in ()).throw(ValueError("stop")) if engine.global_steps == 0 else g
    )
    with pytest.raises(ValueError, match="stop"):
        loss.backward()
    engine.zero_grad()
    engine.global_steps = 1
    engine(xs[1]).backward()
    engine.step()
    truth = Squares().double()
    for rank in range(comm.world_size()):
        (truth(data(3, seed=rank, dtype=torch.float64)[1]) / comm.world_size()).backward()
    torch.optim.SGD(truth.parameters(), lr=0.1).step()
    return difference(truth, net)


def test_a_plain_backward_that_broke_off_leaves_nothing_behind():
    assert max(run_ranks(2, _broken_plain_backward)) < 1e-12


# -- process groups --------------------------------------------------------------------------------


def groups() -> int:
    """How many process groups torch keeps for this process; no public call counts them."""
    return len(torch.distributed.distributed_c10d._world.pg_map)


def _groups_of_engines() -> list[int]:
    found = [groups()]
    for section in (
        {},
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
        {"sequence_parallel_size": 2, "zero_optimization": {"stage": 1}},
    ):
        engine, *_ = initialized(section, net=Squares())
        engine.destroy()
        found.append(groups())
    # Two engines agree on each backward over a group that neither of them owns.
    first, *_ = initialized(net=model(0, torch.float64))
    second, *_ = initialized(net=model(1, torch.float64))
    x = data(1, dtype=torch.float64)[0]
    first.destroy()
    second.backward(second(x).square().mean())
    second.step()
    second.destroy()
    return [*found, groups()]


def test_destroyed_engines_leave_no_process_groups() -> None:
    for found in run_ranks(4, _groups_of_engines):
        assert found == [1] * 5
