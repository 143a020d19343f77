"""Plans of a chain of equal layers, beside the formulas of the README."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from ds_plan import Offload, PlannedRun
from ds_plan.advice import Room, recommend
from ds_plan.models import of_size
from ds_zero.config import ZeroConfig
from ds_zero.planning.predict import predict, predict_all
from torch import nn

from ds_core.errors import UsageError
from ds_core.precision import Precision, cast_module


def chain(params: int = 6_400_000, largest: int = 200_000) -> nn.Module:
    model = of_size(params, largest)
    cast_module(model, Precision(param=torch.bfloat16))
    return model


RUN = PlannedRun(8, Precision(param=torch.bfloat16, master=torch.float32))


def test_the_formulas_of_the_readme() -> None:
    """Bytes per parameter between backward and step, and elements sent, at a size that 8 ranks
    divide evenly.
    """
    count = 6_400_000
    world = 8
    section = ZeroConfig(param_persistence_threshold=0)
    needs = {(n.stage, n.offload): n for n in predict_all(chain(), section, RUN)}
    assert len(needs) == 12
    each = {1: 4 + 12 / world, 2: 2 + 14 / world, 3: 16 / world}
    share = (world - 1) / world
    for stage, expected in each.items():
        need = needs[stage, Offload.NONE]
        assert need.device.resting == count * expected
        # stage 3 keeps weights from forward to backward
        assert need.reduced + need.gathered == 2 * count * share
        host = needs[stage, Offload.OPTIMIZER]
        assert host.host.resting == count * 14 / world
        # stage 1 keeps its one bucket
        assert host.device.resting == count * {1: 4, 2: 2, 3: 2 / world}[stage]
        assert host.link == count * 4 / world
    assert needs[3, Offload.ALL].device.resting == 0
    assert needs[3, Offload.ALL].host.resting == count * 16 / world
    again = section.model_copy(
        update={"stage": 3, "max_reuse_distance": 0, "prefetch_bucket_size": 0}
    )
    need = predict(chain(), again, RUN)
    assert need.reduced == count * share
    # The last layer's backward comes right after its forward, so it is gathered once.
    assert need.gathered == (2 * count - 200_000) * share


def test_accumulation_costs_stage_2_and_3_a_reduction_each_time() -> None:
    section = ZeroConfig(param_persistence_threshold=0)
    once = {(n.stage, n.offload): n for n in predict_all(chain(), section, RUN)}
    four = {
        (n.stage, n.offload): n
        for n in predict_all(chain(), section, dataclasses.replace(RUN, gas=4))
    }
    for key, need in four.items():
        assert need.reduced == once[key].reduced * (4 if key[0] > 1 else 1)
        assert need.gathered == once[key].gathered * (4 if key[0] == 3 else 1)
        if key[1].on_disk:
            continue
        # gradients are added in fp32 on the host
        wider = 2 / RUN.world if key[1] is not Offload.NONE else 0
        assert need.host.resting == once[key].host.resting + 6_400_000 * wider


def test_blocks_of_ranks() -> None:
    """hpZ keeps a second copy and crosses between blocks once; MiCS partitions over a block, and
    sums cross.
    """
    model = chain()
    count = 6_400_000
    run = PlannedRun(16, Precision(param=torch.bfloat16, master=torch.float32))
    section = ZeroConfig(stage=3)
    cast_module(model, run.precision)
    plain = predict(model, section, run)
    hpz = predict(model, section.model_copy(update={"zero_hpz_partition_size": 4}), run)
    mics = predict(model, section.model_copy(update={"mics_shard_size": 4}), run)
    gained = hpz.device.parameters - plain.device.parameters
    assert (
        gained == pytest.approx(2 * count / 4, rel=0.01)
        and hpz.device.states == plain.device.states
    )
    # The second copy is on the device also where the shards are on the host.
    offloaded = ZeroConfig.model_validate({"stage": 3, "offload_param": {"device": "cpu"}})
    without = predict(model, offloaded, run)
    both = predict(model, offloaded.model_copy(update={"zero_hpz_partition_size": 4}), run)
    gained = both.device.parameters - without.device.parameters
    assert gained == pytest.approx(2 * count / 4, rel=0.01)
    assert both.host == without.host
    assert mics.device.states == pytest.approx(4 * plain.device.states, rel=0.01)
    assert plain.across == 0
    gathers = 2 * count * 12 / 16
    sums = 2 * count * 12 / 16
    assert hpz.across == pytest.approx(gathers + sums, rel=0.01)
    assert mics.across == pytest.approx(2 * 2 * count / 4 * 3 / 4, rel=0.01)
    with pytest.raises(UsageError, match="mics_shard_size: 5 does not divide 16"):
        predict(model, section.model_copy(update={"mics_shard_size": 5}), run)


def test_the_recommendation_is_the_least_that_fits() -> None:
    run = dataclasses.replace(RUN, world=64)
    tight = ZeroConfig(max_live_parameters=400_000)
    needs = predict_all(chain(), tight, run)
    by = {(n.stage, n.offload): n for n in needs}

    def advised(device: int, host: int | None = None) -> Any:
        need = recommend(needs, Room(device, host, 8)).need
        return need and (need.stage, need.offload)

    # as much traffic as 0 and 1, and less memory than both
    assert advised(10**12) == (2, Offload.NONE)
    two = by[2, Offload.NONE].device.peak
    three = by[3, Offload.NONE].device.peak
    assert advised(two) == (2, Offload.NONE)
    assert advised(two - 1) == (3, Offload.NONE)
    assert advised(three - 1) == (3, Offload.OPTIMIZER)
    host = by[3, Offload.OPTIMIZER].host.peak * 8
    assert advised(three - 1, host) == (3, Offload.OPTIMIZER)
    assert by[3, Offload.DISK].host.peak < host / 8
    # masters, moments and gradients, and padding
    assert by[3, Offload.DISK].disk == 14 * 100_000 + 448
    assert advised(three - 1, host - 1) == (3, Offload.DISK)
    assert advised(by[3, Offload.OPTIMIZER].device.peak - 1) == (3, Offload.ALL)
    assert advised(
        by[3, Offload.OPTIMIZER].device.peak - 1, by[3, Offload.ALL].host.peak * 8 - 1
    ) == (
        3,
        Offload.DISK_ALL,
    )
    nothing = recommend(needs, Room(1000, None, 8))
    assert nothing.need is None
    assert nothing.reason.startswith(
        "nothing fits: stage 3 with optimizer and parameters on disk needs least"
    )
    assert "stage 2 would need" in recommend(needs, Room(two - 1)).reason
    many = predict_all(chain(), tight, dataclasses.replace(run, gas=4))
    best = recommend(many, Room(10**12)).need
    assert best is not None and best.stage == 1  # stage 2 would reduce four times
