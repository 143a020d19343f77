"""Groups that a caller makes for itself use the same transports as those of the mesh, from the
first call on.
"""

from __future__ import annotations

import pytest
import torch
from ds_comm_gloo import gloo
from ds_testing import run_ranks
from torch import nn

import ds_core
from ds_core import comm
from ds_core.comm import ALONE
from ds_core.entries import Axis
from ds_core.mesh import plan_mesh

pytestmark = pytest.mark.usefixtures("clean_ds")


def own_groups() -> list[float]:
    mesh = plan_mesh(
        [Axis("pp", 2, outermost=True), Axis("ep", 2, inside="dp")], comm.world_size(), comm.rank()
    )
    mesh.build_groups(own=True)
    sums = []
    for axes, only in (
        (("dp",), None),
        (("pp",), None),
        (("pp", "dp"), (0, 2, 3)),
        (("edp",), None),
        (("pp",), (1,)),
    ):
        group = mesh.own_group(*axes, only=only)
        assert group is ALONE or group not in mesh.groups()
        value = torch.tensor([10.0 ** comm.rank()])
        comm.all_reduce(value, group=group)
        sums.append(value.item())
    return sums


def test_members_of_own_groups() -> None:
    got = run_ranks(4, own_groups)
    assert got == [
        [11.0, 101.0, 1101.0, 1.0, 1.0],
        [11.0, 1010.0, 10.0, 10.0, 10.0],
        [1100.0, 101.0, 1101.0, 100.0, 100.0],
        [1100.0, 1010.0, 1101.0, 1000.0, 1000.0],
    ]


def collectives_over_gloo(stage: int) -> list[str]:
    """What the first two steps send through gloo instead of through shared memory."""
    went = []
    names = ("all_gather", "all_reduce", "reduce_scatter")
    before = {name: getattr(gloo, name) for name in names}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = ds_core.initialize(model=model, config=config)
    try:
        for name in names:
            setattr(
                gloo, name, lambda *args, name=name: (went.append(name), before[name](*args))[1]
            )
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 64)).square().mean())
            engine.step()
    finally:
        for name in names:
            setattr(gloo, name, before[name])
    engine.destroy()
    return went


@pytest.mark.parametrize("stage", [1, 3])
def test_no_step_of_zero_goes_over_gloo(stage: int) -> None:
    assert run_ranks(2, collectives_over_gloo, stage) == [[], []]
