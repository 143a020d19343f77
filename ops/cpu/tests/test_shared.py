"""Collectives through shared memory: the kit of providers, groups, failures, training as over
gloo."""

from __future__ import annotations

import importlib.util
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ds_comm_gloo import GlooCollectives, transports
from ds_comm_gloo.two_level import TwoLevel
from ds_ops_cpu import shared as ours
from ds_ops_cpu.kernels import native
from ds_testing import CollectivesConformance, RemoteError, run_ranks
from ds_testing.kits.parallel.collectives import CHECKS as PROMISES
from ds_testing.kits.parallel.collectives import check_reductions, contribution, expected
from torch import Tensor, nn

from ds_core import comm
from ds_core.comm import collectives
from ds_core.entries import CollectivesEntry
from ds_core.errors import CommError

ROOT = Path(__file__).parents[3]
CHECKS = ROOT / "tests" / "comm"
SMALL = 1 << 14  # boxes of so many bytes, so that small tensors go through in many pieces


def core_checks(name: str, folder: Path = CHECKS) -> ModuleType:
    """A module of the core's (or a plugin's) tests, whose functions check collectives by whatever
    way they go.
    """
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def transport(group: Any = None) -> Any:
    return (
        collectives._groups[dist.group.WORLD if group is None else group].serving["cpu"].transport
    )  # type: ignore


def renew() -> None:
    """Ask for the transport of the world's collectives once more."""
    collectives._groups.pop(dist.group.WORLD, None)  # type: ignore[call-overload]
    comm.use_providers({("cpu", "gloo"): ours.collectives})


def start(box: int = ours.BOX, once: int = ours.ONCE) -> None:
    """Go through shared memory from here on, on new segments."""
    ours.BOX = box
    ours.ONCE = once
    renew()
    comm.all_reduce(torch.ones(1))
    assert isinstance(transport(), ours.SharedMemory)


class TestSharedMemory(CollectivesConformance):
    """The same bits as one process that adds in rank order, as over gloo."""

    provider = "ds_ops_cpu.shared:collectives"
    rank_order = True


def at_borders() -> None:
    for once in (0, 1 << 12):
        start(SMALL, once)
        for dtype in (torch.float32, torch.bfloat16, torch.int16):
            box = SMALL // dtype.itemsize
            for length in (box - 1, box, box + 1, 3 * box + 17, (1 << 12) // dtype.itemsize + 1):
                check_reductions(length, dtype, "AVG" if once else "SUM", async_op=length > box)
    start()
    check_reductions(1_500_017, torch.float32, "SUM", False)
    check_reductions(1_500_017, torch.float16, "AVG", True)


@pytest.mark.parametrize(
    "size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))]
)
def test_sizes_at_the_borders_of_boxes_and_large_ones(size: int) -> None:
    run_ranks(size, at_borders)


def bits() -> None:
    start()
    rank = dist.get_rank()
    size = dist.get_world_size()
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
        parts = [(torch.arange(77) * (r + 3) % 5).to(dtype) for r in range(size)]
        for name, fold in (
            ("BAND", torch.bitwise_and),
            ("BOR", torch.bitwise_or),
            ("BXOR", torch.bitwise_xor),
        ):
            mine = parts[rank].clone()
            want = parts[0]
            for part in parts[1:]:
                want = fold(want, part)
            comm.all_reduce(mine, getattr(dist.ReduceOp, name))
            assert torch.equal(mine, want)
    strange = [
        torch.tensor([float("nan"), 1.0, float("inf"), -0.5]),
        torch.tensor([1.0, float("nan"), 2.0, -0.25]),
    ]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for name in ("MAX", "MIN"):
            choose = torch.maximum if name == "MAX" else torch.minimum
            mine = strange[rank % 2].to(dtype, copy=True)
            want = choose(*(s.to(dtype) for s in strange))
            comm.all_reduce(mine, getattr(dist.ReduceOp, name))
            assert torch.equal(mine.nan_to_num(77), want.nan_to_num(77))
    with pytest.raises(CommError, match="average of bool"):
        comm.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG)
    turned = torch.full((3,), 1j * (rank + 1))  # no kernel for it: by the backend
    comm.all_reduce(turned)
    assert turned.tolist() == [1j * size * (size + 1) / 2] * 3


def test_bits_nan_and_what_is_left_to_the_backend() -> None:
    run_ranks(3, bits)


def test_every_instruction_set_reduces_alike() -> None:
    """In one process: the arithmetic alone, of each instruction set that this processor has."""
    module = native()
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int32,
        torch.uint8,
    ):
        for length in (1, 15, 16, 1037):
            parts = [contribution(length, dtype, r) for r in range(3)]
            for op in ("SUM", "AVG", "PRODUCT", "MAX", "MIN"):
                want = expected(parts, op)
                for name in module.instruction_sets():
                    out = parts[1].clone()  # the result may overwrite a part
                    at = [parts[0].data_ptr(), out.data_ptr(), parts[2].data_ptr()]
                    module.fold(name, out.data_ptr(), at, length, *ours._arithmetic(dtype, op)[1:])
                    assert torch.equal(out, want), (name, dtype, length, op)


def crossing() -> None:
    """Two groups that have not met, used in another order on each rank: nobody may wait in the
    first call.
    """
    start()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    mine = [torch.full((5,), float(i + 1)) for i in range(2)]
    order = (0, 1) if dist.get_rank() == 0 else (1, 0)
    works = [comm.all_reduce(mine[i], group=groups[i], async_op=True) for i in order]
    for work in works:
        assert work is not None
        work.wait()
    assert [m[0].item() for m in mine] == [2.0, 4.0]
    assert [transport(g) for g in groups] == [None, None]
    for group in groups:
        comm.all_reduce(mine[0], group=group)
        assert isinstance(transport(group), ours.SharedMemory)


def test_ranks_do_not_meet_in_an_asynchronous_call() -> None:
    run_ranks(2, crossing)


def overlapping() -> None:
    """Groups that share ranks, disjoint ones and the world, all in flight at once, waited for in
    any order.
    """
    start(SMALL)
    rank = dist.get_rank()
    members = [[0, 1, 2, 3], [0, 1], [2, 3], [1, 2, 3], [0, 2]]
    groups = [dist.new_group(ranks) for ranks in members]
    for ranks, group in zip(members, groups, strict=True):
        if rank in ranks:
            comm.open_transport(group)
    flying = []
    for turn in range(4):
        for ranks, group in zip(members, groups, strict=True):
            if rank in ranks:
                length = 1000 + 20_000 * (turn % 2)
                mine = contribution(length, torch.float32, 10 * turn + rank)
                work = comm.all_reduce(mine, group=group, async_op=True)
                flying.append(
                    (
                        work,
                        mine,
                        [contribution(length, torch.float32, 10 * turn + r) for r in ranks],
                    )
                )
    for work, mine, parts in flying[::-1] if rank % 2 else flying:
        assert work is not None
        work.wait()
        assert torch.equal(mine, expected(parts, "SUM"))
    assert all(
        isinstance(transport(g), ours.SharedMemory)
        for g, m in zip(groups, members, strict=True)
        if rank in m
    )
    for ranks, group in zip(members, groups, strict=True):
        if rank in ranks:
            dist.destroy_process_group(group)


@pytest.mark.slow
def test_groups_that_share_ranks_in_flight_together() -> None:
    run_ranks(4, overlapping)


# -- who is gone, who differs ----------------------------------------------------------------------


def nothing_in_a_folder() -> None:
    """The segment has no name that could stay behind, whoever is killed whenever."""
    maps = Path("/proc/self/maps").read_text()
    assert "/memfd:ds_core collectives (deleted)" in maps
    assert "/dev/shm/ds" not in maps


def lose_one(how: str) -> None:
    start(SMALL)
    nothing_in_a_folder()
    rank = dist.get_rank()
    big = torch.ones(4_000_000)
    if rank == 1 and how == "amid":  # in the middle of whatever runs then
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for step in range(100_000):
        if rank == 1 and how == "before" and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        work = comm.all_reduce(big, async_op=how == "amid")
        if work is not None:
            work.wait()


@pytest.mark.parametrize(("size", "how"), [(2, "amid"), (4, "amid"), (3, "before")])
def test_a_killed_rank_is_named_at_once(size: int, how: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RemoteError) as info:
        run_ranks(size, lose_one, how)
    failures = {f.rank: f for f in info.value.failures}
    assert len(failures) == size
    assert failures[1].what == "died of SIGKILL"
    for rank in failures.keys() - {1}:
        assert failures[rank].kind == "raised", failures[rank]
        assert "LostRankError" in failures[rank].what
        assert "rank 1 (process " in failures[rank].what
        assert ") has ended" in failures[rank].what
    assert time.monotonic() - begin < 45  # less than the pool's limit: nobody was hung


def one_ends_well() -> float:
    """A rank that has done its part may end while the others have not; and one that destroys the
    group has left.
    """
    start()
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    total = torch.ones(3)
    if rank < 2:
        comm.all_reduce(total, group=pair)
    if rank == 1:
        dist.destroy_process_group(pair)
        del pair
    elif rank == 0:
        with pytest.raises(
            CommError, match=r"all_reduce SUM of 3 torch.float32 failed, for rank 1 has destroyed"
        ):
            comm.all_reduce(total.clone(), group=pair)
        # and so does the next
        with pytest.raises(CommError, match="failed, for rank 1 has destroyed"):
            comm.all_reduce(total.clone(), group=pair)
        dist.destroy_process_group(pair)
    comm.all_reduce(total)  # the world's goes on
    return total.sum().item()


def test_a_rank_that_left_is_named_and_other_groups_go_on() -> None:
    assert run_ranks(2, one_ends_well) == [12.0] * 2


def differ(how: str) -> str:
    start()
    rank = dist.get_rank()
    if how == "late":
        segment = transport()
        renew()
        before, transports._timeout = transports._timeout, lambda group: 0.5
        comm.all_reduce(torch.ones(1))
        transports._timeout = before
        assert transport() is not segment
        if rank == 1:
            time.sleep(1.5)
    try:
        for _ in range(2):  # rank 1 finds what rank 0 had left there; but no second time
            comm.all_reduce(torch.ones(5 if how == "late" else 5 + rank))
    except CommError as error:
        return str(error)
    return ""


def test_ranks_that_call_different_collectives_or_come_too_late() -> None:
    first, second = run_ranks(2, differ, "size")
    assert (
        "rank 0: all_reduce SUM of 5 torch.float32 failed: rank 1 called all_reduce SUM of 6 "
        "torch.float32" in first
    )
    assert (
        "rank 1: all_reduce SUM of 6 torch.float32 failed: rank 0 called all_reduce SUM of 5 "
        "torch.float32" in second
    )
    first, second = run_ranks(2, differ, "late")
    assert "rank 1 has not come within 0.5 s" in first
    assert "rank 1 has not come within 0.5 s" in second


def interrupted() -> str:
    start()
    if dist.get_rank() == 1:
        time.sleep(1.0)
        try:
            comm.all_reduce(torch.ones(5))
        except CommError as error:
            return str(error)
        return ""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        comm.all_reduce(torch.ones(5))
    except KeyboardInterrupt:
        return "broken off"
    return ""


def test_ctrl_c_breaks_off_a_wait() -> None:
    first, second = run_ranks(2, interrupted)
    assert first == "broken off"
    assert "rank 0 was interrupted" in second or not second  # or it had come before


def guarded(name: str, *args: Any) -> Any:
    start()
    return getattr(core_checks("test_guard", ROOT / "plugins" / "comms_guard" / "tests"), name)(
        *args
    )


@pytest.mark.slow
def test_the_guard_sees_these_collectives_too() -> None:
    for off, on in zip(
        run_ranks(2, guarded, "everything", False),
        run_ranks(2, guarded, "everything", True),
        strict=True,
    ):
        assert all(
            torch.equal(a, b) if isinstance(a, Tensor) else a == b
            for a, b in zip(off, on, strict=True)
        )
    assert run_ranks(2, guarded, "slow", 1.2) == [[4.0] * 5] * 2
    for how, words in (
        (
            "label",
            [
                "rank 0: gradients of 'layer0' (all_reduce of 1000 float32)",
                "rank 1: gradients of 'layer1'",
            ],
        ),
        (
            "kind",
            [
                "rank 0: all_reduce of 1000 float32",
                "rank 1: all_gather_into_tensor of 2000 float32",
            ],
        ),
    ):
        with pytest.raises(RemoteError) as info:
            run_ranks(2, guarded, "disagree", how)
        assert len(info.value.failures) == 2
        for failure in info.value.failures:
            assert failure.kind != "hung"
            assert all(word in str(failure) for word in words), str(failure)


# -- between hosts ---------------------------------------------------------------------------------


def spread(layout: str) -> Callable[[Any, bool], GlooCollectives]:
    """Take rank i's host for ``layout[i]`` from here on."""

    def serve(group: Any, messages: bool) -> GlooCollectives:
        return GlooCollectives(
            group, messages, ours.open_segment, key=lambda: layout[dist.get_rank()]
        )

    comm.use_providers({("cpu", "gloo"): serve})
    return serve


def inside_hosts(layout: str) -> None:
    spread(layout)
    checks = core_checks("test_two_level", ROOT / "ops" / "comm_gloo" / "tests")
    checks.spread = lambda layout: (spread(layout), comm.open_transport(dist.group.WORLD))  # type: ignore
    checks.several_blocks(layout)
    rank = dist.get_rank()
    size = dist.get_world_size()
    alone = layout.count(layout[rank]) == 1
    assert (
        transport().inside is None if alone else isinstance(transport().inside, ours.SharedMemory)
    )
    lots = [torch.arange(3 * r + rank) + 100 * rank for r in range(size)]
    back = torch.empty(sum(3 * rank + r for r in range(size)), dtype=torch.int64)
    for async_op in (False, True):
        work = comm.all_to_all_single(
            back,
            torch.cat(lots),
            [3 * rank + r for r in range(size)],
            [len(t) for t in lots],
            async_op=async_op,
        )
        assert work is None or work.wait()
        assert torch.equal(
            back, torch.cat([torch.arange(3 * rank + r) + 100 * r for r in range(size)])
        )
    PROMISES["messages"](False)


@pytest.mark.parametrize(
    "layout", ["aabb", *(pytest.param(x, marks=pytest.mark.slow) for x in ("abab", "aaab"))]
)
def test_ranks_of_a_host_share_memory_in_groups_that_span_hosts(layout: str) -> None:
    run_ranks(len(layout), inside_hosts, layout)


# -- where it cannot be used -----------------------------------------------------------------------


def without(why: str) -> list[Any]:
    """Every rank goes on over the backend, and says why in the debug log."""
    rank = dist.get_rank()
    told: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_ops_cpu").addHandler(handler)
    logging.getLogger("ds_ops_cpu").setLevel(logging.DEBUG)
    before = ours.host_key, native, resource.getrlimit(resource.RLIMIT_FSIZE)

    def no_compiler() -> Any:
        from ds_core.errors import KernelError

        raise KernelError("g++ not found")

    if why == "host" and rank == 1:
        ours.host_key = lambda: "elsewhere"
    if why == "compiler" and rank == 1:
        vars(ours)["native"] = no_compiler
    if why == "room" and rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[2][1]))
    try:
        renew()
        total = torch.full((5,), rank + 1.0)
        comm.all_reduce(total)
        comm.all_reduce(total)
    finally:
        ours.host_key, vars(ours)["native"] = before[:2]
        resource.setrlimit(resource.RLIMIT_FSIZE, before[2])
        logging.getLogger("ds_ops_cpu").removeHandler(handler)
    assert transport() is None
    renew()  # the next test of these processes may ask again
    assert "/memfd:ds_core collectives" not in "".join(
        os.readlink(f"/proc/self/fd/{f}") for f in fds()
    )
    return [total.tolist(), told]


def fds() -> list[str]:
    return [f for f in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{f}")]


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("host", "rank 1 is on another host than rank 0"),
        ("compiler", "rank 1: KernelError: g++ not found"),
        ("room", "bytes of shared memory are not to be had: File too large"),
    ],
)
def test_where_one_rank_cannot_all_use_the_backend_and_say_why(why: str, words: str) -> None:
    for total, told in run_ranks(2, without, why):
        assert total == [6.0] * 5
        assert len(told) == 1
        assert (
            "collectives of ranks (0, 1) go through their backend, not shared memory: " in told[0]
        )
        assert words in told[0]


# -- training --------------------------------------------------------------------------------------


def offer(layout: str) -> str:
    """A plugin whose provider ``spread`` takes rank i's host for ``layout[i]``."""
    module: Any = ModuleType("spread_plugin")
    module.serve = spread(layout)
    entry = CollectivesEntry("spread_plugin:serve", device="cpu", backend="gloo", priority=-1)
    module.ds_collectives = lambda: {"spread": entry}
    sys.modules["spread_plugin"] = module
    return "spread_plugin"


def levels() -> bool:
    """Whether a group's collectives go in two levels."""
    used = [known.serving.get("cpu") for known in collectives._groups.values()]
    return any(isinstance(getattr(w, "transport", None), TwoLevel) for w in used)


def train(stage: int, provider: str, dtype: str) -> list[Any]:
    import ds_core

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 40), nn.ReLU(), nn.Linear(40, 7)
    )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "plugins": {"load": ["ds_zero.plugin", "ds_ops_cpu.plugin", offer("aabb")]},
        "zero_optimization": {
            "stage": stage,
            "param_persistence_threshold": 0,
            "reduce_bucket_size": 4000,
        },
        "collectives": provider,
        "bf16": {"enabled": dtype == "bf16"},
    }
    engine, *_ = ds_core.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(6):
        x = torch.randn(2, 40, generator=generator).to(next(iter(engine.module.parameters())).dtype)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    used = [known.serving.get("cpu") for known in collectives._groups.values()]
    assert any(isinstance(getattr(w, "transport", None), ours.SharedMemory) for w in used) == (
        provider == "shm"
    )
    assert levels() == (provider == "spread")
    engine.destroy()
    return losses


def train_experts(stage: int, provider: str) -> list[float]:
    moe = core_checks("test_moe_running", ROOT / "plugins" / "moe" / "tests")
    engine = moe.start(2, stage, collectives=provider, plugins={"load": [offer("abab")]})
    losses: list[float] = moe.steps(engine, 0, 4)
    assert levels() == (provider == "spread")
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    ("size", "dtype"), [(2, "fp32"), pytest.param(3, "bf16", marks=pytest.mark.slow)]
)
def test_training_is_that_over_gloo_bit_for_bit(size: int, dtype: str) -> None:
    for stage in (1, 2, 3):
        assert run_ranks(size, train, stage, "shm", dtype) == run_ranks(
            size, train, stage, "composed", dtype
        )


@pytest.mark.slow
def test_training_over_two_hosts_is_that_over_one() -> None:
    for stage in (1, 2, 3):
        ways = [run_ranks(4, train, stage, provider, "fp32") for provider in ("spread", "composed")]
        assert all(mine == pytest.approx(flat, rel=1e-5) for mine, flat in zip(*ways, strict=True))
    assert run_ranks(4, train_experts, 1, "spread")[0] == pytest.approx(
        run_ranks(4, train_experts, 1, "composed")[0]
    )
