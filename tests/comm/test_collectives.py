"""The collectives in their plain form: what every group has without a provider."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ds_testing import CollectivesConformance, run_ranks

from ds_core import comm
from ds_core.comm import ALONE
from ds_core.entries import CollectivesEntry
from ds_core.errors import ConfigError, PluginError
from ds_core.plugins import Plugins
from ds_core.plugins.discovery import BACKENDS, Found


@pytest.mark.fast_cases(
    test_reductions_around_the_thresholds=(),
    test_holds=(
        "averages_at_the_edge_of_fp16",
        "strides_and_parameters",
        "gathers_in_place",
        "other_collectives",
        "messages",
        "groups",
        "objects",
    ),
)
class TestPlain(CollectivesConformance):
    """torch.distributed over gloo, and what the core adds to it."""

    polls = False
    ranks = (1, 2, 4)

    def test_works_of_messages_can_be_polled(self) -> None:
        """Reductions can."""
        self.ranks = (2,)
        super().test_works_of_messages_can_be_polled()


def _alone() -> list[float]:
    """Every collective over the group of this rank alone gives back what it got."""
    mine = torch.tensor([float(comm.rank() + 1)] * 3)
    values = [mine.clone() for _ in range(5)]
    comm.all_reduce(values[0], group=ALONE)
    comm.broadcast(values[1], src=comm.rank(), group=ALONE)
    comm.all_gather_into_tensor(values[2], mine, group=ALONE)
    comm.reduce_scatter_tensor(values[3], mine, group=ALONE)
    comm.all_to_all_single(values[4], mine, group=ALONE)
    comm.barrier(group=ALONE)
    assert comm.all_gather_json("x", group=ALONE) == ["x"]
    assert (comm.world_size(ALONE), comm.rank(ALONE)) == (1, 0)
    return [float((v - mine).abs().max()) for v in values]


def test_a_group_of_one_rank_is_not_the_world() -> None:
    assert run_ranks(2, _alone) == [[0.0] * 5] * 2


def calls_at_size_one() -> None:
    alone = [dist.new_group([r]) for r in range(2)][comm.rank()]
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        with torch.profiler.profile() as profile:
            tensor = torch.ones(4)
            if name == "all_reduce":
                comm.all_reduce(tensor, group=alone)
            else:
                getattr(comm, name)(torch.empty(4), tensor, group=alone)
        events = [e.key for e in profile.key_averages() if "gloo" in e.key or "c10d" in e.key]
        assert events == [], name
    with torch.profiler.profile() as profile:
        comm.all_reduce(torch.ones(4))
    # the check does see calls
    assert any("gloo" in e.key or "c10d" in e.key for e in profile.key_averages())


def test_a_group_of_one_calls_nothing() -> None:
    run_ranks(2, calls_at_size_one)


def test_without_a_process_group_everything_is_one_rank() -> None:
    assert (comm.world_size(), comm.rank(), comm.is_initialized()) == (1, 0, False)
    tensor = torch.arange(4.0)
    out = torch.empty(4)
    comm.all_reduce(tensor, dist.ReduceOp.AVG)
    assert tensor.tolist() == [0, 1, 2, 3]
    work = comm.reduce_scatter_tensor(out, tensor, async_op=True)
    assert work is not None and work.wait() and work.is_completed()
    assert torch.equal(out, tensor)
    assert comm.all_gather_json({"a": (1, 2)}) == [{"a": [1, 2]}]
    comm.barrier()


# -- the choice of a provider ----------------------------------------------------------------------


def offering(**entries: Any) -> Plugins:
    """Plugins that offer `CollectivesEntry`s, from a module of their own."""
    import sys
    from types import ModuleType

    module = ModuleType("offers_collectives")
    module.ds_collectives = lambda: entries  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    return Plugins(found=[Found("offers", BACKENDS, module.__name__, "ds-offers", "1.0")])


def entry(priority: int = 0, backend: str = "gloo", why: str | None = None) -> CollectivesEntry:
    return CollectivesEntry("nobody.has:this", "cpu", backend, priority, lambda: why)


def test_the_best_that_is_available_serves_each_backend() -> None:
    plugins = offering(
        slow=entry(),
        fast=entry(9),
        better=entry(20, why="no such device"),
        other=entry(backend="mpi"),
    )
    chosen = comm.choose_providers(plugins, None)
    assert {pair: str(p) for pair, p in chosen.items()} == {
        ("cpu", "gloo"): "fast (ds-offers)",
        ("cpu", "mpi"): "other (ds-offers)",
    }
    assert "offers_collectives" in plugins.members()
    assert chosen == comm.choose_providers(plugins, None)
    assert list(comm.choose_providers(plugins, "Slow")) == [("cpu", "gloo")]
    assert comm.choose_providers(plugins, "torch") == {}
    with pytest.raises(
        PluginError, match=r"'offers' \(ds-offers 1.0.*cannot serve collectives 'fast'"
    ):
        chosen["cpu", "gloo"](dist.group.WORLD, False)  # type: ignore[arg-type]


def test_choices_that_cannot_be_made() -> None:
    with pytest.raises(
        ConfigError, match=r"no collective is called 'quick'; installed: slow, torch"
    ):
        comm.choose_providers(offering(slow=entry()), "quick")
    with pytest.raises(
        ConfigError, match=r"collectives: slow \(ds-offers\) cannot serve: no such device"
    ):
        comm.choose_providers(offering(slow=entry(why="no such device")), "slow")
    with pytest.raises(
        PluginError,
        match=r'a \(ds-offers\) and b \(ds-offers\).*choose one with "collectives": "b"',
    ):
        comm.choose_providers(offering(a=entry(3), b=entry(3)), None)
