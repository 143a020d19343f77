"""Build the distributions of this repository.

    python .ci/build.py dist              wheels to install from a clone, and dist/constraints.txt
    python .ci/build.py dist --binary 0.2.0     wheels with compiled libraries; needs a C++ compiler

Wheels of a clone have a local version (0.1.0+g1b2c3d4). An index of packages refuses such versions, so

    pip install -c dist/constraints.txt "dscore-train[standard]"

takes what is ours from dist/ and only the rest from an index. Another commit has another version:
after `git pull` and `make wheels` the same line installs the new wheels.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


def folders(root: Path = ROOT) -> list[Path]:
    """The folder of each distribution, the core's first."""
    rest = (f for kind in ("plugins", "ops", "monitors") for f in root.glob(f"{kind}/*/"))
    return [root, *sorted(folder for folder in rest if (folder / "pyproject.toml").exists())]


def version(root: Path = ROOT) -> str:
    """The one version of all distributions."""
    found = VERSION.search((root / "ds_core" / "__init__.py").read_text("utf-8"))
    assert found is not None
    return found[1]


def git(root: Path, *words: str) -> str:
    """What a git command prints; empty where it fails."""
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def local_version(root: Path = ROOT) -> str:
    """The version of wheels that are not published: the commit, and the time if files differ."""
    label = f"g{git(root, 'rev-parse', '--short=8', 'HEAD') or 'unknown'}"
    if git(root, "status", "--porcelain") or label == "gunknown":
        label += f".{datetime.datetime.now():%Y%m%d%H%M%S}"
    return f"{version(root)}+{label}"


def config_of(folder: Path, number: str) -> dict[str, Any]:
    """A pyproject.toml with this version in it."""
    config = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
    project = config["project"]
    project["version"] = number
    if "version" in project.get("dynamic", ()):
        project["dynamic"].remove("version")
    return config


def compiles(folder: Path) -> bool:
    """Whether a distribution can put compiled libraries into its wheel."""
    hooks = config_of(folder, "0")["tool"]["hatch"]["build"]["targets"]["wheel"].get("hooks", {})
    return "extensions" in hooks.get("custom", {})


def build(
    places: Iterable[Path], out: Path, number: str, kinds: Sequence[str] = ("wheel",)
) -> list[Path]:
    """Build each distribution in this process; a process for each would take most of the time.

    kinds: "wheel", "sdist".
    """
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    builders = {"wheel": WheelBuilder, "sdist": SdistBuilder}
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    built = []
    home = Path.cwd()
    for folder in places:
        os.chdir(folder)  # hatchling reads README.md and LICENSE from here
        for kind in kinds:
            builder = builders[kind](str(folder.absolute()), config=config_of(folder, number))
            built += [
                Path(path) for path in builder.build(directory=str(out), versions=["standard"])
            ]
    os.chdir(home)
    return built


def write_constraints(wheels: Iterable[Path], file: Path) -> None:
    """The file that `pip install -c` takes: this folder, and each of its wheels by version."""
    rows = [
        "# Written by `make wheels`. What is ours comes from this folder, and from no index.",
        "--find-links .",
    ]
    for wheel in wheels:
        name, number = wheel.name.split("-")[:2]
        rows.append(f"{name.replace('_', '-')}=={number}")
    file.write_text("\n".join(rows) + "\n", "utf-8")


def main(words: Sequence[str] | None = None) -> int:
    """Build into a folder, which is emptied but for --binary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--binary", metavar="VERSION", help="compile; nothing else is built")
    options = parser.parse_args(words)
    root, out = options.root.absolute(), options.out.absolute()
    if options.binary:
        os.environ["DS_BUILD_OPS"] = "1"  # ds_kernel_kit.wheels reads it
        built = build(filter(compiles, folders(root)), out, options.binary)
    else:
        shutil.rmtree(out, ignore_errors=True)
        built = build(folders(root), out, local_version(root))
        write_constraints(built, out / "constraints.txt")
    print(f"{len(built)} wheels of {len(folders(root))} distributions in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
