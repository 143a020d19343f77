"""A conversion whose disk is full leaves no checkpoint behind."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from ds_checkpoint.formats.convert import convert
from ds_checkpoint.formats.finding import is_ours, recognise
from ds_testing.processes import clean_environment, run
from safetensors.torch import save_file

from ds_core.errors import CheckpointError
from ds_core.plugins import Plugins

FORMATS = ("dscore", "deepspeed", "dcp", "safetensors", "megatron")
FULL = """
import resource, signal, sys
from ds_checkpoint.formats.convert import convert
from ds_core.errors import CheckpointError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
for name in sys.argv[3:]:
    try:
        convert(sys.argv[1], f"{sys.argv[2]}/{name}/t", name)
        print(name, "was written")
    except CheckpointError as error:
        print(name, "refused:", error)
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of 16 MiB."""
    folder = tmp_path_factory.mktemp("weights")
    save_file({f"w{n}": torch.randn(1 << 20) for n in range(4)}, folder / "model.safetensors")
    return folder


def whole(path: Path) -> bool:
    """Whether anything there is taken for a checkpoint, and can be read."""
    if is_ours(path, None):
        return True
    found = recognise(Plugins(), path)
    if found is None:
        return False
    try:
        convert(path, path.parent / "again")
    except CheckpointError:
        return False
    return True


@pytest.mark.slow
def test_a_full_disk(weights: Path, tmp_path: Path) -> None:
    said = run(
        [sys.executable, "-c", FULL, str(weights), str(tmp_path), *FORMATS],
        env=clean_environment(),
    )
    for name in FORMATS:
        assert f"{name} refused: " in said and f"cannot write {tmp_path}/{name}/t" in said, said
        assert not whole(tmp_path / name / "t")
