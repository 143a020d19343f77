"""The three sections of dscore-sequence-parallel: their sizes agree, and the mesh follows."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from ds_core.errors import ConfigError, UsageError
from ds_core.mesh import plan_mesh
from ds_core.setup.compose import compose


def composed(**more: Any) -> Any:
    return compose({"train_micro_batch_size_per_gpu": 1, **more})


def mesh_of(world: int, **more: Any) -> Any:
    chosen = composed(**more)
    axes = [
        axis
        for answer in chosen.plugins.ask("ds_mesh_axes", config=chosen.config)
        for axis in answer.value
    ]
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
    import ds_core

    for given in ({"sequence_parallel": {"size": 4}}, {"sequence_parallel_size": 4}):
        config = {"train_micro_batch_size_per_gpu": 1, **given}
        with pytest.raises(ConfigError, match=r"sequence_parallel_size is 2|divide"):
            ds_core.initialize(model=nn.Linear(1, 1), config=config, mesh_param=(1, 2))
    for wrong in ((1,), (1, 0), (1, 2.0), (1, 2, 3)):
        with pytest.raises(UsageError, match="mesh_param is \\(data, sequence\\), two sizes"):
            ds_core.initialize(
                model=nn.Linear(1, 1), config={"train_batch_size": 1}, mesh_param=wrong
            )
    with pytest.raises(ConfigError, match=r"sequence_parallel.size.*sequence_parallel_size is 4"):
        composed(sequence_parallel={"size": 2}, sequence_parallel_size=4)


def test_gradients_travel_in_one_dtype() -> None:
    composed(seq_parallel_communication_data_type="fp32")
    composed(seq_parallel_communication_data_type="bfloat16", communication_data_type="bf16")
    with pytest.raises(ConfigError, match='set "communication_data_type": "bf16"'):
        composed(seq_parallel_communication_data_type="bf16")
