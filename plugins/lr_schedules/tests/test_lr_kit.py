"""Every schedule passes the conformance kit."""

from __future__ import annotations

from ds_testing import SchedulerConformance


class TestSchedules(SchedulerConformance):
    plugin = "ds_lr_schedules.plugin"
    params = {
        "LRRangeTest": {"lr_range_test_step_size": 3},
        "OneCycle": {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1,
            "cycle_first_step_size": 4,
            "decay_step_size": 2,
            "decay_lr_rate": 0.1,
        },
        "WarmupLR": {"warmup_num_steps": 8},
        "WarmupDecayLR": {"warmup_num_steps": 8, "total_num_steps": 20},
        "WarmupCosineLR": {"warmup_num_steps": 8, "total_num_steps": 20},
    }
