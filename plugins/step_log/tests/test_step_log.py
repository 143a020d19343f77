"""The keys of dscore-step-log: what is logged and when, what monitors get, and what is refused."""

from __future__ import annotations

import itertools
import logging
from typing import Any, ClassVar

import pytest
import torch
from ds_testing import ObserverConformance, PluginConformance

import ds_core
from ds_core.errors import ConfigError

KEYS = ("wall_clock_breakdown", "memory_breakdown", "steps_per_print", "dump_state")


class TestStepsPerPrint(PluginConformance):
    entry_point = "ds_step_log.plugin"
    section = "steps_per_print"
    good_config = 10
    bad_configs = [0, -1, "often", 1.5]


class TestWallClock(PluginConformance):
    entry_point = "ds_step_log.plugin"
    section = "wall_clock_breakdown"
    good_config = True
    bad_configs = [1, "yes"]


class TestMemory(PluginConformance):
    entry_point = "ds_step_log.plugin"
    section = "memory_breakdown"
    good_config = True
    bad_configs = [1]


class TestDump(PluginConformance):
    entry_point = "ds_step_log.plugin"
    section = "dump_state"
    good_config = True
    bad_configs = [1]


class TestTimers(PluginConformance):
    entry_point = "ds_step_log.plugin"
    section = "timers"
    good_config: ClassVar[Any] = {"throughput": {"enabled": False, "tokens_per_sample": 2048}}
    bad_configs: ClassVar[Any] = [
        {"throughput": {"enabeld": True}},
        {"throughput": {"tokens_per_sample": 0}},
    ]


class TestTraining(ObserverConformance):
    config: ClassVar = {
        "steps_per_print": 1,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
    }
    metrics: ClassVar = tuple(
        f"Train/Samples/{name}"
        for name in (
            *(
                f"elapsed_time_ms_{p}"
                for p in ("forward", "backward", "backward_inner", "backward_allreduce", "step")
            ),
            "step_time_ms",
            "samples_per_second",
            "memory_allocated_gib",
            "memory_peak_gib",
        )
    )


def run(steps: int, **config: Any) -> Any:
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **config,
    }
    engine, *_ = ds_core.initialize(model=torch.nn.Linear(3, 1), config=given)
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 3)).square().mean())
        engine.step()
    return engine


@pytest.mark.usefixtures("clean_ds")
@pytest.mark.parametrize(
    "keys", [c for n in range(len(KEYS) + 1) for c in itertools.combinations(KEYS, n)]
)
def test_every_set_of_keys(keys: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    """Each line is there once, when its key asks for it, whatever other keys are set."""
    values = {"steps_per_print": 2, **dict.fromkeys(set(KEYS) - {"steps_per_print"}, True)}
    with caplog.at_level(logging.INFO, "ds_core"):
        run(4, **{key: values[key] for key in keys})
    asked = set(keys)
    lines = 2 if "steps_per_print" in asked else 1 if asked - {"dump_state"} else 0
    assert caplog.text.count("samples/s") == lines
    assert caplog.text.count("ms: forward") == (lines if "wall_clock_breakdown" in asked else 0)
    assert caplog.text.count("memory after backward_inner") == (
        lines if "memory_breakdown" in asked else 0
    )
    assert caplog.text.count("mesh {'dp': 1}") == ("dump_state" in asked)


@pytest.mark.usefixtures("clean_ds")
def test_keys_that_are_off_print_nothing(caplog: pytest.LogCaptureFixture) -> None:
    off: dict[str, Any] = dict.fromkeys(KEYS, False)
    with caplog.at_level(logging.INFO, "ds_core"):
        run(2, **{**off, "steps_per_print": None})
        run(2, **{**off, "steps_per_print": float("inf")})
        run(2, steps_per_print=1, timers={"throughput": {"enabled": False}})
    assert caplog.text.count("lr [0.1]") == 2
    assert "samples/s" not in caplog.text


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(ConfigError, match="steps_per_print"):
        run(0, steps_per_print=0)
