"""`deepspeed.runtime.state_dict_factory`: files of Megatron's ranks, loaded by more and by fewer
ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_checkpoint_deepspeed.ranks.state_dict_loaders import MegatronSDLoader, SDLoaderFactory
from torch import Tensor

from ds_core.errors import CheckpointError, ConfigError

HEADS = 4
SIZE = 2
HIDDEN = HEADS * SIZE
LAYER = "transformer.layers.0."


def qkv(heads: range, version: float) -> Tensor:
    """Rows of the queries, keys and values of some heads; a row's number says which of a whole
    tensor it is.
    """
    rows = torch.arange(3 * HIDDEN, dtype=torch.float32).view(3, HEADS, SIZE)[:, list(heads)]
    order = {0: (0, 1, 2), 1.0: (1, 2, 0), 2.0: (1, 0, 2)}[version]
    return rows.permute(order).reshape(-1, 1).expand(-1, HIDDEN).clone()


def weights(rank: int, ranks: int, version: float) -> dict[str, Tensor]:
    """What one of `ranks` has of a layer."""

    def cut(tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(ranks, dim)[rank].clone()

    square = torch.arange(HIDDEN * HIDDEN, dtype=torch.float32).view(HIDDEN, HIDDEN)
    each = HEADS // ranks
    return {
        "word_embeddings.weight": cut(square, 0),
        LAYER + "attention.query_key_value.weight": qkv(
            range(rank * each, (rank + 1) * each), version
        ),
        LAYER + "attention.query_key_value.bias": qkv(
            range(rank * each, (rank + 1) * each), version
        )[:, 0].clone(),
        LAYER + "attention.dense.weight": cut(square + 1, 1),
        LAYER + "attention.dense.bias": square[0].clone(),
        LAYER + "mlp.dense_h_to_4h.weight": cut(square + 2, 0),
        LAYER + "mlp.dense_h_to_4h.bias": cut(square[1], 0),
        LAYER + "mlp.dense_4h_to_h.weight": cut(square + 3, 1),
    }


def written(folder: Path, ranks: int, version: float) -> list[str]:
    paths = [str(folder / f"mp_rank_{rank:02d}_model_states.pt") for rank in range(ranks)]
    for rank, path in enumerate(paths):
        rest = {"mp_world_size": ranks, "iteration": 7, "args": argparse.Namespace(num_layers=1)}
        torch.save(
            {"module": weights(rank, ranks, version), "checkpoint_version": version, **rest}, path
        )
    return paths


@pytest.mark.fast_cases("1-1-1.0", "2-1-2.0", "4-1-0", "4-2-2.0", "4-4-2.0")
@pytest.mark.parametrize("version", [0, 1.0, 2.0])
@pytest.mark.parametrize("files", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_gets_its_weights(tmp_path: Path, files: int, ranks: int, version: float) -> None:
    loader = SDLoaderFactory.get_sd_loader(written(tmp_path, files, version))
    for rank in range(ranks):
        path, state, (scales, merged) = loader.load(ranks, rank)
        wanted = weights(rank, ranks, version)
        assert state["module"].keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(state["module"][name], tensor), name
        assert path == loader.ckpt_list[rank * files // ranks]
        assert (scales, merged, state["iteration"]) == (None, max(1, files // ranks), 7)
        state["args"].num_layers = 2  # an object with attributes, as it was saved


def test_files_of_layers_are_whole_state_dicts(tmp_path: Path) -> None:
    paths = [tmp_path / f"layer_03-model_0{rank}-model_states.pt" for rank in range(2)]
    for rank, path in enumerate(paths):
        torch.save(weights(rank, 2, 2.0), path)
    loader = SDLoaderFactory.get_sd_loader_json(
        {"type": "Megatron", "checkpoints": paths, "version": 2.0}
    )
    _, state, _ = loader.load(1, 0, module_key=None, is_pipe_parallel=True)
    assert torch.equal(state[LAYER + "attention.query_key_value.weight"], qkv(range(HEADS), 2.0))


def test_model_files_of_a_pipeline_are_the_same_for_all_ranks(tmp_path: Path) -> None:
    loader = MegatronSDLoader(written(tmp_path, 2, 0), None, None)
    path, state, _ = loader.load(4, 3, module_key="module", is_pipe_parallel=True)
    assert path == loader.ckpt_list[0]
    assert torch.equal(
        state["module"]["word_embeddings.weight"], weights(0, 2, 0)["word_embeddings.weight"]
    )


def test_a_checkpoint_engine_of_the_scripts_own_reads(tmp_path: Path) -> None:
    class Engine:
        def load(self, path: str, map_location: Any = None) -> Any:
            return {"model": weights(0, 1, 0), "from": Path(path).name}

    _, state, _ = SDLoaderFactory.get_sd_loader(["there"], Engine()).load(1, 0)
    assert state["from"] == "there"


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("code ran",))


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = written(tmp_path, 2, 0)
    loader = SDLoaderFactory.get_sd_loader(paths)
    with pytest.raises(CheckpointError, match="2 files on 3 ranks"):
        loader.load(3, 0)
    with pytest.raises(CheckpointError, match="is one of 2 files, and 1 are given"):
        SDLoaderFactory.get_sd_loader(paths[:1])
    with pytest.raises(CheckpointError, match="version 0, 1.0 or 2.0, not 3"):
        SDLoaderFactory.get_sd_loader(paths, version=3.0).load(1, 0)
    with pytest.raises(ConfigError, match="quantizes them afterwards"):
        loader.load(2, 0, quantize=True)
    with pytest.raises(ConfigError, match="type 'GPT'"):
        SDLoaderFactory.get_sd_loader(paths, sd_type="GPT")
    torch.save({"module": {"a": torch.ones(2)}}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="has no parameter attention.dense.weight"):
        SDLoaderFactory.get_sd_loader([tmp_path / "other.pt"] * 2).load(1, 0)
    torch.save({"module": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match="without running code"):
        SDLoaderFactory.get_sd_loader([tmp_path / "evil.pt"])
    assert "code ran" not in capsys.readouterr().out
