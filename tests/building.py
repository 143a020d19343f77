"""Wheels and folders for the tests that install distributions as a user would."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from ds_testing.processes import clean_environment, run

ROOT = Path(__file__).parents[1]
__all__ = ["DISTRIBUTIONS", "build_wheels", "clean_environment", "pip", "run"]

DISTRIBUTIONS = [
    ROOT,
    *sorted(p.parent for kind in ("plugins", "ops", "monitors") for p in ROOT.glob(f"{kind}/*/pyproject.toml")),
]


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
