"""Megatron-core's torch_dist: as that program writes it, and as it is read back."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ds_checkpoint.formats.convert import convert
from ds_checkpoint.formats.finding import open_any
from ds_checkpoint_dcp import records
from torch.distributed.checkpoint import filesystem

from ds_core.errors import CheckpointError
from ds_core.plugins import Plugins

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def megatron(root: Path, backend: str = "torch_dist") -> Path:
    """What Megatron-LM's `save` leaves of three layers whose tensors are stored as one each.

    megatron/core/dist_checkpointing/strategies/torch.py writes the tensors under flat names,
    strategies/common.py ``common.pt``, core.py ``metadata.json``.
    """
    folder = root / "iter_0000020"
    weight = torch.arange(3 * 4 * 2.0).view(3, 4, 2)
    states = {
        "embedding.word_embeddings.weight": torch.ones(5, 2, dtype=torch.bfloat16),
        "decoder.layers.mlp.linear_fc1.weight": weight.bfloat16(),
        "decoder.final_layernorm.weight": torch.ones(2),
        "optimizer.state.fp32_param.decoder.layers.mlp.linear_fc1.weight": weight,
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight": weight + 100,
        "optimizer.state.exp_avg_sq.decoder.layers.mlp.linear_fc1.weight": weight + 200,
        # Of the distributed optimizer: a flat buffer, of no weight's shape.
        "optimizer.distributed.dp_group_idx_0.exp_avg": torch.zeros(77),
        "rng_state/shard_0.0_1.1": torch.zeros(3),
    }
    dcp.save(states, checkpoint_id=folder)
    common = {
        "args": Namespace(num_layers=3, params_dtype=torch.bfloat16, odd=json.JSONDecoder),
        "checkpoint_version": 3.0,
        "iteration": 20,
        "optimizer": {
            "optimizer": {
                "param_groups": [
                    {"lr": 0.5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 20}
                ]
            },
            "param_state_sharding_type": "fully_reshardable",
        },
        "opt_param_scheduler": {"max_lr": 0.5, "num_steps": 20},
    }
    torch.save(common, folder / "common.pt")
    config = {"sharded_backend": backend, "sharded_backend_version": 1, "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps(config))
    (root / "latest_checkpointed_iteration.txt").write_text("20")
    return folder


def test_layers_get_their_own_names(tmp_path: Path) -> None:
    megatron(tmp_path)
    with open_any(Plugins(), tmp_path) as saved:
        weights = set(saved.weights())
        name = "decoder.layers.1.mlp.linear_fc1.weight"
        assert weights == {
            "embedding.word_embeddings.weight",
            "decoder.final_layernorm.weight",
            *(f"decoder.layers.{n}.mlp.linear_fc1.weight" for n in range(3)),
        }
        want = torch.arange(8.0, 16.0).view(4, 2)
        assert torch.equal(saved.source.whole(f"master/{name}"), want)
        assert torch.equal(saved.source.whole(f"module/{name}"), want.bfloat16())
        assert torch.equal(saved.source.whole(f"optimizer/exp_avg/{name}"), want + 100)
        assert torch.equal(
            saved.source.read(f"optimizer/exp_avg_sq/{name}", 3, 6), torch.tensor([211.0, 212, 213])
        )
        assert saved.source.whole(f"optimizer/step/{name}").item() == 20
        assert saved.values is not None
        run, _ = saved.values
        assert run["global_steps"] == 20
        assert run["optimizer_groups"] == [
            {"lr": 0.5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        ]
        told = " ".join(saved.missing)
        assert "dp_group_idx_0" in told and "rng_state" in told


def test_a_shard_of_a_stack(tmp_path: Path) -> None:
    """Pipeline stages hold some of the layers each, and tensor-parallel ranks some of the rows."""
    folder = megatron(tmp_path)
    whole = torch.arange(3 * 4 * 2.0).view(3, 4, 2)
    name = "decoder.layers.mlp.linear_fc1.weight"
    found = dcp.FileSystemReader(folder).read_metadata()
    entry = found.state_dict_metadata[name]
    entry.properties.dtype = torch.float32
    entry.chunks = []
    with open(folder / "shards.distcp", "wb") as file:
        for layers in ((0, 1), (1, 3)):
            for rows in ((0, 2), (2, 4)):
                part = whole[slice(*layers), slice(*rows)].clone()
                offset = torch.Size((layers[0], rows[0], 0))
                entry.chunks.append(dcp.metadata.ChunkStorageMetadata(offset, part.shape))
                begin = file.tell()
                torch.save(part, file)
                found.storage_data[dcp.metadata.MetadataIndex(name, offset)] = (
                    filesystem._StorageInfo("shards.distcp", begin, file.tell() - begin)
                )
    import pickle

    (folder / ".metadata").write_bytes(pickle.dumps(found))
    with open_any(Plugins(), folder) as saved:
        for layer in range(3):
            state = f"module/decoder.layers.{layer}.mlp.linear_fc1.weight"
            assert torch.equal(saved.source.whole(state), whole[layer])


def test_another_backend_is_named(tmp_path: Path) -> None:
    folder = megatron(tmp_path, "zarr")
    with pytest.raises(CheckpointError, match="'zarr' wrote the tensors"):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize(
    "text, word", [("../../etc", "names no iteration"), ("7", "no checkpoint"), ("", "names no")]
)
def test_what_names_the_latest(tmp_path: Path, text: str, word: str) -> None:
    megatron(tmp_path / "a")
    (tmp_path / "a" / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(CheckpointError, match=word):
        convert(tmp_path / "a", tmp_path / "out")


def test_common_values_that_would_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = megatron(tmp_path)
    monkeypatch.chdir(tmp_path)

    class Runs:
        def __reduce__(self) -> Any:
            return eval, ("open('hacked', 'w')",)

    torch.save({"iteration": 5, "args": Runs()}, folder / "common.pt")
    with open_any(Plugins(), folder) as saved:
        assert saved.manifest.step == 5
    assert not (tmp_path / "hacked").exists()
    torch.save([1, 2], folder / "common.pt")
    with pytest.raises(CheckpointError, match="holds a list, not a dict"):
        convert(folder, tmp_path / "out")
    monkeypatch.setattr(records, "_MOST_VALUE", 100)
    with pytest.raises(CheckpointError, match="100 are the most"):
        convert(folder, tmp_path / "out")
