"""The conformance kit for interceptors: subclass `InterceptorConformance` and name your plugin.

Every collective is called on two ranks (worker processes) with your interceptors and without them;
nothing may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ds_core.comm.interceptor import Interceptor

WORLD = 2


class InterceptorConformance:
    """Tests of interceptors: inherit, and set `config`.

    With it your plugin's `ds_interceptors` returns what is to be tested.

    ``class TestMine(InterceptorConformance)``: the name must start with Test, so that pytest
    collects it.
    """

    config: ClassVar[Mapping[str, Any]]
    """The config, as of ``initialize``, with your plugin's section: ``{"mine": {"enabled":
    True}}``.
    """
    load: ClassVar[Sequence[str]] = ()
    """``plugins.load``, for a plugin that is not installed."""

    def test_collectives_give_the_same(self) -> None:
        """Results, works and return values are those without it; a collective's `tag` is equal on
        all ranks.
        """
        self._run(_compare)

    def test_errors_pass(self) -> None:
        """An error of a collective reaches the caller, and the next collective works."""
        self._run(_fail)

    def test_it_can_be_removed(self) -> None:
        """After `remove_interceptor`, and when it is installed again, collectives work."""
        self._run(_replace)

    def _run(self, check: Callable[[dict[str, Any]], None]) -> None:
        from ds_testing.pool import run_ranks

        run_ranks(WORLD, check, {**self.config, "plugins": {"load": list(self.load)}})


def _install(config: dict[str, Any]) -> list[Interceptor]:
    """What `ds_interceptors` returns, installed."""
    from ds_core import comm
    from ds_core.setup.compose import compose

    chosen = compose(config)
    found = [
        i
        for answer in chosen.plugins.ask("ds_interceptors", config=chosen.config)
        for i in answer.value
    ]
    assert found, (
        "no plugin that takes part returns an interceptor; is its section in the kit's config?"
    )
    for interceptor in found:
        comm.add_interceptor(interceptor)
    return found


def _remove(interceptors: Sequence[Interceptor]) -> None:
    from ds_core import comm

    for interceptor in interceptors:
        comm.remove_interceptor(interceptor)


def _compare(config: dict[str, Any]) -> None:
    import torch

    from ds_core import comm

    plain = _results()
    installed = _install(config)
    tags = _Tags()
    comm.add_interceptor(tags)
    for mine, theirs in zip(_results(), plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    _remove([tags, *installed])
    seen = comm.all_gather_json(tags.seen)
    assert all(row == seen[0] for row in seen), "ranks gave the same collective different tags"


def _fail(config: dict[str, Any]) -> None:
    import pytest
    import torch

    from ds_core import comm
    from ds_core.errors import CommError

    installed = _install(config)
    with pytest.raises(CommError, match="all_gather_into_tensor over 2 ranks"):
        comm.all_gather_into_tensor(torch.empty(3), torch.ones(2))
    total = torch.ones(3)
    comm.all_reduce(total)
    assert total.tolist() == [WORLD] * 3
    _remove(installed)


def _replace(config: dict[str, Any]) -> None:
    import torch

    from ds_core import comm

    total = torch.ones(3)
    for _ in range(2):
        installed = _install(config)
        comm.all_reduce(total)
        _remove(installed)
        assert not set(installed) & set(comm.interceptors())
    comm.all_reduce(total)
    assert total.tolist() == [WORLD**3] * 3


class _Tags(Interceptor):
    """Notes the tags of collectives; inside of every other interceptor."""

    order = 1000  # type: ignore[assignment]

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def around(self, collective: Any, call: Callable[[], Any]) -> Any:
        if collective.op not in ("send", "recv", "isend", "irecv"):
            self.seen.append([collective.op, collective.tag])
        return call()


def _results() -> list[Any]:
    """What every function of ds_core.comm gives, called by position and by name, at once and
    asynchronously.
    """
    import torch
    import torch.distributed as dist

    from ds_core import comm

    rank = comm.rank()
    size = comm.world_size()
    torch.manual_seed(rank)
    out: list[Any] = []
    for numel in (1, 1000, 300_000):
        x = torch.randn(numel)
        for asynchronous in (False, True):
            total = x.clone()
            whole = torch.empty(numel * size)
            part = torch.empty(numel)
            works = [
                comm.all_reduce(total, dist.ReduceOp.AVG, async_op=asynchronous),
                comm.all_gather_into_tensor(input=x, output=whole, async_op=asynchronous),
                comm.reduce_scatter_tensor(part, x.repeat(size), async_op=asynchronous),
            ]
            for work in works:
                assert (work is not None) == asynchronous, (
                    "a work is returned for async_op=True, else None"
                )
                if work is not None:
                    work.wait()
                    assert work.is_completed()
            out += [total, whole, part]
    comm.label("a label")
    x = torch.full((4,), float(rank))
    comm.broadcast(x, src=1)
    swapped = torch.empty(size)
    comm.all_to_all_single(swapped, torch.arange(float(size)) + 10 * rank)
    comm.barrier()
    got = torch.empty(3)
    peer = (rank + 1) % size
    for message in (comm.isend(torch.ones(3) * rank, peer), comm.irecv(got, peer)):
        message.wait()
    later = torch.empty(2)
    if rank == 0:
        comm.send(torch.ones(2), 1)
    else:
        comm.recv(later, 0)
        out.append(later)
    return [*out, x, swapped, got]
