"""Run every check that must be green before a release, and keep how each ended.

``python .ci/release_check.py TARGET...``, or ``make release-check``. Each target of the Makefile runs
to its end, also after another has failed. Whole logs are in build/release-check; the table with the
last line of each, the commit and the machine is written to benchmarks/release-check.md. The status
is 0 only if all are green and the working tree has no changes.

All of them take hours. So what was green is kept in build/release-check, and a check that was
interrupted resumes: at the same commit, only the other targets are run. ``--again`` runs all.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOGS = Path("build/release-check")
GREEN = LOGS / "green.json"
TABLE = Path("benchmarks/release-check.md")
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Result:
    """How a target ended. last: the last line that it printed."""

    target: str
    status: int
    seconds: float
    last: str


def run(target: str, root: Path, make: Sequence[str]) -> Result:
    """Run one target, with its output in a log of its own."""
    log = root / LOGS / f"{target}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with open(log, "w") as file:
        words = [*make, target]
        done = subprocess.run(words, cwd=root, stdout=file, stderr=subprocess.STDOUT, check=False)
    said = last_line(log.read_text("utf-8", "replace"))
    return Result(target, done.returncode, time.monotonic() - start, said)


def read_green(root: Path, commit: str) -> dict[str, Result]:
    """The targets that were green at `commit`, by name."""
    try:
        kept = json.loads((root / GREEN).read_text())
    except FileNotFoundError:
        return {}
    if kept["commit"] != commit:
        return {}
    return {row["target"]: Result(**row) for row in kept["results"]}


def keep_green(root: Path, commit: str, green: Sequence[Result]) -> None:
    """Write what `read_green` reads, in one step: an interrupted check leaves the old or the new."""
    text = json.dumps({"commit": commit, "results": [asdict(result) for result in green]}, indent=1)
    temporary = (root / GREEN).with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(root / GREEN)


def last_line(text: str) -> str:
    """The last line that says something, without colours and what would end a table's cell."""
    lines = [ESCAPE.sub("", line).strip(" =\t") for line in text.splitlines()]
    said = [line for line in lines if line]
    return said[-1].replace("|", "\\|") if said else ""


def table(results: Sequence[Result], commit: str, machine: str, day: str) -> str:
    """The page: what was run, where, and how it ended."""
    rows = [
        f"| `make {r.target}` | {'green' if r.status == 0 else f'**failed** ({r.status})'} "
        f"| {r.seconds / 60:.1f} min | {r.last} |"
        for r in results
    ]
    return "\n".join(
        [
            "# The last release check",
            "",
            f"Written by `make release-check` on {day}, commit `{commit}`, on {machine}.",
            "",
            "| check | result | took | last line |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def git(root: Path, *words: str) -> str:
    """What a git command prints; empty where it fails."""
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main(words: Sequence[str] | None = None) -> int:
    """Run the targets and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--again", action="store_true", help="also what was green at this commit")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--make", default=os.environ.get("MAKE", "make"))
    options = parser.parse_args(words)
    changed = git(options.root, "status", "--porcelain", "--untracked-files=no")
    commit = git(options.root, "rev-parse", "--short", "HEAD") + (
        " with changes" if changed else ""
    )
    # Changes are not part of a commit, so what is green with them says nothing about a later run.
    green = {} if changed or options.again else read_green(options.root, commit)
    results = []
    for target in options.targets:
        result = green.get(target)
        if result is not None:
            print(f"{target}: was green at this commit", flush=True)
        else:
            print(f"{target}: see {LOGS / target}.log", flush=True)
            result = run(target, options.root, options.make.split())
            print(f"{target}: {result.last}", flush=True)
        results.append(result)
        if result.status == 0 and not changed:
            green[target] = result
            keep_green(options.root, commit, list(green.values()))
    python = f"Python {platform.python_version()}"
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {python}"
    page = table(results, commit, machine, datetime.date.today().isoformat())
    (options.root / TABLE).write_text(page)
    print(page)
    if changed:
        print("The working tree has changes: this checked no commit.")
    return int(bool(changed) or any(result.status for result in results))


if __name__ == "__main__":
    sys.exit(main())
