"""Collectives in two levels: ranks of this machine that are taken for spread over several hosts."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ds_comm_gloo import GlooCollectives, two_level
from ds_comm_gloo.two_level import TwoLevel
from ds_testing import RemoteError, run_ranks
from ds_testing.kits.parallel.collectives import CHECKS, OPS, contribution
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_core import comm
from ds_core.comm import collectives

EXACT = (torch.float32, torch.bfloat16, torch.float16, torch.int32)


def spread(layout: str, opener: Any = None) -> None:
    """Take rank i's host for ``layout[i]`` from here on."""

    def serve(group: ProcessGroup, messages: bool) -> GlooCollectives:
        return GlooCollectives(group, messages, opener, key=lambda: layout[dist.get_rank()])

    comm.use_providers({("cpu", "gloo"): serve})
    assert dist.group.WORLD is not None
    comm.open_transport(dist.group.WORLD)


def transport(group: Any = None) -> Any:
    return (
        collectives._groups[dist.group.WORLD if group is None else group].serving["cpu"].transport
    )  # type: ignore


def checked(layout: str, checks: list[str]) -> None:
    spread(layout)
    assert isinstance(transport(), TwoLevel)
    for check in checks:
        CHECKS[check](False)


@pytest.mark.fast_cases("aab-checks0")
@pytest.mark.parametrize(
    ("layout", "checks"),
    [
        (
            "aab",
            [
                "averages_at_the_edge_of_fp16",
                "gathers_in_place",
                "many_under_way",
                "groups",
                "objects",
            ],
        ),
        ("abab", ["strides_and_parameters", "other_collectives", "messages", "groups"]),
        *(
            pytest.param(layout, list(CHECKS), marks=pytest.mark.slow)
            for layout in ("aab", "aabb", "abab", "aaab", "abca")
        ),
    ],
)
def test_holds_what_providers_promise(layout: str, checks: list[str]) -> None:
    run_ranks(len(layout), checked, layout, checks)


def by_host(parts: list[Tensor], layout: str, op: str) -> Tensor:
    """The reduction host by host, in fp32 for 16-bit floats, rounded once."""
    dtype = parts[0].dtype
    wide = [p.float() if dtype.is_floating_point else p for p in parts]
    sums = [
        sum(wide[i] for i, h in enumerate(layout) if h == host) for host in dict.fromkeys(layout)
    ]
    total = sum(sums[1:], start=sums[0])
    if op == "AVG":
        total = (
            total / len(parts)
            if dtype.is_floating_point
            else torch.div(total, len(parts), rounding_mode="trunc")
        )
    return total.to(dtype)  # type: ignore[union-attr]


def several_blocks(layout: str) -> None:
    before = (two_level.MESSAGE, two_level.DIRECT)
    two_level.MESSAGE = 1 << 12
    two_level.DIRECT = 1 << 10
    rank = dist.get_rank()
    size = len(layout)
    spread(layout)
    try:
        for turn, (dtype, length) in enumerate((d, n) for d in EXACT for n in (1, 250, 9_001)):
            op = ("SUM", "AVG")[turn % 2]
            async_op = turn % 3 == 0
            whole = [contribution(length * size, dtype, r) for r in range(size)]
            total = whole[rank].clone()
            before_it = whole[rank].clone()
            part = torch.empty(length, dtype=dtype)
            gathered = torch.empty(length * size, dtype=dtype)
            works = [
                comm.all_reduce(total, OPS[op], async_op=async_op),
                comm.reduce_scatter_tensor(part, whole[rank], OPS[op], async_op=async_op),
            ]
            for work in works:
                assert work is None or work.wait()
            wanted = by_host(whole, layout, op)
            assert torch.equal(total, wanted), f"all_reduce {length} {dtype} {op}"
            assert torch.equal(part, wanted.view(size, -1)[rank]), (
                f"reduce_scatter {length} {dtype} {op}"
            )
            assert torch.equal(whole[rank], before_it), "reduce_scatter changed its input"
            comm.all_gather_into_tensor(gathered, part)
            assert torch.equal(gathered, wanted), f"all_gather {length} {dtype}"
            sent = whole[rank].clone()
            comm.broadcast(sent, turn % size)
            assert torch.equal(sent, whole[turn % size]), (
                f"broadcast {length} {dtype} from {turn % size}"
            )
        assert isinstance(transport(), TwoLevel)
    finally:
        two_level.MESSAGE, two_level.DIRECT = before


@pytest.mark.fast_cases("abab")
@pytest.mark.parametrize("layout", ["aabb", "abab", "aaab", "abca"])
def test_bits_of_several_blocks(layout: str) -> None:
    run_ranks(4, several_blocks, layout)


def where_it_is_used(layouts: list[str]) -> list[str]:
    kinds = []
    for layout in layouts:
        spread(layout)
        kinds.append(type(transport()).__name__)
    return kinds


def test_one_host_or_one_rank_on_each_has_one_level() -> None:
    assert run_ranks(3, where_it_is_used, ["aaa", "abc", "aba"])[0] == [
        "NoneType",
        "NoneType",
        "TwoLevel",
    ]


def lose_one() -> None:
    spread("aabb")
    big = torch.ones(1_000_000)
    for step in range(1000):
        if dist.get_rank() == 3 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(big)


def test_a_killed_rank_of_another_host_is_named() -> None:
    with pytest.raises(RemoteError) as info:
        run_ranks(4, lose_one)
    told = {f.rank: f.what for f in info.value.failures}
    assert told[3] == "died of SIGKILL"
    assert re.search(
        r"LostRankError: rank 1 on \S+: a message (to|from) rank 3 on \S+ failed", told[1]
    )


def disagree(how: str) -> None:
    spread("aabb")
    path = Path(__file__).parents[3] / "plugins" / "comms_guard" / "tests" / "test_guard.py"
    spec = importlib.util.spec_from_file_location("test_guard", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.disagree(how)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("large", ["rank 0: weights of 'layer0'", "rank 3: weights of 'layer3'"]),
        pytest.param("label", ["rank 0: gradients of 'layer0'"], marks=pytest.mark.slow),
        pytest.param(
            "kind",
            ["ranks 1, 2, 3: all_gather_into_tensor of 4000 float32"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_guard_sees_that_ranks_disagree(how: str, words: list[str]) -> None:
    with pytest.raises(RemoteError) as info:
        run_ranks(4, disagree, how)
    for failure in info.value.failures:
        assert failure.kind != "hung"
        assert all(word in str(failure) for word in words), str(failure)
