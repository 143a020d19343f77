"""Tensor, sequence, pipeline and expert parallelism, each with each, with every stage of ZeRO:
equal to one process.

The kit of transforms that divide a model does the comparing; see
`ds_testing.ShardedTransformConformance`. Each normal run takes a few cases of each product, the
slow ones all of it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import models as m
from ds_testing import ShardedTransformConformance

CUT = (r".*\.[qkv]_proj\..*", r".*\.o_proj\.weight", r".*\.up_proj\..*", r".*\.down_proj\.weight")


def tp(size: int) -> dict[str, Any]:
    return {"tensor_parallel": {"autotp_size": size}}


def sp(size: int) -> dict[str, Any]:
    return {"sequence_parallel": {"size": size, "inputs": m.INPUTS}}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    section = {"stage": stage, "param_persistence_threshold": 8, "reduce_bucket_size": 300, **more}
    return {"zero_optimization": section} if stage else {}


STAGES = {f"zero{stage}": zero(stage) for stage in range(4)}
OFFLOADED = {
    f"zero{stage} offloaded": zero(stage, offload_optimizer={"device": "cpu"}) for stage in (2, 3)
}

BLOCKS = {"hpZ": zero(3, zero_hpz_partition_size=2), "MiCS": zero(3, mics_shard_size=2)}
BLOCKS["MiCS offloaded"] = zero(3, mics_shard_size=2, offload_optimizer={"device": "cpu"})


def recomputed(block: str) -> dict[str, Any]:
    section = {"modules": [block]}
    parts = {**section, "partition_activations": True}
    return {
        "recomputed": {"activation_checkpointing": section},
        "zero3 recomputed in parts": {**zero(3), "activation_checkpointing": parts},
    }


class Combination(ShardedTransformConformance):
    """A few cases, in turn in fp64 and fp32, accumulating, clipping."""

    axis = "tp"
    cut = CUT
    frozen = (r"layers\.1\..*_proj\.weight", r"layers\.2\.first\..*")
    make_model = staticmethod(m.whole)
    make_batch = staticmethod(m.batch)
    data: ClassVar[tuple[int, ...]] = (1,)
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        name: STAGES[name] for name in ("zero1", "zero3")
    }
    dtypes = ("float64", "float32")

    @classmethod
    def cases(cls, size: int, data: int) -> list[tuple[str, int, float, str]]:
        turns = itertools.cycle(itertools.product(cls.gas, cls.clip, cls.dtypes))
        return [(variant, *next(turns)) for variant in cls.variants]


class Whole(Combination):
    """All cases on up to four ranks; on eight every variant once."""

    data: ClassVar[tuple[int, ...]] = (1, 2)
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **STAGES,
        **OFFLOADED,
        **recomputed("Block"),
    }
    timeout = 900.0

    @classmethod
    def cases(cls, size: int, data: int) -> list[tuple[str, int, float, str]]:
        turns = itertools.cycle(itertools.product(cls.gas, cls.clip, cls.dtypes))
        if size * data > 4:
            return [(variant, *next(turns)) for variant in cls.variants]
        exact = itertools.product(cls.variants, cls.gas, cls.clip, cls.dtypes)
        return [*exact, *((variant, 2, 0.3, "bfloat16") for variant in cls.variants)]


class Trained:
    """Of the kit's checks that of training; the slow classes have all of them for the same
    layouts."""

    test_ranks_hold_the_parts_of_one_whole = test_what_is_not_cut_stays_the_same = (
        test_evaluation
    ) = None
    test_an_optimizer_of_the_users = test_checkpoints_at_other_sizes = (
        test_exports_have_the_whole
    ) = None


class TestTensor(Combination):
    """With layers that are not used."""

    make_model = staticmethod(m.spare)
    configs = {2: tp(2)}
    variants = {"zero2": zero(2), **recomputed("Block")}


@pytest.mark.slow
class TestTensorWhole(Whole):
    configs = {2: tp(2), 4: tp(4)}
    data = (1,)


@pytest.mark.fast_cases(test_trains_as_one_process=(), test_it_is_given_back=())
class TestTensorSequence(Trained, Combination):
    """Four ranks that divide layers and sequences by two."""

    variants = STAGES
    configs = {4: {**tp(2), **sp(2)}}


@pytest.mark.slow
class TestTensorSequenceWhole(Whole):
    configs = {4: {**tp(2), **sp(2)}, 8: {**tp(2), **sp(4)}}
    data = (1,)


@pytest.mark.slow
class TestSequence(Combination):
    axis = "sp"
    cut = ()
    configs = {2: sp(2)}


@pytest.mark.slow
class TestSequenceWhole(Whole):
    axis = "sp"
    cut = ()
    configs = {2: sp(2), 4: sp(4)}
    data = (1,)


class Staged(Combination):
    """Two stages; a rank has one of them."""

    make_model = staticmethod(m.pipeline)
    make_truth = staticmethod(m.undivided)
    make_batch = staticmethod(m.pipe_batch)
    gas = (2, 3)


class StagedWhole(Staged, Whole):
    gas = (1, 2, 5)
    cases = Whole.cases


PIPELINED_SP = {"sequence_parallel": {"size": 2, "inputs": {"inputs": 1, "labels": 1}}}


@pytest.mark.fast_cases(test_trains_as_one_process=())
class TestPipelineTensor(Trained, Staged):
    configs = {4: {**tp(2)}}


@pytest.mark.slow
class TestPipelineWritten(Staged):
    """Of layers that know how they are divided."""

    make_model = staticmethod(m.written_pipeline)
    make_truth = staticmethod(m.written_plain)
    configs = {4: {**tp(2)}}
    variants = STAGES


@pytest.mark.slow
class TestPipelineSequence(Staged):
    axis = "sp"
    cut = ()
    configs = {4: PIPELINED_SP}


@pytest.mark.slow
class TestPipelineTensorWhole(StagedWhole):
    configs = {4: {**tp(2)}}


@pytest.mark.slow
class TestPipelineSequenceWhole(StagedWhole):
    axis = "sp"
    cut = ()
    configs = {4: PIPELINED_SP}


@pytest.mark.slow
class TestPipelineTensorSequence(StagedWhole):
    """Eight ranks, two by two by two."""

    configs = {8: {**tp(2), **PIPELINED_SP}}
    data = (1,)


class Experts(Combination):
    """Two ranks divide the experts, which each token is sent to."""

    cut = CUT[:2]
    make_model = staticmethod(m.divided_experts)
    make_truth = staticmethod(m.experts)


@pytest.mark.fast_cases(test_trains_as_one_process=())
class TestTensorExperts(Trained, Experts):
    configs = {4: tp(2)}


class ExpertsWhole(Experts, Whole):
    variants = {**STAGES, **OFFLOADED, **recomputed("DividedExpertBlock")}
    cases = Whole.cases


@pytest.mark.slow
class TestTensorExpertsWhole(ExpertsWhole):
    configs = {4: tp(2)}


@pytest.mark.slow
class TestSequenceExperts(ExpertsWhole):
    axis = "sp"
    cut = ()
    configs = {4: sp(2)}
    data = (1,)


@pytest.mark.slow
class TestTensorSequenceExperts(ExpertsWhole):
    """Eight ranks, two by two by two."""

    configs = {8: {**tp(2), **sp(2)}}
    data = (1,)


# -- blocks of two data-parallel ranks -------------------------------------------------------------


class InBlocks(Combination):
    data: ClassVar[tuple[int, ...]] = (2,)
    variants = BLOCKS
    timeout = 900.0


@pytest.mark.slow
class TestTensorInBlocks(InBlocks):
    make_model = staticmethod(m.spare)
    configs = {2: tp(2)}


@pytest.mark.slow
class TestSequenceInBlocks(InBlocks):
    """A block is the ranks that divide a sequence."""

    axis = "sp"
    cut = ()
    configs = {2: sp(2)}


@pytest.mark.slow
class TestPipelineTensorInBlocks(Staged):
    data = (2,)
    variants = BLOCKS
    timeout = 900.0
    configs = {4: {**tp(2)}}


@pytest.mark.slow
class TestTensorExpertsInBlocks(Experts):
    """A block is the ranks that divide the experts; another variant has two of them in a block."""

    data = (2,)
    timeout = 900.0
    variants = {**BLOCKS, "MiCS 4": zero(3, mics_shard_size=4)}
    configs = {4: tp(2)}
