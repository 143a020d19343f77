"""The one version of all distributions.

    python .ci/version.py           what it is; status 1 where a file has another
    python .ci/version.py 0.2.0     write it into every file that has it

`ds_core/__init__.py` is the source. Distributions of this repository are released together, and each
requires of the others at least the version that it was released with: a lower bound written by hand
would stay behind. The upper bound is the next release that may break (0.2 after 0.1.3, 2 after 1.4.0).
"""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version

from build import ROOT, VERSION, folders, version

OWN = re.compile(r'^version = "[^"]*"$', re.MULTILINE)
PREFIX = runpy.run_path(str(ROOT / "ds_core" / "naming.py"))["PREFIX"]
OURS = re.compile(rf'"({PREFIX}[\w-]+(?:\[[\w,-]+\])?)[<>=~!][^"]*"')
CITED = re.compile(r"^version: .*$", re.MULTILINE)


def bounds(number: str) -> str:
    """What a distribution of this release requires of the others: 0.1.3 -> ``>=0.1.3,<0.2``."""
    release = Version(number)
    breaks = f"0.{release.minor + 1}" if release.major == 0 else str(release.major + 1)
    return f">={number},<{breaks}"


def texts(number: str, root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Every file that has the version, and its text with this one."""
    source = root / "ds_core" / "__init__.py"
    yield source, VERSION.sub(f'__version__ = "{number}"', source.read_text("utf-8"))
    for file in [
        *(folder / "pyproject.toml" for folder in folders(root)),
        root / "ops" / "kernel_kit" / "ds_kernel_kit" / "wheels.py",  # a build requires the kit
    ]:
        text = OURS.sub(rf'"\g<1>{bounds(number)}"', file.read_text("utf-8"))
        yield file, OWN.sub(f'version = "{number}"', text, count=1)
    cited = root / "CITATION.cff"
    yield cited, CITED.sub(f"version: {number}", cited.read_text("utf-8"))


def other(root: Path = ROOT) -> list[Path]:
    """The files that have another version than the source."""
    number = version(root)
    return [file for file, text in texts(number, root) if file.read_text("utf-8") != text]


def write(number: str, root: Path = ROOT) -> list[Path]:
    """Write the version everywhere; returns the files that changed."""
    changed = [row for row in texts(number, root) if row[0].read_text("utf-8") != row[1]]
    for file, text in changed:
        file.write_text(text, "utf-8")
    return [file for file, _ in changed]


def main(words: Sequence[str] | None = None) -> int:
    """Print the version, or set it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("number", nargs="?")
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args(words)
    if options.number is None:
        print(version(options.root))
        wrong = other(options.root)
        for file in wrong:
            print(
                f"{file.relative_to(options.root)} differs: python .ci/version.py {version(options.root)}"
            )
        return int(bool(wrong))
    try:
        number = str(Version(options.number))
    except InvalidVersion:
        parser.error(f"{options.number} is no version such as 0.2.0 or 0.2.0rc1")
    for file in write(number, options.root):
        print(file.relative_to(options.root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
