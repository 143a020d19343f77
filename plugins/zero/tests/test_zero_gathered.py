"""Partitioned weights read and written: GatheredParameters, and generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ds_zero
import pytest
import torch
from ds_testing import run_ranks
from ds_testing.one_process import one_process_engine
from torch import nn

from ds_core.errors import UsageError
from plugins.zero.tests.gathered_models import D, gathered_engine, step, unused_are_sharded, weights


def check_writes(stage: int, dtype: str, optimizer: str, section: dict[str, Any]) -> None:
    """What a rank wrote is the weight everywhere, and stays it when a step with lr 0 publishes the
    masters.
    """
    from ds_core import comm

    engine = gathered_engine(stage, dtype, optimizer=optimizer, **section)
    step(engine)
    last = comm.world_size() - 1
    before = weights(engine)
    module = engine.module
    for rank in (0, last):
        with ds_zero.GatheredParameters(module, modifier_rank=rank), torch.no_grad():
            for param in module.parameters():
                param.fill_(10.0 * comm.rank() + rank)
            module.a.bias.data = torch.full((D,), 7.0 + comm.rank(), dtype=module.a.bias.dtype)
        unused_are_sharded(engine)
        for name, value in weights(engine).items():
            assert bool((value == (7.0 + rank if name == "a.bias" else 11.0 * rank)).all()), (
                name,
                rank,
            )
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        step(engine)
        for name, value in weights(engine).items():
            assert bool((value == (7.0 + rank if name == "a.bias" else 11.0 * rank)).all()), (
                name,
                rank,
            )
    module.load_state_dict({n: v.to(module.a.bias.dtype) for n, v in before.items()}, strict=False)
    step(engine)
    found = weights(engine)
    assert all(torch.equal(found[n], v) for n, v in before.items())
    unused_are_sharded(engine)
    engine.destroy()


@pytest.mark.fast_cases("1-1", "2-2", "1-4", "3-4")
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_writes_reach_every_rank_and_the_masters(stage: int, world: int) -> None:
    run_ranks(world, check_writes, stage, "bfloat16" if world < 4 else "float32", "SGD", {})


CPU = {"device": "cpu"}


FAR = {"device": "disk", "max_in_cpu": 0}
OFFLOADED: list[tuple[int, str, dict[str, Any]]] = [
    (1, "bfloat16", {"offload_optimizer": CPU}),
    (2, "float32", {"offload_optimizer": CPU}),
    (3, "bfloat16", {"offload_optimizer": CPU, "offload_param": CPU}),
    (3, "float32", {"offload_param": CPU}),
    (3, "float32", {"offload_optimizer": CPU, "offload_param": CPU}),
    (3, "bfloat16", {"offload_optimizer": {"device": "disk"}, "offload_param": FAR}),
]


@pytest.mark.fast_cases(
    "1-bfloat16-section0-2",
    "2-float32-section1-1",
    "3-bfloat16-section2-2",
    "3-float32-section3-1",
    "3-float32-section4-2",
    "3-bfloat16-section5-2",
)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("stage", "dtype", "section"), OFFLOADED)
def test_writes_reach_masters_that_rest_elsewhere(
    stage: int, dtype: str, section: dict[str, Any], world: int, tmp_path: Path
) -> None:
    disk = {"disk": str(tmp_path)} if "disk" in str(section) else {}
    run_ranks(world, check_writes, stage, dtype, "AdamW", section | disk)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("stage", [2, 3])
def test_writes_reach_masters_that_are_whole_tensors(stage: int, dtype: str) -> None:
    run_ranks(2, check_writes, stage, dtype, "Adafactor", {})


gathered = ds_zero.GatheredParameters


def whole(*params: Any) -> None:
    """These are unsharded."""
    assert all(p.shape == p.ds_shape for p in params)


def check_reads() -> None:
    engine = gathered_engine(3)
    read_between_steps(engine)
    read_inside_forward(engine)
    read_after_errors(engine)
    truth = weights(engine)
    context = gathered(engine.module)
    context.__enter__()
    engine.destroy()
    context.__exit__(None, None, None)
    assert torch.equal(engine.module.a.weight.double(), truth["a.weight"])


def read_between_steps(engine: Any) -> None:
    """One context inside another, and around a step."""
    module = engine.module
    truth = weights(engine)
    with gathered(module.a.weight):
        whole(module.a.weight)
        assert torch.equal(module.a.weight.double(), truth["a.weight"])
        assert module.b[0].weight.numel() == 0
        with gathered([module.b[0].weight, nn.Parameter(torch.ones(3))]):
            whole(module.a.weight, module.b[0].weight)
        with (
            pytest.raises(UsageError, match=r"'a.weight' is in an outer GatheredParameters"),
            gathered(module),
        ):
            pass
        whole(module.a.weight)
        step(engine)  # the context outlasts a whole step, and sees the new weights
        whole(module.a.weight)
        assert torch.equal(module.a.weight.double(), weights(engine)["a.weight"])
        ds_zero.empty_partition_cache(engine)
        whole(module.a.weight)
    unused_are_sharded(engine)
    with (
        gathered(module, enabled=False),
        gathered(nn.Linear(2, 2)),
        gathered([]),
        gathered(iter([module.a.bias])),
    ):
        assert module.b[0].weight.numel() == 0
        whole(module.a.bias)
    unused_are_sharded(engine)


def read_inside_forward(engine: Any) -> None:
    """Inside a forward, and with weights that are kept between forward and backward."""
    from ds_core import comm

    module = engine.module
    seen = []
    handle = module.b[0].register_forward_pre_hook(
        lambda *_: [seen.append(p.sum().item()) for p in module.parameters() if p.numel()] and None
    )
    loss = engine(torch.ones(4, D)).sum()
    with gathered(module):
        assert torch.equal(module.b[0].weight.double(), weights(engine)["b.0.weight"])
    with gathered(module.a, modifier_rank=0), torch.no_grad():
        module.a.bias.add_(comm.rank() + 1.0)
    engine.backward(loss)
    unused_are_sharded(engine)
    engine.step()
    handle.remove()
    assert seen

    # Kept weights go when asked, and backward gathers them again.
    loss = engine(torch.ones(4, D)).sum()
    assert engine.partitioner.gathering.live > 0
    ds_zero.empty_partition_cache(engine)
    assert engine.partitioner.gathering.live == 0
    engine.backward(loss)
    engine.step()


def read_after_errors(engine: Any) -> None:
    """After an error nothing is written; without a modifier nothing is kept."""
    module = engine.module
    truth = weights(engine)
    with pytest.raises(ArithmeticError), gathered(module, modifier_rank=0):
        module.a.weight.data.zero_()
        raise ArithmeticError
    with gathered(module.a.weight):
        module.a.weight.data.zero_()
    assert torch.equal(weights(engine)["a.weight"], truth["a.weight"])
    with (
        pytest.raises(
            UsageError, match=r"'a.weight' of shape \(6, 6\) was given data of shape \(3,\)"
        ),
        gathered(module.a.weight, modifier_rank=0),
    ):
        module.a.weight.data = torch.ones(3)
    unused_are_sharded(engine)
    with gathered(module.a.weight):
        assert torch.equal(module.a.weight.double(), truth["a.weight"])
    with pytest.raises(UsageError, match="modifier_rank 2 is not a rank; this run has 0 to 1"):
        gathered(module, modifier_rank=2)
    with pytest.raises(UsageError, match="takes parameters or a module, not int"):
        gathered(3)


def test_reads() -> None:
    run_ranks(2, check_reads)


def check_sanity(stage: int) -> None:
    engine = gathered_engine(stage, enable_sanity_checks=True)
    truth = weights(engine)
    for name in ("a.weight", "small"):
        param = engine.module.get_parameter(name)
        with (
            pytest.raises(
                UsageError,
                match=f"'{name}' was written inside GatheredParameters without modifier_rank",
            ),
            ds_zero.GatheredParameters(param),
        ):
            param.data[0] += 1.0
        assert torch.equal(weights(engine)[name], truth[name])
    step(engine)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_writes_without_a_modifier_are_found_out(stage: int) -> None:
    run_ranks(2, check_sanity, stage)


def check_several_engines() -> None:
    first = gathered_engine(3)
    second = gathered_engine(2)
    third = gathered_engine(3)
    models = [e.module for e in (first, second, third)]
    with (
        ds_zero.GatheredParameters([p for m in models for p in m.parameters()], modifier_rank=0),
        torch.no_grad(),
    ):
        for number, model in enumerate(models):
            for param in model.parameters():
                param.fill_(number)
    for number, engine in enumerate((first, second, third)):
        assert all(bool((v == number).all()) for v in weights(engine).values())
    part = nn.Sequential(first.module.a)
    with pytest.raises(
        UsageError, match=r"parameter '0.weight' of the model belongs to .* call destroy\(\)"
    ):
        gathered_engine(3, model=part)
    part.requires_grad_(False)  # what is not trained may be shared, but not what is partitioned
    with pytest.raises(
        UsageError,
        match=r"parameter '0.weight' is sharded by another engine; call that engine's",
    ):
        gathered_engine(3, model=part)
    part.requires_grad_(True)
    joint = first(torch.ones(4, D)).sum() + third(torch.ones(4, D)).sum()
    joint.backward()
    for engine in (first, third):
        unused_are_sharded(engine)
        engine.step()
        unused_are_sharded(engine)
    for engine in (first, second, third):
        engine.destroy()


def test_several_engines() -> None:
    run_ranks(2, check_several_engines)


def check_generation(stage: int) -> None:
    engine = gathered_engine(stage)
    step(engine)
    module = engine.module
    with torch.no_grad():
        truth = module.eval()(torch.ones(4, D))
    hooks = len(module.a._forward_pre_hooks)
    for given in (engine, module):
        with ds_zero.unwrap_model_for_generation(given) as unwrapped:
            assert unwrapped is module
            assert not module.a._forward_pre_hooks and not torch.is_grad_enabled()
            for _ in range(3):
                assert torch.equal(unwrapped(torch.ones(4, D)), truth)
        unused_are_sharded(engine)
        assert len(module.a._forward_pre_hooks) == hooks
    module.train()
    before = weights(engine)
    step(engine)
    unused_are_sharded(engine)
    assert not torch.equal(before["a.weight"], weights(engine)["a.weight"])
    engine.destroy()


@pytest.mark.parametrize("stage", [2, 3])
def test_generation(stage: int) -> None:
    run_ranks(2, check_generation, stage)


def test_a_frozen_parameter_keeps_its_shape_too() -> None:
    """At stages 1 and 2 it is in no bucket, which knows the shapes of the others."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[0].weight.requires_grad_(False)
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
    }
    with (
        one_process_engine(module, config),
        pytest.raises(UsageError, match=r"'0.weight' of shape \(4, 3\) was given data of shape"),
        gathered(module[0].weight, modifier_rank=0),
    ):
        module[0].weight.data = torch.ones(3)
