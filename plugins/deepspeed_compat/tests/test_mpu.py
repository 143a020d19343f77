"""A Megatron-style `mpu` given to ``initialize``: which mesh comes of it, and that gradients follow
its groups.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ds_deepspeed_compat.engines.mpu import MpuMesh
from ds_testing import run_ranks
from torch import nn

import ds_core
from ds_core.errors import ConfigError, PluginError, UsageError

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def _samples(seed: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _train_with_an_mpu() -> list[Any]:
    import torch.distributed as dist

    rank = dist.get_rank()
    rows = [[0, 1], [2, 3]]
    columns = [[0, 2], [1, 3]]
    tp = [dist.new_group(r) for r in rows][rank // 2]
    dp = [dist.new_group(c) for c in columns][rank % 2]

    mpu = _Getters(**_unit("mp", 2, rank % 2, tp), **_unit("dp", 2, rank // 2, dp))
    net = nn.ModuleDict({"same": nn.Linear(4, 2), "slice": nn.Linear(4, 2)}).double()
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(
                torch.randn(
                    p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(i)
                )
            )
        for p in net["slice"].parameters():
            p.add_(rank % 2)
            p.tensor_model_parallel = True  # type: ignore[attr-defined]
    engine, *_ = ds_core.initialize(model=net, config=CONFIG, mpu=mpu)
    x = _samples(rank // 2)
    engine.backward(net["same"](x).square().mean() + net["slice"](x).square().mean())
    engine.step()
    held = {info.name: info.held for info in engine.ctx.params.values()}
    return [engine.train_batch_size(), engine.get_global_grad_norm(), held]


class _Getters:
    """An mpu with the getters that `values` names: ``dp_rank=0`` is ``get_data_parallel_rank``."""

    def __init__(self, **values: Any) -> None:
        kinds = {
            "dp": "data_parallel",
            "mp": "model_parallel",
            "tp": "tensor_model_parallel",
            "sp": "sequence_parallel",
        }
        for name, value in values.items():
            kind, _, what = name.partition("_")
            setattr(self, f"get_{kinds[kind]}_{what}", lambda value=value: value)


def _unit(kind: str, size: int, rank: int = 0, group: Any = None) -> dict[str, Any]:
    return {f"{kind}_world_size": size, f"{kind}_rank": rank, f"{kind}_group": group}


@pytest.mark.parametrize(
    ("unit", "world", "axes"),
    [
        (_unit("dp", 2), 2, {"dp": 2, "tp": 1, "pp": 1}),
        (_unit("dp", 2), 4, {"dp": 2, "tp": 1, "pp": 2}),
        ({**_unit("dp", 2), **_unit("mp", 2)}, 4, {"dp": 2, "tp": 2}),
        ({**_unit("dp", 2), **_unit("tp", 2), **_unit("mp", 4)}, 4, {"dp": 2, "tp": 2}),
        ({**_unit("dp", 2), "tp_rank": 0, **_unit("mp", 2)}, 4, {"dp": 2, "tp": 2}),
        ({**_unit("dp", 2), "mp_world_size": 1}, 2, {"dp": 2, "tp": 1}),
        (_unit("mp", 4), 4, {"dp": 1, "tp": 4}),
        (_unit("sp", 1), 2, {"dp": 2, "tp": 1}),
        (_unit("sp", 2), 4, {"dp": 4, "batch": 2, "sp": 2}),
        (_unit("sp", 4), 4, {"dp": 4, "batch": 1, "sp": 4}),
        ({**_unit("dp", 2), **_unit("sp", 2)}, 4, {"dp": 4, "batch": 2, "sp": 2, "tp": 1}),
        (
            {**_unit("sp", 2), **_unit("dp", 1), **_unit("mp", 2)},
            4,
            {"dp": 2, "batch": 1, "sp": 2, "tp": 2},
        ),
    ],
)
def test_an_mpu_with_some_getters(unit: dict[str, Any], world: int, axes: dict[str, int]) -> None:
    mesh = MpuMesh(_Getters(**unit), 0, world)
    assert {axis: mesh.size(axis) for axis in axes} == axes


@pytest.mark.parametrize(
    ("unit", "words"),
    [
        (
            {},
            "the mpu does not tell which ranks hold the same weights; give it "
            "get_data_parallel_world_size",
        ),
        (
            {"dp_rank": 0},
            "has get_data_parallel_rank, but not get_data_parallel_world_size, "
            "get_data_parallel_group",
        ),
        (
            {"dp_world_size": 2},
            "but not get_data_parallel_rank, get_data_parallel_group; give it all three",
        ),
        (_unit("mp", 2), "the mpu does not tell which ranks hold the same weights"),
        (_unit("sp", 2, 1), "rank 0 at place 1 of 2 of a sequence; without get_data_parallel_"),
        (
            {**_unit("sp", 1), **_unit("mp", 2)},
            "model parallel size 2, and .*without get_data_parallel_",
        ),
        (
            {**_unit("dp", 1), **_unit("sp", 3)},
            "data parallel 1 x sequence parallel 3 x model parallel 1",
        ),
    ],
)
def test_an_mpu_that_does_not_tell_enough_is_refused(unit: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MpuMesh(_Getters(**unit), 0, 4)


def _train_sequences() -> list[Any]:
    """Two ranks of a sequence are given halves of its tokens; the unit has no data-parallel
    getters.
    """
    import torch.distributed as dist

    rank = dist.get_rank()
    group = [dist.new_group(r) for r in ([0, 1], [2, 3])][rank // 2]
    net = nn.Linear(4, 2).double()
    with torch.no_grad():
        net.weight.copy_(_samples(1)), net.bias.zero_()
    engine, *_ = ds_core.initialize(
        model=net,
        config=CONFIG | {"gradient_clipping": 0.0},
        mpu=_Getters(**_unit("sp", 2, rank % 2, group)),
    )
    mesh = engine.ctx.mesh
    places = [
        mesh.ranks("sp"),
        mesh.ranks("batch"),
        mesh.index("batch"),
        mesh.size("dp"),
        engine.train_batch_size(),
    ]
    engine.backward(engine(_samples(rank)).square().mean())
    engine.step()
    weight = net.weight.detach().clone()
    engine.destroy()
    return [*places, weight]


def test_a_unit_of_sequences() -> None:
    """The batch counts sequences, gradients are averaged over all ranks."""
    answers = run_ranks(4, _train_sequences)
    net = nn.Linear(4, 2).double()
    with torch.no_grad():
        net.weight.copy_(_samples(1)), net.bias.zero_()
    torch.stack([net(_samples(rank)).square().mean() / 4 for rank in range(4)]).sum().backward()
    assert net.weight.grad is not None
    wanted = net.weight.detach() - 0.1 * net.weight.grad
    for rank, (sequence, batch, index, dp, samples, weight) in enumerate(answers):
        assert sequence == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert (batch, index, dp, samples) == ([rank % 2, rank % 2 + 2], rank // 2, 4, 4)
        torch.testing.assert_close(weight, wanted, rtol=1e-12, atol=1e-12)


def test_an_mpu_given_to_initialize() -> None:
    """Gradients and their norm are those of one process; only sliced parameters differ along
    ``tp``.
    """
    answers = run_ranks(4, _train_with_an_mpu)
    assert [a[0] for a in answers] == [4] * 4
    assert all(
        held == {n: ("tp",) if n.startswith("slice") else () for n in held}
        for _, _, held in answers
    )
    assert len({a[1] for a in answers}) == 1
    truth = {}
    total = 0.0
    for tp in range(2):
        grads = []
        net = nn.ModuleDict({"same": nn.Linear(4, 2), "slice": nn.Linear(4, 2)}).double()
        with torch.no_grad():
            for i, p in enumerate(net.parameters()):
                p.copy_(
                    torch.randn(
                        p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(i)
                    )
                )
            for p in net["slice"].parameters():
                p.add_(tp)
        for dp in range(2):
            x = _samples(dp)
            ((net["same"](x).square().mean() + net["slice"](x).square().mean()) / 2).backward()
        grads = {n: float(p.grad.square().sum()) for n, p in net.named_parameters()}
        total += sum(v for n, v in grads.items() if n.startswith("slice"))
        truth = grads
    total += sum(v for n, v in truth.items() if n.startswith("same"))
    assert answers[0][1] == pytest.approx(math.sqrt(total), rel=1e-12)


@pytest.mark.usefixtures("clean_ds")
def test_a_unit_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Megatron's getters do not tell, an object without them, and no package that knows
    them."""

    def refused(mpu: Any) -> str:
        with pytest.raises((ConfigError, PluginError, UsageError)) as caught:
            ds_core.initialize(model=nn.Linear(4, 2), config=CONFIG, mpu=mpu)
        return str(caught.value)

    said = refused(_Getters(dp_rank=0))
    assert (
        said.startswith("mpu: the mpu has get_data_parallel_rank") and "give it all three" in said
    )
    said = refused(SimpleNamespace())
    assert (
        "makes a mesh of mpu, a SimpleNamespace: " in said
        and "(dscore-deepspeed-compat 0.1.0" in said
    )
    monkeypatch.setattr("ds_core.plugins.registry.discover", lambda: ())
    assert (
        "'ds_mesh' is served by dscore-deepspeed-compat, which is not installed; install it with `pip "
        "install" in refused(_Getters(dp_rank=0))
    )
