"""A model whose weights are far larger than what a process may allocate generates, from the
disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plugins.inference.tests.generate_large import LAYERS, LIMIT


def generated(folder: Path, *, ranks: int, limited: bool) -> list[dict[str, Any]]:
    """What each rank of a run of its own says."""
    folder.mkdir()
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
        "-m",
    ]
    words += ["plugins.inference.tests.generate_large", str(LAYERS), str(int(limited)), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.slow
def test_a_model_larger_than_memory_generates(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (plain,) = generated(tmp_path / "plain", ranks=1, limited=False)
    assert plain["bytes"] >= 7 * LIMIT
    for ranks in (1, 2):
        assert generated(tmp_path / str(ranks), ranks=ranks, limited=True) == [plain] * ranks
