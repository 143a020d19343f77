"""The declaration of ds-comms-guard: conformance, and a guard that comes with the config."""

from __future__ import annotations

from typing import Any, ClassVar

from ds_testing import InterceptorConformance, PluginConformance, run_ranks


class TestPlugin(PluginConformance):
    entry_point = "ds_comms_guard.plugin"
    section = "comms_guard"
    good_config: ClassVar[Any] = {"enabled": True, "patience": 3}
    bad_configs: ClassVar[Any] = [{"enabled": 1}, {"patience": 0}, {"patient": 3}]


class TestInterceptor(InterceptorConformance):
    config: ClassVar[Any] = {"comms_guard": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}


def guarded(section: dict[str, Any] | None) -> list[str]:
    from ds_core import comm

    config = {} if section is None else {"comms_guard": section}
    comm.init_distributed(config=config)
    found = [type(i).__name__ for i in comm.interceptors()]
    comm.init_distributed(config=config)
    assert [type(i).__name__ for i in comm.interceptors()] == found  # one is enough
    return found


def test_it_is_on_when_the_config_says_so() -> None:
    assert run_ranks(2, guarded, {"enabled": True}) == [["HangGuard"]] * 2
    assert run_ranks(2, guarded, {}) == [[]] * 2
    assert run_ranks(2, guarded, None) == [[]] * 2
    assert guarded({"enabled": True}) == []  # alone
