"""Run every check that must be green before a release, and keep how each ended.

``python .ci/release_check.py TARGET...``, or ``make release-check``. Each target of the Makefile runs
to its end, also after another has failed. Whole logs are in build/release-check; the table with the
last line of each, the commit and the machine is written to benchmarks/release-check.md. The status
is 0 only if all are green and the working tree has no changes.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOGS = Path("build/release-check")
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
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--make", default=os.environ.get("MAKE", "make"))
    options = parser.parse_args(words)
    changed = git(options.root, "status", "--porcelain", "--untracked-files=no")
    commit = git(options.root, "rev-parse", "--short", "HEAD") + (
        " with changes" if changed else ""
    )
    results = []
    for target in options.targets:
        print(f"{target}: see {LOGS / target}.log", flush=True)
        results.append(run(target, options.root, options.make.split()))
        print(f"{target}: {results[-1].last}", flush=True)
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
