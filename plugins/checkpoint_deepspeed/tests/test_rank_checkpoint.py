"""`deepspeed.checkpoint`: folders of DeepSpeed's as fewer ranks see them."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from ds_checkpoint_deepspeed.ranks import rank_maps
from ds_checkpoint_deepspeed.ranks.rank_checkpoint import DeepSpeedCheckpoint, ZeROCheckpoint
from ds_checkpoint_deepspeed.ranks.rank_states import (
    get_files_with_prefix,
    merge_state,
    sort_zero_files,
)
from torch import Tensor

from ds_core.errors import CheckpointError

HERE = Path(__file__).parent / "deepspeed"
PP = 2
TP = 2
DP = 2
NORM = "input_layernorm.weight"
ROWS = "mlp.dense_h_to_4h.weight"
COLUMNS = "mlp.dense_4h_to_h.weight"


def layer(number: int) -> dict[str, Tensor]:
    """The whole weights of one layer."""
    square = torch.arange(16.0).view(4, 4) + 100 * number
    return {ROWS: square, COLUMNS: square + 1, NORM: square[0]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As Megatron-DeepSpeed writes: embeddings, four layers and a norm, by 2 stages, 2 tensor and 2
    data ranks.
    """
    for rank in range(TP):
        files = {
            1: {"word_embeddings.weight": torch.arange(8.0).view(4, 2).chunk(TP)[rank]},
            8: {"weight": torch.ones(2)},
        }
        for number in range(3, 7):
            whole = layer(number)
            columns = whole[COLUMNS].chunk(TP, 1)[rank]
            files[number] = {ROWS: whole[ROWS].chunk(TP)[rank], COLUMNS: columns, NORM: whole[NORM]}
        for number, state in files.items():
            torch.save(
                OrderedDict(state),
                tmp_path / f"layer_{number:02d}-model_{rank:02d}-model_states.pt",
            )
    for place in range(PP * TP):
        model = {
            "iteration": 9,
            "args": argparse.Namespace(num_layers=4),
            "checkpoint_info": {"original_vocab_size": 4},
        }
        torch.save(
            {**model, "rng": torch.full((1,), place)},
            tmp_path / f"mp_rank_{place:02d}_model_states.pt",
        )
        for dp in range(DP):
            # Five elements a rank, of which the last data-parallel rank's fifth fills up.
            moment = torch.arange(5.0) + 10 * place + 5 * dp
            optimizer = {
                "base_optimizer_state": {
                    "state": {0: {"exp_avg": moment, "step": torch.tensor(3.0)}}
                },
                "group_paddings": [dp],
                "partition_count": [DP],
            }
            name = f"zero_pp_rank_{dp}_mp_rank_{place:02d}_optim_states.pt"
            torch.save({"optimizer_state_dict": optimizer, "param_shapes": [{}]}, tmp_path / name)
    return tmp_path


def test_the_layers_of_fewer_ranks(folder: Path) -> None:
    """What Megatron-DeepSpeed's tools/convert_checkpoint/deepspeed_to_megatron.py calls."""
    found = DeepSpeedCheckpoint(folder, tp_degree=1, pp_degree=1)
    assert (found.original_world_size, found.world_size, found.layer_count) == (8, 2, 6)
    assert torch.equal(
        found.get_embedding_state(0)["word_embeddings.weight"], torch.arange(8.0).view(4, 2)
    )
    states = found.get_transformer_state(0, 0)
    for number, state in zip(range(3, 7), states, strict=True):
        assert all(torch.equal(state[name], tensor) for name, tensor in layer(number).items())
    assert found.get_final_norm_state(0)["weight"].tolist() == [1, 1]
    assert (found.get_iteration(), found.get_checkpoint_info()["original_vocab_size"]) == (9, 4)
    found.get_args().tensor_model_parallel_size = 1
    assert found.get_args().num_layers == 4
    assert found.get_2d_parallel_state(0, 0)["rng"].tolist() == [0, 1, 2, 3]


def test_the_layers_as_they_were_written(folder: Path) -> None:
    found = DeepSpeedCheckpoint(folder)
    assert (found.pp_degree, found.tp_degree, found.dp_degree) == (PP, TP, DP)
    assert (
        not found.is_change_tp_degree()
        and not found.is_change_pp_degree()
        and not found.is_change_dp_degree()
    )
    second = found.get_transformer_state(1, 1)
    assert [s[NORM][0].item() for s in second] == [500, 600]
    assert torch.equal(second[0][COLUMNS], layer(5)[COLUMNS][:, 2:])
    assert found.get_pp_transformer_map(0) == ["layer_03", "layer_04"]


def test_the_optimizer_of_one_rank(folder: Path) -> None:
    found = DeepSpeedCheckpoint(folder)
    state = found.get_zero_checkpoint_state(pp_index=1, tp_index=0, dp_index=1)
    assert state["optimizer_state_dict"]["base_optimizer_state"]["state"][0][
        "exp_avg"
    ].tolist() == [25, 26, 27, 28]
    assert "param_shapes" not in state
    one = DeepSpeedCheckpoint(folder, dp_degree=1).get_zero_checkpoint_state(
        pp_index=1, tp_index=0, dp_index=0
    )
    moments = one["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"]
    assert moments.tolist() == [20, 21, 22, 23, 24, 25, 26, 27, 28]
    assert one["optimizer_state_dict"]["partition_count"] == [1]
    assert one["optimizer_state_dict"]["group_paddings"] == [0]


@pytest.mark.parametrize(
    ("name", "degrees"), [("fp32-2/three", (1, 1, 2)), ("bf16-1/three", (1, 1, 2))]
)
def test_what_deepspeed_wrote(name: str, degrees: tuple[int, int, int]) -> None:
    found = DeepSpeedCheckpoint(HERE / name)
    assert (found.pp_degree, found.tp_degree, found.dp_degree) == degrees
    names = set()
    for rank in range(degrees[2]):
        optimizer = found.get_zero_checkpoint_state(0, 0, rank)["optimizer_state_dict"]
        for name, place in optimizer["param_slice_mappings"][0].items():
            names.add(name)
            assert place.start + place.numel <= len(
                optimizer["base_optimizer_state"]["state"][0]["exp_avg"]
            )
    shapes = found.get_checkpoint_info("param_shapes")[0]
    assert names == set(shapes)


def test_maps_of_ranks() -> None:
    places = rank_maps.reshape_meg_2d_parallel(2, 4, 1, 2)
    assert places.map == {"0,0": [0, 1, 4, 5], "0,1": [2, 3, 6, 7]}
    maps = rank_maps.model_3d_desc(2, 2, 2).reshape(rank_maps.model_3d_desc(1, 2, 1))
    assert [m.map for m in maps] == [{"0,0": [0, 4, 2, 6], "0,1": [1, 5, 3, 7]}]
    assert rank_maps.get_mpu_ranks(2, 4, 2)[2][:4] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert rank_maps.get_mpu_ranks(2, 4, 2)[1] == [
        [0, 1, 4, 5, 8, 9, 12, 13],
        [2, 3, 6, 7, 10, 11, 14, 15],
    ]
    assert rank_maps.model_3d_desc(1, 2, 1).is_valid(0, 2, 0)[0] is False


def test_states_and_files() -> None:
    merged = merge_state({"a": [torch.ones(1)], "n": 1}, {"a": [torch.zeros(1)], "n": 2, "b": 3})
    assert merged["a"][0].tolist() == [1, 0] and (merged["n"], merged["b"]) == (1, 3)
    with pytest.raises(ValueError, match="a int and a str"):
        merge_state(1, "1")
    files = [f"d/zero_pp_rank_{dp}_mp_rank_00_optim_states.pt" for dp in (10, 2)]
    assert sort_zero_files(files, "zero_pp_rank_") == files[::-1]
    ranks = [f"mp_rank_{rank:02d}_model_states.pt" for rank in (2, 11, 100)]
    assert get_files_with_prefix(ranks[::-1], "mp_rank_") == ranks


def test_what_cannot_be_read(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(CheckpointError, match="TP cannot grow from 2 to 4"):
        DeepSpeedCheckpoint(folder, tp_degree=4)
    (folder / "zero_pp_rank_1_mp_rank_03_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="7 ZeRO files of 2 stages of 2 ranks"):
        DeepSpeedCheckpoint(folder)
    ours = tmp_path_factory.mktemp("ours")
    (ours / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="export-deepspeed"):
        DeepSpeedCheckpoint(ours)
    with pytest.raises(CheckpointError, match="is no folder"):
        ZeROCheckpoint(ours / "none")
