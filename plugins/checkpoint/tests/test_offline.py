"""Checkpoints without an engine: the command ``dscore checkpoint``, exports, and the documented
functions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ds_checkpoint as checkpoint
import pytest
import safetensors.torch
import torch
from ds_checkpoint.offline import parse_size
from ds_command_kit.app import make_app
from ds_testing.truth import start
from torch import nn
from typer.testing import CliRunner

from ds_core import comm
from ds_core.errors import CheckpointError

ADAMW = {"type": "AdamW", "params": {"lr": 0.1}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, 30)
        self.mid = nn.Linear(30, 30)
        self.head = nn.Linear(30, 50, bias=False)
        self.head.weight = self.emb.weight
        self.mid.bias.requires_grad_(False)
        self.register_buffer("count", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mid(self.emb(x))).float().square().mean()


def train_and_save(folder: str, config: dict[str, Any], steps: int, tag: str) -> None:
    torch.manual_seed(0)
    engine = start(Net(), **{"clip": 1.0, "optimizer": ADAMW, **config})
    for step in range(steps):
        x = torch.randint(
            0, 50, (2, 4), generator=torch.Generator().manual_seed(step + comm.rank())
        )
        engine.backward(engine(x))
        engine.step()
    engine.save_checkpoint(folder, tag)


BF16 = {"bf16": {"enabled": True}}


def dscore(*words: Any) -> Any:
    return CliRunner().invoke(make_app(), ["checkpoint", *map(str, words)], prog_name="dscore")


@pytest.fixture
def folder(ranks: Any, tmp_path: Path) -> Path:
    ranks(2, train_and_save, str(tmp_path / "runs"), BF16, 2, "a")
    ranks(2, train_and_save, str(tmp_path / "runs"), BF16, 3, "b")
    return tmp_path / "runs"


def test_inspect(folder: Path) -> None:
    shown = dscore("inspect", folder)
    assert shown.exit_code == 0
    assert "master/mid.weight" in shown.output and "(30, 30)" in shown.output
    told = json.loads(dscore("inspect", folder, "--tag", "a", "--json").output)
    assert told["step"] == 2 and told["world_size"] == 2
    assert told["parameters"] == 50 * 30 + 30 * 30 + 30 + 3
    assert {s["name"] for s in told["states"]} >= {"module/count", "optimizer/exp_avg/emb.weight"}


def test_verify(folder: Path) -> None:
    assert "ok" in dscore("verify", folder / "a").output
    path = folder / "a" / "rank00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    done = dscore("verify", folder, "--tag", "a")
    assert done.exit_code == 1 and "rank00001.safetensors" in done.output
    assert dscore("verify", folder).exit_code == 0


def test_diff(folder: Path) -> None:
    done = dscore("diff", folder / "a", folder / "b")
    assert (
        done.exit_code == 1
        and "module/emb.weight" in done.output
        and "module/count" not in done.output
    )
    rows = {r["name"]: r for r in json.loads(dscore("diff", folder / "a", folder, "--json").output)}
    assert rows["optimizer/step/emb.weight"]["largest"] == 1.0
    same = dscore("diff", folder / "a", folder / "a")
    assert same.exit_code == 0 and "all states are equal" in same.output


def test_prune(folder: Path) -> None:
    assert "removed" in dscore("prune", folder, "--keep", 1).output
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "b", "latest"]
    assert dscore("prune", folder / "b", "--keep", 1).exit_code == 1


@pytest.mark.fast_cases("bf16", "fp16")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "saved"])
def test_export(folder: Path, tmp_path: Path, dtype: str) -> None:
    done = dscore("export", folder, tmp_path / "out", "--dtype", dtype, "--max-shard-size", "3KB")
    assert done.exit_code == 0, done.output
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 1 and all((tmp_path / "out" / f).is_file() for f in files)
    weights = {
        k: v for f in files for k, v in safetensors.torch.load_file(tmp_path / "out" / f).items()
    }
    assert set(weights) == {"emb.weight", "mid.weight", "mid.bias", "count"}
    assert index["weight_map"]["head.weight"] == index["weight_map"]["emb.weight"]
    assert index["metadata"]["total_size"] == sum(
        t.numel() * t.element_size() for t in weights.values()
    )
    wanted = {"fp32": torch.float32, "fp16": torch.float16}.get(dtype, torch.bfloat16)
    assert weights["mid.weight"].dtype == wanted and weights["count"].dtype == torch.int64
    truth = checkpoint.get_fp32_state_dict_from_zero_checkpoint(folder)
    assert torch.equal(weights["mid.weight"], truth["mid.weight"].to(wanted))
    (tmp_path / "out" / "config.json").write_text("the user's")
    again = ["export", folder, tmp_path / "out", "--dtype", dtype, "--exclude-frozen"]
    refused = dscore(*again)
    assert (
        refused.exit_code == 1
        and "holds weights already" in refused.output
        and "--overwrite" in refused.output
    )
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        *files,
        "model.safetensors.index.json",
        "config.json",
    }
    assert dscore(*again, "--overwrite").exit_code == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    net = Net().to(wanted)
    missing, _ = safetensors.torch.load_model(
        net, tmp_path / "out" / "model.safetensors", strict=False
    )
    assert set(missing) == {"mid.bias"}


def test_export_to_what_is_no_folder_for_weights(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("the user's")
    for output, word in ((tmp_path / "file", "is a file"), (folder / "a", "is a checkpoint")):
        done = dscore("export", folder, output, "--overwrite")
        assert done.exit_code == 1 and word in done.output and "Traceback" not in done.output
    assert (tmp_path / "file").read_text() == "the user's"


def test_fp32_weights_are_the_masters(ranks: Any, folder: Path, tmp_path: Path) -> None:
    ranks(1, train_and_save, str(tmp_path / "plain"), {}, 0, "start")
    state = checkpoint.get_fp32_state_dict_from_zero_checkpoint(folder, tag="a")
    assert set(state) == set(Net().state_dict())
    assert state["head.weight"] is state["emb.weight"]
    assert not torch.equal(state["mid.weight"], state["mid.weight"].bfloat16().float()), (
        "masters have more bits"
    )
    lazy = checkpoint.get_fp32_state_dict_from_zero_checkpoint(folder, "a", lazy_mode=True)
    assert lazy["mid.weight"].shape == (30, 30) and lazy["mid.weight"].dtype == torch.float32
    assert all(torch.equal(lazy[name].contiguous(), state[name]) for name in state)
    without = checkpoint.get_fp32_state_dict_from_zero_checkpoint(
        folder, "a", exclude_frozen_parameters=True
    )
    assert set(state) - set(without) == {"mid.bias"}
    net = checkpoint.load_state_dict_from_zero_checkpoint(Net(), folder, "a")
    assert all(torch.equal(net.state_dict()[name], state[name]) for name in state)
    with pytest.raises(CheckpointError, match="give the model that was saved"):
        checkpoint.load_state_dict_from_zero_checkpoint(nn.Linear(2, 2), folder, "a")
    checkpoint.convert_zero_checkpoint_to_fp32_state_dict(
        folder, tmp_path / "y", safe_serialization=False
    )
    # and a warning
    assert [path.name for path in (tmp_path / "y").iterdir()] == ["model.safetensors"]
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "model-00001-of-00002.safetensors").write_bytes(
        b"of an earlier export, which is replaced"
    )
    [path] = checkpoint.convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "x", tag="a")
    assert list((tmp_path / "x").iterdir()) == [path]
    assert torch.equal(safetensors.torch.load_file(path)["mid.weight"], state["mid.weight"])


def test_what_is_no_checkpoint(tmp_path: Path, folder: Path) -> None:
    gone = dscore("inspect", tmp_path / "nowhere")
    assert gone.exit_code == 2 and "no such folder" in gone.output
    (tmp_path / "empty").mkdir()
    empty = dscore("inspect", tmp_path / "empty")
    assert empty.exit_code == 1 and "no checkpoint" in empty.output
    (folder / "latest").unlink()
    done = dscore("export", folder, tmp_path / "out")
    assert done.exit_code == 1 and "name one of" in done.output and not (tmp_path / "out").exists()
    assert (
        "max_shard_size"
        not in dscore("export", folder / "a", tmp_path / "out", "--dtype", "int4").output
    )


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("2 GiB", 2 << 30), (7, 7), ("1.5kb", 1500), ("12", 12)]
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "5 apples", "0"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(CheckpointError, match="size"):
        parse_size(text)
