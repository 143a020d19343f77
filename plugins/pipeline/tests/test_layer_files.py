"""Files of single layers: names, who writes them, and that plain torch reads the weights back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ds_zero  # noqa: F401  - this needs it installed
import pytest
import torch
from ds_pipeline import LayerSpec, PipelineModule
from ds_testing import RemoteError, run_ranks
from torch import Tensor, nn

import ds_core

WIDTH = 4


class Engine:
    """A checkpoint engine of the script's."""

    def save(self, state_dict: dict[str, Tensor], path: str) -> None:
        torch.save(state_dict, path)


def half(x: Tensor) -> Tensor:
    return x / 2


def built(stage: int = 0) -> Any:
    specs = [
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        half,
        *(LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(2)),
    ]
    options: Any = {
        "loss_fn": nn.functional.mse_loss,
        "partition_method": "uniform",
        "seed_layers": True,
    }
    model = PipelineModule(specs, num_stages=2, **options)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "param_persistence_threshold": 0},
    }
    return ds_core.initialize(model=model, config=config)[0]


def writes(folder: str) -> tuple[str, list[str], dict[str, list[Any]]]:
    engine = built()
    model = engine.module
    for number, layer in model.layers.items():
        if number == "3":
            layer.bias.requires_grad_(False)
    model.save_state_dict(folder, Engine(), exclude_frozen_params=True)
    torch.distributed.barrier()
    weights = {number: layer.weight.tolist() for number, layer in model.layers.items()}
    names = [path for index in range(2) for path in model.ckpt_layer_path_list(folder, index)]
    found = model.ckpt_prefix(folder, "step5"), names, weights
    engine.destroy()
    return found


def test_each_layer_has_a_file(tmp_path: Path) -> None:
    told = run_ranks(4, writes, str(tmp_path))
    assert [prefix for prefix, _, _ in told] == [
        f"{tmp_path}/step5/module-pipe_0{stage}" for stage in (0, 0, 1, 1)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"layer_0{i}-model_states.pt" for i in (0, 2, 3)
    ]
    assert told[0][1] == [f"{tmp_path}/layer_00-model_states.pt"]
    assert told[2][1] == [f"{tmp_path}/layer_0{i}-model_states.pt" for i in (2, 3)]
    for _, _, weights in told:
        for number, weight in weights.items():
            state = torch.load(tmp_path / f"layer_0{number}-model_states.pt", weights_only=True)
            assert state["weight"].tolist() == weight
            assert ("bias" in state) is (number != "3")


def at_stage_3(folder: str) -> None:
    built(3).module.save_state_dict(folder, Engine())


def test_parts_of_weights_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="is not here whole"):
        run_ranks(4, at_stage_3, str(tmp_path))
    assert not list(tmp_path.iterdir())
