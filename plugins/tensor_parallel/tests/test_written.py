"""A model written with the layers passes the kit of transforms that divide a model among ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ds_testing import ShardedTransformConformance
from written import batch, model

CUT = (r".*(qkv|up|mix|head)\.(weight|bias)", r".*(out|down|mixed|tokens|places)\.weight")


def divided(size: int, **keys: Any) -> dict[str, Any]:
    return {"tensor_parallel": {"autotp_size": size, **keys}}


def zero(stage: int) -> dict[str, Any]:
    return {
        "zero_optimization": {
            "stage": stage,
            "param_persistence_threshold": 8,
            "reduce_bucket_size": 300,
        }
    }


class TestWritten(ShardedTransformConformance):
    axis = "tp"
    configs = {2: divided(2)}
    cut = CUT
    frozen = (r".*\.qkv\.weight", r".*norm1\.bias")
    make_model = staticmethod(model)
    make_batch = staticmethod(batch)
    variants = {"": {}, "zero3": zero(3)}
    dtypes: ClassVar[tuple[str, ...]] = ("float64", "bfloat16")
    data = (1,)


@pytest.mark.slow
class TestWrittenForMore(TestWritten):
    configs = {2: divided(2), 3: divided(3), 4: divided(4)}
    variants = {f"zero{stage}": zero(stage) for stage in range(4)}
    dtypes = ("float64", "float32", "bfloat16")


@pytest.mark.slow
class TestWrittenWithDividedTokens(TestWritten):
    configs = {2: divided(2, sequence_parallel=True)}
    data = (1, 2)


@pytest.mark.slow
class TestWrittenWithTokensOfFour(TestWritten):
    configs = {4: divided(4, sequence_parallel=True, tp_overlap_comm=True)}


@pytest.mark.slow
class TestWrittenOverlapped(TestWritten):
    configs = {2: divided(2, tp_overlap_comm=True)}
