"""`dscore checkpoint convert`, and the format ``safetensors``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from checkpoint_runs import make
from ds_checkpoint.formats.conformance import CheckpointFormatConformance
from ds_checkpoint.formats.convert import convert
from ds_checkpoint.offline import differences, open_saved, verify
from ds_command_kit.app import make_app
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from ds_core.errors import CheckpointError, UsageError


class TestSafetensors(CheckpointFormatConformance):
    plugin = "ds_checkpoint.plugin"
    name = "safetensors"
    optimizer: ClassVar[bool] = False


def dscore(*words: Any) -> Any:
    words = ("checkpoint", "convert", *map(str, words))
    return CliRunner().invoke(make_app(), words, prog_name="dscore")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ds_core."""
    folder = tmp_path_factory.mktemp("run")
    engine = make("bf16")
    engine.save_checkpoint(str(folder), client_state={"a": 1})
    engine.destroy()
    return folder


def test_ours_to_ours_is_a_copy_of_everything(ours: Path, tmp_path: Path) -> None:
    done = dscore(ours, tmp_path / "b")
    assert done.exit_code == 0 and done.output.strip() == str(tmp_path / "b" / "global_step0")
    verify(tmp_path / "b")
    one, two = (
        {p.name: p.read_bytes() for p in (f / "global_step0").iterdir()}
        for f in (ours, tmp_path / "b")
    )
    assert one == two
    assert "is there already" in dscore(ours, tmp_path / "b").output


def test_a_damaged_checkpoint_is_not_copied(ours: Path, tmp_path: Path) -> None:
    convert(ours, tmp_path / "a")
    file = tmp_path / "a" / "global_step0" / "rank00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(bytes(data))
    for to in ("dscore", "safetensors"):
        with pytest.raises(CheckpointError, match="its checksum is wrong"):
            convert(tmp_path / "a", tmp_path / "b", to)
    assert not list((tmp_path / "b").glob("[!.]*"))


def test_weights_and_their_config(ours: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "own"}')
    done = dscore(ours, tmp_path / "w", "--to", "safetensors", "--config", tmp_path)
    assert done.exit_code == 0 and "hold weights alone" in done.output
    assert json.loads((tmp_path / "w" / "config.json").read_text()) == {"model_type": "own"}
    # From there the config goes along by itself, and a checkpoint of ours can be made again.
    convert(tmp_path / "w", tmp_path / "v", "safetensors")
    assert (tmp_path / "v" / "config.json").exists()
    assert (
        load_file(tmp_path / "w" / "model.safetensors").keys()
        == load_file(tmp_path / "v" / "model.safetensors").keys()
    )
    written = convert(tmp_path / "w", tmp_path / "c")
    with open_saved(ours) as one, open_saved(written.path) as two:
        kinds = {d.kind for d in differences(one, two) if d.name.startswith("module/")}
        assert kinds == set() and one.manifest.shared == two.manifest.shared


@pytest.mark.parametrize(
    "name, content, word",
    [("config.json", "[1]", "is not a config.json"), ("config.json", "{", "is not a config.json")],
)
def test_a_config_that_is_none(
    ours: Path, tmp_path: Path, name: str, content: str, word: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=word):
        convert(ours, tmp_path / "w", "safetensors", model_config=tmp_path)
    with pytest.raises(UsageError, match="goes beside safetensors"):
        convert(ours, tmp_path / "b", model_config=tmp_path)


def test_several_files_and_their_index(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        save_file({name: tensor}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    names = {n: f"model-0000{i}-of-00002.safetensors" for i, n in enumerate(tensors, 1)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    for number, source in enumerate((tmp_path, index)):
        written = convert(source, tmp_path / f"to{number}")
        with open_saved(written.path) as saved:
            assert all(
                torch.equal(saved.source.whole(f"module/{n}"), t) for n, t in tensors.items()
            )
    for bad, word in (
        ({"a": "../x.safetensors"}, "not a safetensors file next to it"),
        ({"a": "gone.safetensors"}, "is missing"),
        ([1], "is not an index"),
    ):
        index.write_text(json.dumps({"weight_map": bad}))
        with pytest.raises(CheckpointError, match=word):
            convert(tmp_path, tmp_path / "bad")


def shards(folder: Path, rows: list[tuple[int, int]], said: Any = None) -> torch.Tensor:
    """What `dcp.HuggingFaceStorageWriter` with save_distributed writes of one weight."""
    whole = torch.arange(12.0).view(4, 3)
    for rank, (first, last) in enumerate(rows, 1):
        text = {"w": {"saved_offsets": [first, 0]}} if said is None else said
        save_file(
            {"w": whole[first:last].clone()},
            folder / f"shard-0000{rank}-model-00001-of-00001.safetensors",
            {"DCP_SHARDING_INFO": json.dumps(text), "DCP_VERSION": "1.0", "format": "pt"},
        )
    return whole


def test_files_of_sharded_weights(tmp_path: Path) -> None:
    whole = shards(tmp_path, [(0, 1), (1, 4)])
    written = convert(tmp_path, tmp_path / "to")
    with open_saved(written.path) as saved:
        assert torch.equal(saved.source.whole("module/w"), whole)


@pytest.mark.parametrize(
    "rows, said, word",
    [
        ([(0, 2), (1, 4)], None, "is not what its boxes put together"),
        ([(0, 1), (2, 4)], None, "is not what its boxes put together"),
        ([(0, 4)], {"w": {"saved_offsets": [-1, 0]}}, "impossible offsets"),
        ([(0, 4)], {"w": {"saved_offsets": [0]}}, "another number of dimensions"),
        ([(0, 4)], {"w": 3}, "cannot be read"),
        ([(0, 4)], [1], "cannot be read"),
    ],
)
def test_shards_that_do_not_fit(tmp_path: Path, rows: Any, said: Any, word: str) -> None:
    shards(tmp_path, rows, said)
    with pytest.raises(CheckpointError, match=word):
        convert(tmp_path, tmp_path / "to")


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    done = dscore(tmp_path, tmp_path / "to")
    assert done.exit_code == 1 and "no checkpoint of any format" in " ".join(done.output.split())
    done = dscore(tmp_path, tmp_path / "to", "--to", "orbax")
    said = " ".join(done.output.split())
    assert done.exit_code == 2 and "no checkpoint format is called 'orbax'" in said
    done = dscore(tmp_path / "gone", tmp_path / "to")
    assert done.exit_code == 2 and "no such file or folder" in done.output


def test_a_run_starts_from_weights_and_says_so(
    tmp_path: Path, ours: Path, caplog: pytest.LogCaptureFixture
) -> None:
    convert(ours, tmp_path / "w", "safetensors")
    engine = make("fp32", seed=5)
    before = engine.global_steps
    path, client = engine.load_checkpoint(str(tmp_path / "w"))
    assert path == str(tmp_path / "w") and client == {} and engine.global_steps == before
    told = [r.getMessage() for r in caplog.records if "weights alone" in r.getMessage()]
    assert len(told) == 1
    found = load_file(tmp_path / "w" / "model.safetensors")
    assert torch.equal(engine.module.head.weight, found["head.weight"].float())
    # Asked for weights, it says nothing of the rest.
    caplog.clear()
    engine.load_checkpoint(str(tmp_path / "w"), load_module_only=True)
    assert not [r for r in caplog.records if "weights alone" in r.getMessage()]
    engine.destroy()
