from __future__ import annotations

from typing import Any

import pytest
from ds_data_sampling.callbacks import callbacks_of
from ds_testing import EngineMethodsConformance

from ds_core.errors import UsageError

METRIC = {"clustering_type": "single_cluster", "min_difficulty": 8, "max_difficulty": 64}
LINEAR = {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 9, "difficulty_step": 8}}


class TestEngineMethods(EngineMethodsConformance):
    config = {
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {
                "enabled": True,
                "curriculum_learning": {
                    "enabled": True,
                    "curriculum_metrics": {"own": METRIC | {"schedule_type": "custom"}, "line": METRIC | LINEAR},
                },
            },
        }
    }
    names = ("set_custom_curriculum_learning_schedule", "set_data_post_process_func")

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
