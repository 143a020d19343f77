"""The conformance kit of runners: 2 and 4 stages x 1 and 2 data ranks x ZeRO 0-3 x schedules x
micro-batches.

Each normal run takes a part of the product: every schedule with every stage of ZeRO, in one dtype
and with one number of micro-batches on 2 ranks, and in the other with another on 4. The slow one
takes all of it.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ds_testing import RunnerConformance
from pipe_models import Plain, batch, four, four_chunked, two, two_chunked


def variant(schedule: str, zero: int) -> dict[str, Any]:
    config: dict[str, Any] = {"pipeline": {"schedule": schedule}}
    if zero:
        config["zero_optimization"] = {
            "stage": zero,
            "reduce_bucket_size": 300,
            "param_persistence_threshold": 8,
        }
    return config


def variants(*schedules: str) -> dict[str, dict[str, Any]]:
    return {f"{s}-zero{z}": variant(s, z) for s, z in itertools.product(schedules, range(4))}


class Pipeline(RunnerConformance):
    """What all have in common."""

    make_batch = staticmethod(batch)
    make_truth = staticmethod(Plain)
    gas = (1, 2, 5, 8)
    dtypes = ("float64", "float32")
    everything = False

    @classmethod
    def cases(cls, world: int) -> list[tuple[str, int, str]]:
        """Every variant in one dtype and with one number of micro-batches; both differ from world to
        world.
        """
        found = super().cases(world)
        if cls.everything:
            return found
        names = list(cls.variants)
        chosen = []
        for name, gas, dtype in found:
            place = names.index(name) + world // 2
            turn = place + 2 * (dtype == "float32")
            if gas == cls.gas[turn % len(cls.gas)] and dtype == cls.dtypes[place % 2]:
                chosen.append((name, gas, dtype))
        return chosen


class TestTwoStages(Pipeline):
    """On 2 ranks, and on 4 with 2 data ranks."""

    worlds = (2, 4)
    make_model = staticmethod(two)
    variants = variants("1f1b", "zero_bubble")


@pytest.mark.slow
class TestTwoStagesInterleaved(Pipeline):
    """Two chunks per stage."""

    worlds = (2, 4)
    make_model = staticmethod(two_chunked)
    variants = variants("interleaved")


@pytest.mark.slow
class TestFourStages(Pipeline):
    """On 4 ranks."""

    worlds = (4,)
    make_model = staticmethod(four)
    variants = variants("1f1b", "zero_bubble")


@pytest.mark.slow
class TestFourStagesInterleaved(Pipeline):
    """Two chunks per stage: eight parts."""

    worlds = (4,)
    make_model = staticmethod(four_chunked)
    variants = variants("interleaved")


@pytest.mark.slow
class TestAllOfTwoStages(TestTwoStages):
    """The whole product."""

    everything = True
    timeout = 900.0


@pytest.mark.slow
class TestAllOfTwoStagesInterleaved(TestTwoStagesInterleaved):
    """The whole product."""

    everything = True
    timeout = 900.0


@pytest.mark.slow
class TestAllOfFourStages(TestFourStages):
    """The whole product."""

    everything = True
    timeout = 900.0


@pytest.mark.slow
class TestAllOfFourStagesInterleaved(TestFourStagesInterleaved):
    """The whole product."""

    everything = True
    timeout = 900.0
