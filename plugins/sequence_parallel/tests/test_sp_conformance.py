"""The conformance kit: a module of one's own, with Ulysses and with ring attention, over 2 and 4
ranks and ZeRO 0-3.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import sp_plain as m
from ds_testing import MeshAxisConformance, ShardedTransformConformance

INPUTS = {"tokens": 1, "positions": 1, "labels": 1}


def section(size: int, mode: str) -> dict[str, Any]:
    return {"sequence_parallel": {"size": size, "mode": mode, "inputs": INPUTS}}


def zero(stage: int) -> dict[str, Any]:
    return {
        "zero_optimization": {
            "stage": stage,
            "param_persistence_threshold": 8,
            "reduce_bucket_size": 300,
        }
    }


class TestUlysses(ShardedTransformConformance):
    axis = "sp"
    configs = {2: section(2, "ulysses")}
    frozen = (r"query\..*", r"norm\.bias")
    make_model = staticmethod(m.divided)
    make_truth = staticmethod(m.whole)
    make_batch = staticmethod(m.batch)
    data = (1,)
    alone = True
    variants = {"": {}, "zero3": zero(3)}


@pytest.mark.slow
class TestUlyssesOnFour(TestUlysses):
    configs = {2: section(2, "ulysses"), 4: section(4, "ulysses")}
    variants = {f"zero{stage}": zero(stage) for stage in range(4)}


@pytest.mark.slow
class TestUlyssesAndData(TestUlysses):
    data = (2,)
    variants: ClassVar[dict[str, Any]] = {f"zero{stage}": zero(stage) for stage in range(4)}


@pytest.mark.slow
class TestRing(TestUlysses):
    configs = {2: section(2, "ring"), 4: section(4, "ring")}
    data = (1,)
    make_model = staticmethod(m.ring)
    variants: ClassVar[dict[str, Any]] = {f"zero{stage}": zero(stage) for stage in range(4)}


class TestAxis(MeshAxisConformance):
    plugin = "ds_sequence_parallel.plugin"
    config: ClassVar[dict[str, Any]] = {"sequence_parallel": {"size": 2}}
