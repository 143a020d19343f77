"""Mesh arithmetic: layout, aliases, rank lists, and errors with the numbers."""

from __future__ import annotations

import math

import pytest
from ds_testing import run_ranks
from hypothesis import given
from hypothesis import strategies as st

from ds_core.comm import ALONE
from ds_core.entries import Axis
from ds_core.errors import ConfigError
from ds_core.mesh import plan_mesh


def test_dp_takes_what_is_left():
    mesh = plan_mesh([Axis("pp", 2)], 8, 5)
    assert mesh.describe() == {"dp": 4, "pp": 2}
    assert mesh.coord == {"pp": 1, "dp": 2}
    assert mesh.ranks("dp") == [1, 3, 5, 7]
    assert mesh.ranks("pp") == [4, 5]
    assert mesh.index("dp") == 2


def test_outermost_axes_are_far_apart_and_others_next_to_each_other():
    mesh = plan_mesh(
        [Axis("tp", 2), Axis("pp", 2, outermost=True), Axis("ep", 2, inside="dp")], 16, 11
    )
    assert mesh.describe() == {"pp": 2, "edp": 2, "ep": 2, "tp": 2}
    assert mesh.ranks("pp") == [3, 11]
    assert mesh.ranks("dp") == [9, 11, 13, 15]
    assert mesh.ranks("tp") == [10, 11]


def test_ranks_that_share_their_samples_count_once():
    mesh = plan_mesh(
        [Axis("ep", 2, inside="dp"), Axis("sp", 2, inside="dp", same_batch=True)], 8, 5
    )
    assert (mesh.size("dp"), mesh.size("batch")) == (8, 4)
    assert [
        plan_mesh([Axis("sp", 2, inside="dp", same_batch=True)], 4, r).index("batch")
        for r in range(4)
    ] == [
        0,
        0,
        1,
        1,
    ]
    assert mesh.replicas(()) == ("edp", "ep", "sp")
    assert plan_mesh([], 3, 1).ranks("batch") == [0, 1, 2]


def test_folded_axis_splits_dp_and_keeps_the_alias():
    mesh = plan_mesh([Axis("ep", 2, inside="dp")], 4, 3)
    assert mesh.describe() == {"edp": 2, "ep": 2}
    assert mesh.size("dp") == 4
    assert mesh.ranks("dp") == [0, 1, 2, 3]
    assert mesh.ranks("ep") == [2, 3]
    assert mesh.replicas({"ep"}) == ("edp",)
    assert mesh.replicas(()) == ("edp", "ep")


@pytest.mark.parametrize(
    ("ep", "size", "block", "edp"), [(1, 4, 4, 2), (2, 4, 2, 2), (4, 4, 1, 2), (2, 8, 4, 1)]
)
def test_an_axis_around_others_counts_their_ranks(ep, size, block, edp):
    mesh = plan_mesh(
        [Axis("ep", ep, inside="dp"), Axis("block", size, inside="dp", outermost=True)], 8, 5
    )
    assert mesh.describe() == {"edp": edp, "block": block, "ep": ep}
    assert mesh.ranks("block", "ep") == [r for r in range(8) if r // size == 5 // size]
    assert mesh.size("dp") == mesh.size("batch") == 8


def test_axes_of_size_one_need_no_group():
    mesh = plan_mesh([Axis("tp", 1)], 1, 0)
    assert mesh.group("dp") is ALONE
    assert mesh.group("tp", "dp") is ALONE
    assert mesh.size("dp", "tp") == 1


def test_unknown_axis_names_the_known_ones():
    with pytest.raises(KeyError, match="no mesh axis"):
        plan_mesh([], 2, 0).size("sp")


@pytest.mark.parametrize(
    ("axes", "world", "words"),
    [
        ([Axis("pp", 3)], 4, ["pp 3", "there are 4", "multiple of 3"]),
        ([Axis("ep", 3, inside="dp")], 8, ["ep 3 must divide dp 8", "use 1, 2, 4, 8"]),
        ([Axis("pp", 2), Axis("pp", 2)], 4, ["'pp' is declared twice"]),
        ([Axis("tp", 0)], 4, ["'tp' has size 0"]),
        ([Axis("ep", 2, inside="tp")], 4, ["folds inside 'tp'"]),
        (
            [Axis("block", 3, inside="dp", outermost=True)],
            4,
            ["block 3 must divide dp 4", "use 1, 2, 4"],
        ),
        (
            [Axis("ep", 2, inside="dp"), Axis("block", 3, inside="dp", outermost=True)],
            12,
            ["block 3 x ep 2 must divide dp 12", "use 2, 4, 6, 12"],
        ),
        (
            [Axis("ep", 4, inside="dp"), Axis("block", 2, inside="dp", outermost=True)],
            8,
            ["use 4, 8"],
        ),
    ],
)
def test_errors_carry_the_numbers(axes, world, words):
    with pytest.raises(ConfigError) as caught:
        plan_mesh(axes, world, 0)
    for word in words:
        assert word in str(caught.value)


@given(
    st.lists(st.sampled_from([1, 2, 3]), min_size=0, max_size=3),
    st.integers(1, 3),
    st.integers(1, 2),
)
def test_every_rank_is_in_exactly_one_row_of_every_axis(sizes, dp, ep):
    axes = [Axis(f"a{i}", s) for i, s in enumerate(sizes)] + [Axis("ep", ep, inside="dp")]
    world = math.prod(sizes) * dp * ep
    meshes = [plan_mesh(axes, world, r) for r in range(world)]
    for names in [
        ("dp",),
        ("ep",),
        *((f"a{i}",) for i in range(len(sizes))),
        ("dp", *(f"a{i}" for i in range(len(sizes)))),
    ]:
        rows = [tuple(m.ranks(*names)) for m in meshes]
        for rank, row in enumerate(rows):
            assert rank in row
            assert len(row) == meshes[rank].size(*names)
            assert all(rows[other] == row for other in row)


def _sum_over(axes):
    import torch

    from ds_core import comm

    mesh = plan_mesh([Axis("pp", 2), Axis("ep", 2, inside="dp")], comm.world_size(), comm.rank())
    mesh.build_groups()
    value = torch.tensor([float(comm.rank())])
    comm.all_reduce(value, group=mesh.group(*axes))
    return [value.item(), float(sum(mesh.ranks(*axes)))]


@pytest.mark.parametrize("axes", [["pp"], ["ep"], ["dp"], ["pp", "dp"], ["edp"]])
def test_groups_hold_the_ranks_that_the_arithmetic_says(axes):
    for got, expected in run_ranks(4, _sum_over, axes):
        assert got == expected
