"""Partitions and topologies: the documents' golden values."""

from __future__ import annotations

import pytest
import torch
from ds_pipeline.layers.balance import balanced, partition, uniform
from ds_pipeline.layers.specs import LayerSpec, sections_of
from ds_pipeline.layers.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ds_core.errors import UsageError


@pytest.mark.parametrize(
    ("count", "parts", "bounds"),
    [(10, 4, [0, 3, 6, 8, 10]), (7, 3, [0, 3, 5, 7]), (3, 5, [0, 1, 2, 3, 3, 3])],
)
def test_uniform(count: int, parts: int, bounds: list[int]) -> None:
    assert uniform(count, parts) == bounds


@pytest.mark.parametrize(
    ("weights", "parts", "bounds"),
    [
        ([1] * 7, 3, [0, 3, 5, 7]),
        ([1, 1, 1, 1, 10, 1], 3, [0, 4, 5, 6]),
        ([5, 1, 1, 1, 5], 2, [0, 3, 5]),
        ([1, 2, 3, 4, 5, 6], 3, [0, 3, 5, 6]),
        ([0, 1, 0, 1, 0, 1, 0, 1], 2, [0, 5, 8]),
        ([3, 1], 4, [0, 1, 2, 2, 2]),
    ],
)
def test_balanced(weights: list[float], parts: int, bounds: list[int]) -> None:
    assert balanced(weights, parts) == bounds


@given(st.lists(st.integers(0, 9), min_size=1, max_size=14), st.integers(1, 6))
def test_every_layer_is_somewhere(weights: list[float], parts: int) -> None:
    for bounds in (balanced(weights, parts), uniform(len(weights), parts)):
        assert len(bounds) == parts + 1
        assert bounds == sorted(bounds)
        assert (bounds[0], bounds[-1]) == (0, len(weights))


def test_methods() -> None:
    names = ["Linear", "ReLU", "Linear", "<lambda>", "Linear", "Linear"]

    def never() -> list[float]:
        raise AssertionError("not asked for")

    assert partition("TYPE:linear", names, 2, never, never) == balanced([1, 0, 1, 0, 1, 1], 2)
    assert partition("type:lin|relu", names, 2, never, never) == balanced([1, 1, 1, 0, 1, 1], 2)
    assert partition("Uniform", names, 2, never, never) == [0, 3, 6]
    assert partition("parameters", names, 2, lambda: [9, 0, 1, 1, 1, 1], never) == balanced(
        [9, 0, 1, 1, 1, 1], 2
    )
    assert partition("profile", names, 2, never, lambda: [1, 1, 1, 1, 1, 9]) == balanced(
        [1, 1, 1, 1, 1, 9], 2
    )
    with pytest.raises(ValueError, match="matches no layer; there are <lambda>, Linear, ReLU"):
        partition("type:Conv", names, 2, never, never)
    with pytest.raises(ValueError, match="unknown; use 'uniform'"):
        partition("best", names, 2, never, never)


def test_topology_is_row_major() -> None:
    topology = ProcessTopology(["x", "y"], [2, 3])
    assert topology.get_rank(x=0, y=1) == 1
    assert topology.get_coord(4) == (1, 1)
    assert topology.get_axis_names() == ["x", "y"]
    assert (topology.get_dim("y"), topology.get_dim("z"), topology.world_size()) == (3, 0, 6)
    assert topology.get_axis_list("x", 1) == [3, 4, 5]
    assert topology.filter_match(y=2) == [2, 5]
    assert topology.get_axis_comm_lists("z") == []
    assert topology.get_rank_repr(4, omit_axes=[]) == "x_01-y_01"
    for wrong in (
        lambda: topology.get_rank(x=0),
        lambda: topology.get_rank(x=0, y=3),
        lambda: topology.get_coord(6),
    ):
        with pytest.raises(ValueError, match="rank"):
            wrong()
    with pytest.raises(ValueError, match="names once"):
        ProcessTopology(["x", "x"], [2, 2])


def test_topology_golden() -> None:
    topology = PipeModelDataParallelTopology(2, 2, 2)
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [topology.get_rank_repr(r) for r in range(4)] == ["model_00", "model_01"] * 2
    assert PipeDataParallelTopology(2, 2).get_axis_comm_lists("pipe") == [[0, 2], [1, 3]]


def test_grid_answers_as_an_mpu() -> None:
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(2, 2, 2), rank=5)
    assert (
        grid.get_pipe_parallel_rank(),
        grid.get_data_parallel_rank(),
        grid.get_model_parallel_rank(),
    ) == (1, 0, 1)
    sizes = (grid.get_pipe_parallel_world_size(), grid.get_data_parallel_world_size())
    assert (*sizes, grid.get_slice_parallel_world_size()) == (2, 2, 2)
    assert grid.stage_to_global(0) == 1
    assert grid.stage_to_global(0, data=1) == 3
    assert grid.is_last_stage
    assert not grid.is_first_stage
    with pytest.raises(UsageError, match=r"once ds_core.initialize"):
        grid.get_pipe_parallel_group()


class Asking(nn.Module):
    """A layer that asks for a section."""

    made = 0

    def __init__(self, size: int) -> None:
        super().__init__()
        Asking.made += 1
        self.ds_sections = {"own": {"size": size}}


def test_sections_are_those_of_the_layers_of_all_stages() -> None:
    specs = [nn.Linear(2, 2), *(LayerSpec(Asking, 4) for _ in range(8)), torch.tanh]
    assert sections_of(specs) == {"own": {"size": 4}}
    assert Asking.made == 1, "one of those that are built alike"
