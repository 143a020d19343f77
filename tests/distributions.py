"""The folders of this repository's distributions and packages. Imports nothing."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]

DISTRIBUTIONS = sorted(
    f.parent
    for kind in ("plugins", "ops", "monitors")
    for f in ROOT.glob(f"{kind}/*/pyproject.toml")
)
"""Of all distributions but dscore-train, whose folder is ROOT."""

PACKAGES = [
    ROOT / "ds_core",
    *sorted(p for d in DISTRIBUTIONS for p in d.glob("ds_*") if p.is_dir()),
]

HOME = re.search(r'^Source = "(.+)"', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)[1]  # type: ignore[index]
"""Where the repository is published."""


def tracked() -> list[str]:
    """The paths that git knows, from ROOT."""
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [name for name in done.stdout.split("\0") if name]
