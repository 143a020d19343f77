"""Checkpoints that were damaged, of a newer format, or made to do harm."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from checkpoint_faults import load, make, save
from ds_checkpoint.folder import writing
from ds_checkpoint.folder.format import MANIFEST

# -- damage ----------------------------------------------------------------------------------------

FILES = [
    "manifest.json",
    "rank00000.safetensors",
    "rank00000-local.safetensors",
    "rank00001-local.safetensors",
]


def damage(folder: Path, name: str, how: str, other: Path) -> None:
    file = folder / name
    whole = file.read_bytes()
    if how == "delete":
        file.unlink()
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "truncate":
        file.write_bytes(whole[: len(whole) // 2])
    elif how == "longer":
        file.write_bytes(whole + b"\0")
    elif how == "swap ranks":
        a = folder / FILES[2]
        b = folder / FILES[3]
        a_bytes = a.read_bytes()
        a.write_bytes(b.read_bytes())
        b.write_bytes(a_bytes)
    elif how == "other step":
        shutil.copyfile(other / name, file)
    elif how == "pickle":
        file.write_bytes(
            b"cos\nsystem\n(S'touch " + str(folder / "owned").encode() + b"'\ntR.".ljust(len(whole))
        )
    elif how == "link":
        shutil.move(file, folder.parent / "moved")
        file.symlink_to(folder.parent / "moved")
    elif how == "header":
        file.write_bytes(whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])


DAMAGE = [
    (name, how) for name in FILES for how in ("delete", "empty", "truncate", "pickle", "header")
]
DAMAGE += [(name, how) for name in FILES[1:] for how in ("other step", "link", "longer")]
DAMAGE += [("rank00000-local.safetensors", "swap ranks")]


@pytest.mark.fast_cases(
    "manifest.json-delete",
    "rank00000-local.safetensors-truncate",
    "rank00001-local.safetensors-delete",
    "rank00001-local.safetensors-pickle",
    "rank00001-local.safetensors-link",
)
@pytest.mark.parametrize(
    "name, how",
    [
        *DAMAGE[::3],
        *(pytest.param(*d, marks=pytest.mark.slow) for i, d in enumerate(DAMAGE) if i % 3),
    ],
)
def test_damage_is_named_before_anything_changes(
    ranks: Any, tmp_path: Path, name: str, how: str
) -> None:
    ranks(2, save, str(tmp_path), 1.0, "a")
    ranks(2, save, str(tmp_path), 2.0, "b")
    damage(tmp_path / "b", name, how, tmp_path / "a")
    for message in ranks(2, load, str(tmp_path)):
        assert isinstance(message, str)
        assert name in message, message
    assert not (tmp_path / "b" / "owned").exists()
    assert ranks(2, load, str(tmp_path), "a") == [["a", 1.0]] * 2


def test_a_newer_format_says_so(ranks: Any, tmp_path: Path) -> None:
    ranks(1, save, str(tmp_path), 1.0, "a")
    manifest = tmp_path / "a" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"version": 3', '"version": 99', 1))
    assert (
        "format version 99, this dscore-train reads versions 1 to 3"
        in ranks(1, load, str(tmp_path))[0]
    )


# -- no pickle -------------------------------------------------------------------------------------

AUDITED = """
import sys, tempfile
seen = []
forbidden = ("pickle.", "marshal.load", "exec")
sys.addaudithook(lambda event, args: seen.append(event) if on and event.startswith(forbidden) else None)
on = False
import torch, ds_core
from torch import nn
model = nn.Linear(3, 3)
engine, *_ = ds_core.initialize(model=model, config={"train_batch_size": 1, "optimizer": {"type": "AdamW"}})
engine.backward(engine(torch.ones(1, 3)).sum()); engine.step()
import numpy.random
for on in (False, True):  # importing a module is an exec too: the first time imports what is needed
    folder = tempfile.mkdtemp()
    engine.save_checkpoint(folder, client_state={"t": torch.ones(2)})
    engine.save_16bit_model(folder)
    engine.load_checkpoint(folder)
on = False
print("events", sorted(set(seen)))
"""


@pytest.mark.slow
def test_nothing_is_unpickled_or_executed(tmp_path: Path) -> None:
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", AUDITED], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "events []" in done.stdout


def test_the_source_never_names_pickle() -> None:
    folder = Path(writing.__file__).parent
    texts = {p.name: p.read_text() for p in folder.glob("*.py")}
    assert len(texts) >= 10
    forbidden = re.compile(
        r"^\s*(import|from) "
        r"(pickle|marshal|shelve|dill)|torch\.save\(|torch\.load\((?!.*weights_only=True)|_object\(",
        re.MULTILINE,
    )
    assert [name for name, text in texts.items() if forbidden.search(text)] == []


def secret(folder: str) -> None:
    make(1.0, optimizer={"type": "AdamW", "params": {"lr": 0.1}}).save_checkpoint(folder, "a")


def test_the_config_is_kept(ranks: Any, tmp_path: Path) -> None:
    ranks(1, secret, str(tmp_path))
    config = json.loads((tmp_path / "a" / MANIFEST).read_text())["config"]
    assert config["optimizer"] == {"type": "AdamW", "params": {"lr": 0.1}}
