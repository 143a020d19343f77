"""Weights of files into models with and without memory, whole and divided."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_inference import init_inference
from ds_inference.weights.sources import open_weights
from ds_testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

from inference_models import ids, make

from ds_core.errors import CheckpointError, ConfigError


def empty(kind: str, **more: Any) -> Any:
    """A model without memory for its weights."""
    import transformers as hf

    auto = hf.AutoModelForMaskedLM if kind == "bert" else hf.AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(make(kind, **more).config).eval()


def off(kind: str, checkpoint: Any, config: dict[str, Any], model: Any = None) -> float:
    """How far logits are from those of the model that was saved."""
    config = {"dtype": "fp32", "checkpoint": checkpoint, **config}
    engine = init_inference(empty(kind) if model is None else model, config)
    with torch.no_grad():
        return float(
            (engine(input_ids=ids()).logits - make(kind)(input_ids=ids()).logits).abs().max()
        )


def saved(kind: str, folder: Path, **more: Any) -> str:
    make(kind).save_pretrained(folder, **more)
    return str(folder)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "bert"])
def test_shard_by_shard_into_a_model_without_memory(kind: str, tmp_path: Path) -> None:
    """Files of a few kilobytes; experts that are saved one by one and stacked here; names without
    their prefix.
    """
    folder = saved(kind, tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert off(kind, folder, {"set_empty_params": True}) < 1e-5
    assert off(kind, folder, {"replace_with_kernel_inject": True}) < 1e-4
    if kind == "llama":
        other = make(kind)
        torch.nn.init.zeros_(other.lm_head.weight)
        assert off(kind, folder, {}, other) < 1e-5


def parts(kind: str, checkpoint: str, folder: str) -> tuple[float, float, int]:
    """Load a part, save it, and load what was saved."""
    config = {"tensor_parallel": {"tp_size": 2}, "replace_with_kernel_inject": True}
    first = off(kind, checkpoint, {**config, "save_mp_checkpoint_path": folder})
    torch.distributed.barrier()
    here = sum(
        p.numel()
        for p in init_inference(empty(kind), config, checkpoint=folder, dtype="fp32").parameters()
    )
    return first, off(kind, folder, config), here


@pytest.mark.fast_cases("llama")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_each_rank_reads_its_part_and_saves_it(kind: str, tmp_path: Path) -> None:
    folder = saved(kind, tmp_path / "whole")
    again = str(tmp_path / "parts")
    whole = sum(p.numel() for p in make(kind).parameters())
    for first, second, here in run_ranks(2, parts, kind, folder, again):
        assert first < 1e-4
        assert second < 1e-4
        assert here < 0.7 * whole
    assert off(kind, again, {}) < 1e-4  # by one rank
    assert {f.suffix for f in Path(again).iterdir()} == {".json", ".safetensors"}


def test_every_form_of_a_checkpoint(tmp_path: Path) -> None:
    model = make("llama")
    state = model.state_dict()
    half = len(state) // 2
    names = list(state)
    torch.save({n: state[n] for n in names[:half]}, tmp_path / "a.bin")
    torch.save({"module": {n: state[n] for n in names[half:]}}, tmp_path / "b.pt")
    listed = {"type": "BLOOM", "checkpoints": ["a.bin", "b.pt"], "version": 1.0}
    (tmp_path / "policy.json").write_text(json.dumps(listed))
    assert off("llama", str(tmp_path / "policy.json"), {}) < 1e-5
    assert off("llama", "policy.json", {"base_dir": str(tmp_path)}) < 1e-5
    assert off("llama", {**listed, "base_dir": str(tmp_path)}, {}) < 1e-5
    assert (
        off(
            "llama",
            {"checkpoints": {"non_tp": ["a.bin"], "tp": ["b.pt"]}},
            {"base_dir": str(tmp_path)},
        )
        < 1e-5
    )
    whole = saved("llama", tmp_path / "hf")
    assert off("llama", whole + "/model.safetensors", {}) < 1e-5
    assert off("llama", {"checkpoints": whole}, {}) < 1e-5


def test_a_checkpoint_of_a_training_run(tmp_path: Path) -> None:
    import ds_core

    engine, *_ = ds_core.initialize(model=make("llama"), config={"train_batch_size": 1})
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    assert off("llama", str(tmp_path), {"replace_with_kernel_inject": True}) < 1e-4


class Runs:
    """Unpickling it would leave a trace."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["DS_TEST_TRACE"],)


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace"
    monkeypatch.setenv("DS_TEST_TRACE", str(trace))
    torch.save({"a": Runs()}, tmp_path / "bad.bin")
    with (
        pytest.raises(CheckpointError, match="without running code in it"),
        open_weights(str(tmp_path / "bad.bin")),
    ):
        pass
    assert not trace.exists()


def test_a_damaged_file_of_torch(tmp_path: Path) -> None:
    weight = torch.randn(1000)
    torch.save({"a": weight}, tmp_path / "pytorch_model.bin")
    data = bytearray((tmp_path / "pytorch_model.bin").read_bytes())
    data[data.index(weight.numpy().tobytes()) + 2000] ^= 1
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    with (
        pytest.raises(CheckpointError, match="data/0' is not as it was written"),
        open_weights(str(tmp_path)),
    ):
        pass
    os.mkfifo(tmp_path / "list.json")
    with (
        pytest.raises(CheckpointError, match="not a regular file"),
        open_weights(str(tmp_path / "list.json")),
    ):
        pass


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "holds no weights"),
        ({"model.safetensors": "no file"}, "not a safetensors file"),
        ({"model.safetensors.index.json": "[]"}, "holds a list"),
        ({"model.safetensors.index.json": "{"}, "cannot be read as JSON"),
        ({"model.safetensors.index.json": '{"weight_map": 3}'}, "has no weight_map"),
        (
            {"model.safetensors.index.json": '{"weight_map": {"a": "gone.safetensors"}}'},
            "no file .*gone",
        ),
        (
            {"model.safetensors.index.json": '{"weight_map": {"a": "../up.safetensors"}}'},
            "leads out",
        ),
        (
            {"model.safetensors.index.json": '{"weight_map": {"a": "/up.safetensors"}}'},
            "next to their index",
        ),
        ({"checkpoints.json": "{}"}, "the key 'checkpoints'"),
        ({"checkpoints.json": '{"type": "Megatron", "checkpoints": ["a", "b"]}'}, "are not merged"),
        (
            {"checkpoints.json": '{"tp_size": 2, "checkpoints": {"tp": ["a"]}}'},
            "DeepSpeed cut for ranks",
        ),
        ({"checkpoints.json": '{"checkpoints": "."}'}, "name each other"),
        ({"checkpoints.json": '{"base_dir": "../up", "checkpoints": ["a"]}'}, "leads out"),
        ({"checkpoints.json": '{"checkpoints": [' + "[" * 10**5 + "]" * 10**5 + "]}"}, "too deep"),
        ({"checkpoints.json": '{"type": "ds_inference.parts"}'}, "damaged"),
        (
            {
                "checkpoints.json": '{"type": "ds_inference.parts", "checkpoints": [], "weights": '
                '{"a": '
                '{"shape": [1099511627776], "parts": [{"file": -1, "ranges": [[[0, '
                "1099511627776]]]}]}}}"
            },
            "damaged",
        ),
        (
            {
                "checkpoints.json": '{"type": "ds_inference.parts", "checkpoints": [], "weights": '
                '{"a": '
                '{"shape": [2], "parts": [{"file": 0, "ranges": [[[0, 9]]]}]}}}'
            },
            "damaged",
        ),
    ],
)
def test_damaged_and_foreign_files(files: dict[str, str], said: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=said), open_weights(str(tmp_path)):
        pass


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks .*: is it of this model"):
        off("gpt2", folder, {})
    with pytest.raises(CheckpointError, match="shape"):
        init_inference(empty("llama", intermediate_size=16), dtype="fp32", checkpoint=folder)
    with pytest.raises(CheckpointError, match="there is no"):
        off("llama", str(tmp_path / "nowhere"), {})
    with pytest.raises(ConfigError, match="name its weights with checkpoint"):
        init_inference(empty("llama"), dtype="fp32")
