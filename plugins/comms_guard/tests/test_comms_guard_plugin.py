"""The declaration of dscore-comms-guard: conformance, and a guard that comes with the config."""

from __future__ import annotations

from typing import Any, ClassVar

from ds_testing import InterceptorConformance, PluginConformance, run_ranks


class TestPlugin(PluginConformance):
    entry_point = "ds_comms_guard.plugin"
    section = "comms_guard"
    good_config: ClassVar[Any] = {"enabled": True, "patience": 3.5}
    bad_configs: ClassVar[Any] = [{"enabled": 1}, {"patience": 0}, {"patient": 3}]


class TestInterceptor(InterceptorConformance):
    config: ClassVar[Any] = {"comms_guard": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}


def guarded(config: dict[str, Any]) -> list[str]:
    """Who watches over this job: the guard, or the watcher alone, with its patience."""
    import torch.distributed as dist
    from ds_comms_guard import guard

    from ds_core import comm

    for left in dict(guard._watchers).values():  # of other tests in this process
        left.stop()
    guard._watchers.clear()
    comm.init_distributed(config=config)
    found = comm.interceptors()
    watchers = dict(guard._watchers)
    comm.init_distributed(config=config)
    assert comm.interceptors() == found and dict(guard._watchers) == watchers  # one is enough
    for watcher in watchers.values():
        watcher.stop()
    guard._watchers.clear()
    assert set(watchers) <= {dist.group.WORLD}
    return [type(i).__name__ for i in found] + [
        f"{watcher.patience:g} s" for watcher in watchers.values()
    ]


def test_it_watches_without_any_config_and_proves_where_the_config_says_so() -> None:
    assert run_ranks(2, guarded, {}) == [["60 s"]] * 2
    assert run_ranks(2, guarded, {"comms_guard": {"patience": 5}}) == [["5 s"]] * 2
    assert run_ranks(2, guarded, {"comms_guard": {"enabled": True}}) == [["HangGuard"]] * 2
    assert run_ranks(2, guarded, {"plugins": {"disable": ["comms_guard"]}}) == [[]] * 2
    assert guarded({"comms_guard": {"enabled": True}}) == []  # alone
