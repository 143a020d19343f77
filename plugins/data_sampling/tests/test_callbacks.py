from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_data_sampling.callbacks import callbacks_of
from ds_testing import EngineMethodsConformance

from ds_core.engine import make_loader
from ds_core.errors import UsageError

METRIC = {"clustering_type": "single_cluster", "min_difficulty": 8, "max_difficulty": 64}
LINEAR = {
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 9, "difficulty_step": 8},
}


class TestEngineMethods(EngineMethodsConformance):
    config = {
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {
                "enabled": True,
                "curriculum_learning": {
                    "enabled": True,
                    "curriculum_metrics": {
                        "own": METRIC | {"schedule_type": "custom"},
                        "line": METRIC | LINEAR,
                    },
                },
            },
        }
    }
    names = (
        "random_ltd_schedule",
        "set_custom_curriculum_learning_schedule",
        "set_data_post_process_func",
    )

    def test_functions_reach_the_loader(self, engine: Any) -> None:
        def grow(step: int) -> int:
            return 8 * step

        engine.set_custom_curriculum_learning_schedule({"own": grow})
        engine.set_data_post_process_func(print)
        found = callbacks_of(engine.ctx)
        assert found.schedules == {"own": grow} and found.post_process is print
        engine.set_data_post_process_func(None)
        assert found.post_process is None
        with pytest.raises(UsageError, match="called 'other'; there are: own, line"):
            engine.set_custom_curriculum_learning_schedule({"other": grow})
        with pytest.raises(UsageError, match="'line' is fixed_linear"):
            engine.set_custom_curriculum_learning_schedule({"line": grow})

    def test_a_loader_of_the_programs_own_is_told_once(
        self, engine: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 3)).sum())
            engine.step()
        said = [
            row.getMessage()
            for row in caplog.records
            if "data_sampling has no effect" in row.getMessage()
        ]
        assert len(said) == 1 and "give initialize training_data" in said[0]

    def test_with_a_loader_nothing_is_told(
        self, engine: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine.set_custom_curriculum_learning_schedule({"own": lambda step: 8})
        for batch in make_loader(engine.ctx, torch.ones(4, 3)):
            engine.backward(engine(batch).sum())
            engine.step()
        assert engine.global_steps == 2 and "has no effect" not in caplog.text
