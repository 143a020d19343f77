"""The three sections of ds-sequence-parallel: their sizes agree, and the mesh follows."""

from __future__ import annotations

from typing import Any

import pytest

from ds_core.compose import compose
from ds_core.errors import ConfigError
from ds_core.mesh import plan_mesh


def composed(**more: Any) -> Any:
    return compose({"train_micro_batch_size_per_gpu": 1, **more})


def mesh_of(world: int, **more: Any) -> Any:
    chosen = composed(**more)
    axes = [axis for answer in chosen.plugins.ask("ds_mesh_axes", config=chosen.config) for axis in answer.value]
    return plan_mesh(axes, world, 0)


@pytest.mark.parametrize(
    "more",
    [
        {"sequence_parallel": {"size": 2}},
        {"sequence_parallel_size": 2},
        {"sequence_parallel": {}, "sequence_parallel_size": 2},
        {"sequence_parallel": {"size": 2}, "sequence_parallel_size": 2},
    ],
)
def test_either_key_gives_the_axis(more: dict[str, Any]) -> None:
    mesh = mesh_of(4, **more)
    assert (mesh.size("sp"), mesh.size("dp")) == (2, 4)


def test_sizes_that_disagree_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"sequence_parallel.size.*sequence_parallel_size is 4"):
        composed(sequence_parallel={"size": 2}, sequence_parallel_size=4)


def test_gradients_travel_in_one_dtype() -> None:
    composed(seq_parallel_communication_data_type="fp32")
    composed(seq_parallel_communication_data_type="bfloat16", communication_data_type="bf16")
    with pytest.raises(ConfigError, match='set "communication_data_type": "bf16"'):
        composed(seq_parallel_communication_data_type="bf16")
