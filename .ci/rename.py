"""Give all distributions another prefix, or the repository another home, everywhere at once.

    python .ci/rename.py --core dscore-train --prefix dscore-
    python .ci/rename.py --home https://example.org/dscore

Reads the present names from ds_core/naming.py and pyproject.toml. Set-up runs again afterwards, and
`make catalogue` writes what is generated from the names.
"""

from __future__ import annotations

import argparse
import re
import runpy
import subprocess
from pathlib import Path

from build import ROOT, config_of, folders

NAMING = ROOT / "ds_core" / "naming.py"


def tracked() -> list[Path]:
    """The files that git knows."""
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [ROOT / name for name in done.stdout.split("\0") if name]


def names(prefix: str) -> list[str]:
    """The names of this repository's distributions but the core's, without the prefix."""
    found = []
    for folder in folders()[1:]:
        name = config_of(folder, "0")["project"]["name"]
        assert name.startswith(prefix), f"{folder}: {name} does not begin with {prefix}"
        found.append(name.removeprefix(prefix))
    # The longest first: `monitor-csv` before `monitor`.
    return sorted(found, key=len, reverse=True)


def main() -> None:
    """Rewrite the files, and rename those that are named after a distribution."""
    old = runpy.run_path(str(NAMING))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", default=old["CORE"])
    parser.add_argument("--prefix", default=old["PREFIX"])
    home = config_of(ROOT, "0")["project"]["urls"]["Source"]
    parser.add_argument("--home", default=home)
    new = parser.parse_args()

    files = tracked()
    rest = "|".join(map(re.escape, names(old["PREFIX"])))
    core = re.escape(old["CORE"])
    # A name stands alone: it is no part of a longer one.
    dist = re.compile(
        rf"(?<![\w-])(?:(?P<core>{core})|{re.escape(old['PREFIX'])}(?P<rest>{rest}))(?![\w-])"
    )

    def renamed(match: re.Match[str]) -> str:
        return new.core if match["core"] else new.prefix + match["rest"]

    for file in files:
        if file in (NAMING, Path(__file__).resolve()) or file.is_symlink():
            continue
        try:
            text = file.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        parts = text.split(home)
        changed = new.home.join(dist.sub(renamed, part) for part in parts)
        changed = changed.replace(f'"{old["PREFIX"]}"', f'"{new.prefix}"')
        if changed != text:
            file.write_text(changed, "utf-8")
        name = dist.sub(renamed, file.name)
        if name != file.name:
            subprocess.run(["git", "mv", file, file.with_name(name)], cwd=ROOT, check=True)

    text = NAMING.read_text("utf-8")
    for name, value in (("CORE", new.core), ("PREFIX", new.prefix)):
        text = re.sub(rf'^{name} = ".*"$', f'{name} = "{value}"', text, flags=re.MULTILINE)
    NAMING.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
