"""The plugin against the contract of plugins, and a search over a table, with nothing else of ours
installed.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ds_autotuning.config import Autotuning
from ds_autotuning.records import Result, Status
from ds_autotuning.search.candidates import Candidate
from ds_autotuning.search.space import MICRO, Dimension, Space
from ds_autotuning.search.tuner import Tuning, tune
from ds_testing import PluginConformance


class TestPlugin(PluginConformance):
    entry_point = "ds_autotuning.plugin"
    section = "autotuning"
    good_config: ClassVar[Any] = {
        "enabled": True,
        "fast": False,
        "metric": "latency",
        "space": {"a.b": [1, 2]},
    }
    bad_configs: ClassVar[Any] = [
        {"metric": "speed"},
        {"tuner_num_trials": 0},
        {"start_profile_step": 5, "end_profile_step": 4},
        {"fastt": True},
    ]


def test_a_search_finds_the_best_of_a_table() -> None:
    space = Space((Dimension(("a.b",), (1, 2, 3)),))
    speed = {(value, micro): value * micro**0.5 for value in (1, 2, 3) for micro in (1, 2, 4)}

    def look_up(number: int, name: str, candidate: Candidate) -> Result:
        return Result(
            Status.DONE, throughput=speed[candidate.setting["a.b"], candidate.setting[MICRO]]
        )

    section = Autotuning(tuner_early_stopping=0)
    tuning = Tuning(
        section, space, lambda _: [1, 2, 4], lambda setting: Candidate(setting, {}), look_up
    )
    tune(tuning)
    assert tuning.best is not None and dict(tuning.best.setting) == {"a.b": 3, MICRO: 4}
    assert len(tuning.rows) == 9
