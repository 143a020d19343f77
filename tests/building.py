"""For the tests that install distributions: wheels, pip, and metadata as pip would write it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from ds_testing.processes import clean_environment, run

__all__ = ["build_wheels", "pip", "write_metadata"]


def build_wheels(distributions: Iterable[Path], out: Path) -> list[Path]:
    """Build each distribution with its own build backend (all are hatchling), as ``make wheels``
    does.
    """
    code = (  # a process for each would spend most of its time on starting
        "import os, sys; from hatchling.build import build_wheel\n"
        "for folder in sys.argv[2:]: os.chdir(folder); build_wheel(sys.argv[1])"
    )
    out.mkdir(parents=True, exist_ok=True)
    run(
        [
            sys.executable,
            "-c",
            code,
            str(out.absolute()),
            *(str(folder.absolute()) for folder in distributions),
        ]
    )
    return sorted(out.glob("*.whl"))


def pip(*arguments: str, python: Path | None = None) -> str:
    """Run pip, offline; `python`: the interpreter of another environment to work on."""
    where = ["--python", str(python)] if python is not None else []
    return run(
        [sys.executable, "-m", "pip", *where, *arguments], env=clean_environment(PIP_NO_INDEX="1")
    )


def write_metadata(
    site: Path, dist: str, *lines: str, entry_points: Mapping[str, Mapping[str, str]] | None = None
) -> None:
    """Make `site`, where it is on the path, look as if version 1.0 of `dist` were installed there.

    lines: further lines of METADATA. entry_points: group -> name -> reference.
    """
    info = site / f"{dist.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "\n".join(["Metadata-Version: 2.1", f"Name: {dist}", "Version: 1.0", *lines, ""])
    )
    text = ""
    for group, references in (entry_points or {}).items():
        text += f"[{group}]\n" + "".join(
            f"{name} = {reference}\n" for name, reference in references.items()
        )
    (info / "entry_points.txt").write_text(text)
