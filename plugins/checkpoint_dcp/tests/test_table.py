"""From every format to every other: what is resumed is as if nothing had been converted."""

from __future__ import annotations

import functools
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from dcp_runs import evaluate, make, resume, save_engine
from ds_checkpoint.formats.convert import convert

FORMATS = ("dscore", "deepspeed", "dcp", "safetensors", "megatron")
FAST = ("dscore-dcp", "dcp-deepspeed", "deepspeed-megatron", "megatron-safetensors")


def where(folder: Path) -> Path:
    """A folder to write a checkpoint of any format into."""
    return folder / "global_step3"


@functools.cache
def made(root: Path, kind: str) -> dict[str, Any]:
    """A checkpoint of each format, once, with what an undisturbed run gives after it."""
    low = {} if kind == "fp32" else {"bf16": {"enabled": True}}
    losses, weights = save_engine(root / "dscore", **low)
    for name in FORMATS[1:]:
        convert(root / "dscore", where(root / name), name)
    engine = make(seed=7, **low)
    engine.load_checkpoint(str(root / "dscore"))
    loss = evaluate(engine)
    engine.destroy()
    return {"losses": losses, "weights": weights, "evaluated": loss, "config": low}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("table")


@pytest.mark.fast_cases(*(f"fp32-{pair}" for pair in FAST), "bf16-megatron-dcp")
@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_a_conversion_loses_nothing_that_both_formats_have(
    root: Path, tmp_path: Path, kind: str, source: str, target: str
) -> None:
    folder = root / kind
    want = made(folder, kind)
    begin = folder / source if source == "dscore" else where(folder / source)
    written = convert(begin, where(tmp_path / "to"), target)
    if "safetensors" in (source, target):
        engine = make(seed=7, **want["config"])
        engine.load_checkpoint(str(tmp_path / "to" / "global_step3"))
        assert evaluate(engine) == want["evaluated"]
        engine.destroy()
        assert any("weights alone" in text for text in written.missing)
        return
    losses, weights = resume(tmp_path / "to" / "global_step3", **want["config"])
    assert losses == want["losses"]
    assert all(torch.equal(weights[n], w) for n, w in want["weights"].items())
    shutil.rmtree(tmp_path / "to")
