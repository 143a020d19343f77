"""Wheels and folders for the tests that install distributions as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = [
    ROOT,
    *sorted(p.parent for kind in ("plugins", "ops", "monitors") for p in ROOT.glob(f"{kind}/*/pyproject.toml")),
]


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without what would let a checkout, a launcher or a choice of ours leak in."""
    leaks = ("PYTHON", "VIRTUAL_ENV", "DS_", "MASTER_", "TORCHELASTIC", "COV_")
    exact = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(leaks) and k not in exact}
    return kept | {"OMP_NUM_THREADS": "1", "COLUMNS": "400", "NO_COLOR": "1"} | extra


def build_wheels(distributions: Iterable[Path], out: Path) -> list[Path]:
    """Build each distribution with its own build backend (all are hatchling), as ``make wheels`` does."""
    code = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    out.mkdir(parents=True, exist_ok=True)
    for folder in distributions:
        run([sys.executable, "-c", code, str(out)], cwd=folder)
    return sorted(out.glob("*.whl"))


def pip(*arguments: str, python: Path | None = None) -> str:
    """Run pip, offline; `python`: the interpreter of another environment to work on."""
    where = ["--python", str(python)] if python is not None else []
    return run([sys.executable, "-m", "pip", *where, *arguments], env=clean_environment(PIP_NO_INDEX="1"))


def run(
    command: list[str],
    *,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    status: int = 0,
    timeout: int = 120,
) -> str:
    """Run and give back stdout and stderr together; the exit status must be `status` (-1: any but 0)."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment() if env is None else env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert (done.returncode != 0) if status == -1 else (done.returncode == status), done.stdout
    return done.stdout
