"""Interceptors: what they see, in which order, and what a label and a tag are to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ds_testing import run_ranks

from ds_core import comm
from ds_core.comm.interceptor import OPERATIONS, Collective


class Noting(comm.Interceptor):
    """Notes what it sees. seen: shared by several."""

    def __init__(self, seen: list[Any], order: comm.Order) -> None:
        self.seen = seen
        self.order = order

    def around(self, collective: Collective, call: Callable[[], Any]) -> Any:
        if self.order is comm.Order.CHECK:
            collective.tag = 5
        self.seen.append(
            (
                self.order.name,
                collective.op,
                collective.label,
                [] if collective.message is None else [collective.message.numel()],
            )
        )
        result = call()
        self.seen.append((self.order.name, "end", comm.tag(), collective.group is dist.group.WORLD))
        return result

    def close(self) -> None:
        self.seen.append("closed")


def watched() -> list[Any]:
    seen: list[Any] = []
    inner = Noting(seen, comm.Order.CHECK)
    outer = Noting(seen, comm.Order.OBSERVE)
    comm.label("not kept")
    for one in (inner, outer, inner):  # a second time: no effect
        comm.add_interceptor(one)
    assert comm.interceptors() == (outer, inner)
    comm.label("lost")
    alone = dist.new_group([comm.rank()], use_local_synchronization=True)
    comm.all_reduce(torch.ones(1), group=alone)  # nobody to agree with
    comm.label("sum")
    work = comm.all_reduce(torch.ones(3), async_op=True)
    assert work is not None and comm.tag() is None
    work.wait()
    whole = torch.empty(4)
    comm.all_gather_into_tensor(input=torch.ones(2), output=whole)
    comm.remove_interceptor(inner)
    comm.remove_interceptor(inner)
    comm.barrier()
    comm.remove_interceptor(outer)
    comm.barrier()
    return seen


def test_interceptors_see_every_collective_in_their_order() -> None:
    expected: list[Any] = []
    for op, label, sizes in (("all_reduce", "sum", [3]), ("all_gather_into_tensor", "", [4])):
        expected += [("OBSERVE", op, label, sizes), ("CHECK", op, label, sizes)]
        expected += [("CHECK", "end", 5, True), ("OBSERVE", "end", 5, True)]
    expected += ["closed", ("OBSERVE", "barrier", "", []), ("OBSERVE", "end", None, True), "closed"]
    assert run_ranks(2, watched) == [expected] * 2


def test_the_table_of_operations_is_complete() -> None:
    import inspect

    from ds_core.comm import collectives

    known = {
        n: f
        for n, f in vars(collectives).items()
        if inspect.isfunction(f)
        and f.__module__ == collectives.__name__
        and not n.startswith("_")
        and "group" in inspect.signature(f).parameters
    }
    made = set(known) - {"members", "open_transport", "rank", "world_size"}
    assert made == set(OPERATIONS)
    assert all(
        not a or a in inspect.signature(known[op]).parameters for op, a in OPERATIONS.items()
    )


def taking_part() -> list[Any]:
    import sys
    from types import ModuleType

    import ds_core

    seen: list[Any] = []
    noting = Noting(seen, comm.Order.OBSERVE)
    module = ModuleType("acme_noting")

    def ds_interceptors(config: Any) -> Any:
        return [noting]

    vars(module)["ds_interceptors"] = ds_interceptors
    sys.modules["acme_noting"] = module
    model = torch.nn.Linear(2, 1)
    config = {"train_micro_batch_size_per_gpu": 1, "plugins": ["acme_noting"]}
    for _ in range(2):  # a second engine brings the same one
        engine = ds_core.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config
        )[0]
        assert comm.interceptors() == (noting,)
        seen.clear()
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        engine.destroy()
    assert comm.interceptors() == (noting,)
    comm.remove_interceptor(noting)
    return [row[1:3] for row in seen if row[1] == "all_reduce"]


def test_a_plugin_brings_them() -> None:
    for seen in run_ranks(2, taking_part):
        assert seen == [("all_reduce", "gradients of 'bias' to 'weight'")]
