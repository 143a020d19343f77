"""How frozen plugins are installed, and their tests run."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from building import write_metadata
from ds_testing.processes import clean_environment, run

HERE = Path(__file__).parent
SECTIONS = re.compile(r"^def ds_config\(", re.MULTILINE)


def installed(folder: Path, site: Path) -> list[str]:
    """Copy the packages of `folder` to `site`, with the metadata that pip would write; their
    names."""
    shutil.copytree(folder, site)
    names = sorted(file.parent.name for file in site.glob("*/plugin.py"))
    for name in names:
        owns = SECTIONS.search((site / name / "plugin.py").read_text()) is not None
        group = "ds_core.plugins" if owns else "ds_core.backends"
        section = "plain" if name == "my_plain" else name
        write_metadata(
            site, name.replace("_", "-"), entry_points={group: {section: f"{name}.plugin"}}
        )
    return names


def passed(site: Path, *arguments: str) -> str:
    """Run the tests in `site` as their authors would; deprecations are shown, and fail nothing."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
    ]
    command += [
        "-c",
        "/dev/null",
        "--rootdir",
        str(site),
        "-W",
        "default::DeprecationWarning",
        *arguments,
    ]
    return run(command, cwd=site, env=clean_environment(PYTHONPATH=str(site)), timeout=900)
