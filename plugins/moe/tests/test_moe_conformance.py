"""The conformance kit: experts over 1, 2 and 4 ranks x ZeRO 0-3 x top-1, 2 and 4 x dropping x
accumulation, clipping.

Batches are uneven: in some steps a rank has no token, or an expert none.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import moe_models as m
import pytest
from ds_testing import RunnerConformance


def zero(stage: int) -> dict[str, Any]:
    section = {"stage": stage, "reduce_bucket_size": 300, "param_persistence_threshold": 8}
    return {"zero_optimization": section} if stage else {}


STAGES = {f"zero{stage}": zero(stage) for stage in range(4)}


class _Conformance(RunnerConformance):
    variants = STAGES
    make_batch = staticmethod(m.batch)
    gas = (1, 3)
    dtypes = ("float64", "float32")

    @classmethod
    def cases(cls, world: int) -> list[tuple[str, int, str]]:
        """Each stage with and without accumulation, in turn in either dtype."""
        return [
            (v, g, cls.dtypes[(i + j) % 2])
            for i, v in enumerate(cls.variants)
            for j, g in enumerate(cls.gas)
        ]


@pytest.mark.fast_cases(test_train_batch_is_plain_torch=())
class TestEp1Top1(_Conformance):
    worlds = (1, 2)
    make_model = staticmethod(m.one_top1)
    make_truth = staticmethod(m.plain_top1)


@pytest.mark.fast_cases(test_an_iterator_that_ends_early_changes_nothing=())
class TestEp2Top1(_Conformance):
    worlds = (2, 4)
    make_model = staticmethod(m.two_top1)
    make_truth = staticmethod(m.plain_top1)


@pytest.mark.slow
class TestEp4Top1(_Conformance):
    worlds = (4,)
    make_model = staticmethod(m.four_top1)
    make_truth = staticmethod(m.plain_top1)


@pytest.mark.slow
class TestEp2Top1Dropping(_Conformance):
    worlds = (4,)
    make_model = staticmethod(m.two_top1_drop)
    make_truth = staticmethod(m.plain_top1_drop)


@pytest.mark.slow
class TestEp1Top2Residual(_Conformance):
    worlds = (1, 4)
    make_model = staticmethod(m.one_top2)
    make_truth = staticmethod(m.plain_top2)


@pytest.mark.fast_cases(test_train_batch_is_plain_torch=())
class TestEp2Top2Residual(_Conformance):
    worlds = (2,)
    make_model = staticmethod(m.two_top2)
    make_truth = staticmethod(m.plain_top2)


@pytest.mark.slow
class TestEp4Top2Residual(_Conformance):
    worlds = (4,)
    make_model = staticmethod(m.four_top2)
    make_truth = staticmethod(m.plain_top2)


@pytest.mark.slow
class TestEp2Top4(_Conformance):
    worlds = (2, 4)
    make_model = staticmethod(m.two_top4)
    make_truth = staticmethod(m.plain_top4)


@pytest.mark.slow
class TestEp4Top4(_Conformance):
    worlds = (4,)
    make_model = staticmethod(m.four_top4)
    make_truth = staticmethod(m.plain_top4)


@pytest.mark.slow
@pytest.mark.parametrize(("ep", "k", "drop"), m.WHOLE)
def test_the_whole_product(ep: int, k: int, drop: bool) -> None:
    """On every number of ranks that `ep` divides, every stage, with and without accumulation,
    clipped.
    """
    members = {
        "worlds": tuple(world for world in (1, 2, 4) if world >= ep),
        "make_model": staticmethod(getattr(m, f"ep{ep}_top{k}_{drop}")),
        "make_truth": staticmethod(getattr(m, f"plain_top{k}_{drop}")),
    }
    type("Whole", (_Conformance,), members)().test_train_batch_is_plain_torch()
