"""The files that DeepSpeed's own tools look for in a checkpoint, for programs that open them
(Lightning's converter).

A checkpoint of ds_core's has none. For it two small files are made in a temporary folder that ends
with the process: the stage and the run's values, and the client state.
`get_fp32_state_dict_from_zero_checkpoint` gives the weights.
"""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Any

from ds_checkpoint.folder.format import MANIFEST
from ds_checkpoint.formats.ours import run_values

from ds_checkpoint_deepspeed.opened import open_any
from ds_checkpoint_deepspeed.saving import save

_OPTIM = "*_optim_states.pt"
_MODEL = "*_model_states.pt"


def get_optim_files(checkpoint_dir: str | Path) -> list[str]:
    """The files of optimizer states in the folder of one checkpoint. Raises FileNotFoundError."""
    return get_checkpoint_files(checkpoint_dir, _OPTIM)


def get_model_state_files(checkpoint_dir: str | Path) -> list[str]:
    """The files of model states in the folder of one checkpoint. Raises FileNotFoundError."""
    return get_checkpoint_files(checkpoint_dir, _MODEL)


def get_model_state_file(checkpoint_dir: str | Path, zero_stage: int) -> str:
    """The first file of model states. Raises FileNotFoundError."""
    return get_model_state_files(checkpoint_dir)[0]


def get_checkpoint_files(checkpoint_dir: str | Path, glob_pattern: str) -> list[str]:
    """Files of the folder that match, those of rank 2 before those of rank 10.

    Raises FileNotFoundError.
    """
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder")
    if not (found := list(folder.glob(glob_pattern))) and (folder / MANIFEST).is_file():
        found = list(_made(folder.resolve()).glob(glob_pattern))
    if not found:
        raise FileNotFoundError(f"{folder} has no files {glob_pattern}")
    return [str(path) for path in sorted(found, key=naturally)]


def naturally(path: Path) -> list[Any]:
    """Numbers by value; every other part is text."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


@functools.cache
def _made(folder: Path) -> Path:
    """A folder with both files of this checkpoint."""
    with open_any(folder) as saved:
        run, client = run_values(saved)
    kept = Path(tempfile.mkdtemp(dir=_temporary().name))
    stage = {"zero_stage": 0, "partition_count": 1}
    save({"optimizer_state_dict": stage}, kept / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    counts: dict[str, Any] = {
        key: run[key] for key in ("global_steps", "global_samples", "skipped_steps") if key in run
    }
    model: dict[str, Any] = {**client, **counts, "dp_world_size": 1, "mp_world_size": 1}
    save(model, kept / "mp_rank_00_model_states.pt")
    return kept


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    """A folder of this process, removed when it ends."""
    return tempfile.TemporaryDirectory(prefix="ds_core-")
