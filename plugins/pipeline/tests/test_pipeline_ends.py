"""The end of a run with a pipeline: each rank's module is what it was, can be copied, and trains
again.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import pipe_models as m
from ds_testing.kits.parallel.given_back import Structure
from ds_testing.pytest_plugin import Ranks

import ds_core
from ds_core.errors import UsageError


def gives_back() -> None:
    model = m.pipeline(2)
    before = Structure(model)
    config = {
        "train_micro_batch_size_per_gpu": m.MICRO,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "pipeline": {"activation_checkpoint_interval": 2},
    }
    for step in range(2):
        engine = ds_core.initialize(model=model, config=config)[0]
        engine.train_batch(iter([m.batch(step, 0, 0)]))
        assert (
            copy.deepcopy(engine.module).mpu().get_pipe_parallel_group()
            is model.mpu().get_pipe_parallel_group()
        )
        engine.destroy()
        assert not before.differences(model)
        with pytest.raises(UsageError, match="has process groups once"):
            model.mpu().get_pipe_parallel_group()
        assert not [p for p in model.parameters() if p._post_accumulate_grad_hooks]


def test_a_module_is_given_back(ranks: Ranks) -> None:
    ranks(2, gives_back)
