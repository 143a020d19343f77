"""`dscore import` of safetensors files and indices, and its declaration."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import safetensors.torch
import torch
from ds_checkpoint import get_fp32_state_dict_from_zero_checkpoint
from ds_checkpoint.formats.conformance import CheckpointFormatConformance
from ds_checkpoint_deepspeed import export_universal, import_checkpoint
from ds_checkpoint_deepspeed.reading import folder as folder_of
from ds_command_kit.app import make_app
from ds_testing import PluginConformance
from typer.testing import CliRunner

from ds_core.errors import CheckpointError


class TestDeclaration(PluginConformance):
    entry_point = "ds_checkpoint_deepspeed.plugin"


def dscore(*words: Any) -> Any:
    return CliRunner().invoke(make_app(), ["import", *map(str, words)], prog_name="dscore")


def test_an_index_of_safetensors(tmp_path: Path) -> None:
    weights = {"a.weight": torch.randn(3, 2), "b.weight": torch.randn(4)}
    index = {"weight_map": {}}
    for number, (name, tensor) in enumerate(weights.items(), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        safetensors.torch.save_file({name: tensor}, tmp_path / file)
        index["weight_map"][name] = file
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    for source in (path, tmp_path):
        assert dscore(source, tmp_path / "to").exit_code == 0
        found = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "to")
        assert found.keys() == weights.keys() and all(
            torch.equal(found[n], w) for n, w in weights.items()
        )


def test_what_holds_no_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text("{}")
    os.mkfifo(tmp_path / "fifo")
    for name, word in (
        ("some.json", "neither a safetensors file nor one that torch.save wrote"),
        ("fifo", "regular file"),
    ):
        done = dscore(tmp_path / name, tmp_path / "to")
        assert done.exit_code == 1 and word in done.output and "running code" not in done.output
    assert not (tmp_path / "to").exists()


HERE = Path(__file__).parent / "deepspeed"


def flip(path: Path) -> str:
    """Change one bit in the middle of a file's largest record; the record's name."""
    with zipfile.ZipFile(path) as archive:
        record = max(
            archive.infolist(), key=lambda info: info.file_size * ("/data/" in info.filename)
        )
        data = path.read_bytes()
        place = data.index(archive.read(record)) + record.file_size // 2
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    return record.filename


def test_a_flipped_bit_in_any_file_of_torch_is_found(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.randn(100)}, tmp_path / "w.pt")
    shutil.copytree(HERE / "fp32-2", tmp_path / "folder")
    import_checkpoint(HERE / "fp32-2", tmp_path / "ours")
    export_universal(tmp_path / "ours", tmp_path / "universal" / "t")
    states = next((tmp_path / "folder").rglob("*optim_states.pt"))
    for source, file in (
        (tmp_path / "w.pt", tmp_path / "w.pt"),
        (states.parent, states),
        (tmp_path / "universal" / "t", next((tmp_path / "universal").rglob("exp_avg.pt"))),
    ):
        record = flip(file)
        done = dscore(source, tmp_path / "to")
        said = " ".join(done.output.split())
        assert (
            done.exit_code == 1
            and file.name in said
            and f"record {record!r} is not as it was written" in said
        )
    assert not (tmp_path / "to").exists()


def without_classes(value: Any) -> Any:
    """Without instances of DeepSpeed's classes."""
    if isinstance(value, dict):
        return {
            key: without_classes(item)
            for key, item in value.items()
            if not isinstance(item, folder_of.Data)
        }
    return [without_classes(item) for item in value] if isinstance(value, list) else value


def test_values_of_another_kind_in_deepspeeds_files(tmp_path: Path) -> None:
    """Each value of a file replaced by a number: an import as before, or an error that names the
    folder or file.
    """
    shutil.copytree(HERE / "fp32-3", tmp_path / "of")
    refused = 0
    for file in sorted((tmp_path / "of").rglob("zero_pp_rank_0*_states.pt")):
        whole = without_classes(folder_of.load(HERE / "fp32-3" / file.relative_to(tmp_path / "of")))
        inner = whole.get("optimizer_state_dict", whole)
        torch.save(whole, file)
        import_checkpoint(file.parent, tmp_path / "to")
        for key in list(inner):
            inner[key], kept = 3, inner[key]
            torch.save(whole, file)
            inner[key] = kept
            try:
                import_checkpoint(file.parent, tmp_path / "to")
            except CheckpointError as error:
                refused += str(file.parent) in str(error)
        torch.save(whole, file)
    assert refused > 5


class TestDeepSpeed(CheckpointFormatConformance):
    plugin = "ds_checkpoint_deepspeed.plugin"
    name = "deepspeed"
    one_dtype: ClassVar[bool] = True
    # for DeepSpeed at stages 1 and 2
    unread: ClassVar[tuple[str, ...]] = ("mp_rank_00_model_states.pt",)
