"""The declaration of dscore-comms-logger: conformance, rules of its section, and a log that comes with
the config.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from ds_testing import InterceptorConformance, PluginConformance, run_ranks

from ds_core.errors import ConfigError
from ds_core.setup.compose import compose


class TestPlugin(PluginConformance):
    entry_point = "ds_comms_logger.plugin"
    section = "comms_logger"
    good_config: ClassVar[Any] = {
        "enabled": True,
        "verbose": True,
        "prof_all": False,
        "prof_ops": ["all_reduce"],
    }
    bad_configs: ClassVar[Any] = [
        {"enabled": "yes"},
        {"verbos": True},
        {"prof_ops": "all_reduce"},
        {"prof_ops": [3]},
    ]


class TestInterceptor(InterceptorConformance):
    config: ClassVar[Any] = {"comms_logger": {"enabled": True, "debug": True}}


def test_rules_of_the_section() -> None:
    assert compose({}).config.section("comms_logger") is None
    (note,) = compose({"comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]}}).notes
    assert str(note).startswith("comms_logger.prof_ops: has no effect")
    with pytest.raises(
        ConfigError, match=r"comms_logger.prof_ops: 'all_reduse' is no operation; .*'all_reduce'"
    ):
        compose({"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduse"]}})


def trained(section: dict[str, Any]) -> list[Any]:
    import torch
    from ds_comms_logger import log_summary

    import ds_core

    model = torch.nn.Linear(4, 2, bias=False)
    config = {"train_micro_batch_size_per_gpu": 1, "comms_logger": section}
    engine, *_ = ds_core.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config
    )
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
    engine.destroy()
    return [
        (row.op, row.bytes, row.count)
        for row in log_summary()
        if row.op == "all_reduce" and row.bytes > 4
    ]


def test_it_logs_a_run() -> None:
    assert run_ranks(2, trained, {"enabled": True}) == [[("all_reduce", 36, 3)]] * 2
    assert run_ranks(2, trained, {"enabled": False}) == [[]] * 2
