"""Clean runs of the matrix through dscore-verify: it must raise no alarm in any of them.
``python tests/matrix/verified.py [--rows 300]``

A row is trained in its layout with the recorder, replayed in one process, and once more from moved
weights, as ``dscore verify`` does. Results are appended to a file, so a run that was interrupted
goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "combinations"))
sys.path.insert(0, str(HERE.parents[1] / "plugins" / "verify" / "tests"))

import matrix  # noqa: E402
import models as m  # noqa: E402
import trial  # noqa: E402
import verdicts  # noqa: E402
import verified_runs  # noqa: E402
from ds_testing import RemoteError, run_ranks  # noqa: E402
from ds_testing.kits.matrix.covering import Row, Rules, combinations, cover  # noqa: E402
from ds_verify.comparing import Report  # noqa: E402
from features import NAMES, possible  # noqa: E402

LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    # What changes numbers by design, or does the updates at other times.
    "offload": ("zenflow",),
    "wires": ("qwZ", "qgZ"),
    "comm": ("fp32",),
    "optimizer": ("OneBitAdam", "AdamW8bit"),
    "routing": ("layer_drop", "random_ltd", "quantised"),
    # Two runs, and what a program does between its steps.
    "moved": ("same", "stage", "world"),
    "trained": ("thawed",),
    # Most of a row's time is the compiler's; tests/matrix compares such rows.
    "compile": ("at_start",),
}
VALUES = {
    name: tuple(v for v in values if v not in LEFT_OUT.get(name, ()))
    for name, values in NAMES.items()
}
"""The features that are verified."""


def run_program(row: Row, config: Mapping[str, Any], section: Mapping[str, Any]) -> None:
    """On every rank: the program of a row, which the recorder ends."""
    import ds_core

    model = _undivided(row) if section.get("role") == "replay" else trial.model_of(row)
    trial.freeze(model, row["trained"])
    engine, *_ = ds_core.initialize(
        model=model,
        model_parameters=trial.groups_of(model, row) if row["groups"] == "two" else None,
        config={**config, "verify": dict(section)},
    )
    try:
        for step in range(20):
            trial.one_step(engine, row, step, int(row["gas"]))
    except SystemExit as end:
        assert not end.code
        engine.destroy()
        return
    raise AssertionError("the recorder ends the program after its last step")


def _undivided(row: Row) -> Any:
    """The row's model in one process: of one stage, with all experts."""
    alone = {**row, "ep": "none" if row["ep"] == "none" else "experts"}
    if row["pp"] == "none":
        return trial.model_of(alone)
    block = m.Block if alone["ep"] == "none" else m.ExpertBlock
    return trial.prepared(m.pipeline(block, stages=1), alone)


def verify(row: Row, folder: Path) -> Report:
    """What ``dscore verify`` finds."""
    world, _ = trial.ranks_of(row)
    config = trial.settings(row, str(folder), int(row["gas"]))
    return verified_runs.verify(
        run_ranks, folder, config, world=world, script=run_program, arguments=[dict(row)]
    )


def judged(row: Row) -> dict[str, Any]:
    """equal, different (an alarm), or failed."""
    folder = Path(tempfile.mkdtemp(prefix="verified-"))
    began = time.monotonic()
    try:
        report = verify(row, folder)
        first = report.first
        found: dict[str, Any] = {"kind": "equal", "largest": report.largest}
        found["compared"] = len(report.rows)
        if first is not None:
            found |= {"kind": "different", "first": f"{first.kind} {first.name}, {report.cause}"}
    except RemoteError as error:
        text = str(error.failures[0])
        said = next((line for line in text.splitlines() if " raised " in line), text[:300])
        refused = "in initialize" in text and any(kind in said for kind in verdicts.REFUSALS)
        found = {"kind": "refused" if refused else "failed", "said": said, "message": text[-6000:]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"title": matrix.title(row), "row": dict(row), "s": time.monotonic() - began, **found}


def verifiable(row: Row) -> bool:
    """Whether a row is one that dscore-verify compares."""
    divided = row.get("sp", "none") in ("ulysses", "ring")
    return possible(row) and not (divided and row.get("pp", "none") != "none")


def chosen(count: int) -> list[dict[str, str]]:
    """So many rows, of coverings of all pairs."""
    rules = Rules(VALUES, matrix.known(), verifiable)
    wanted = combinations(VALUES, 2)
    rows: dict[str, dict[str, str]] = {}
    for seed in itertools.count():
        for row in cover(rules, wanted, seed):
            whole = {name: row.get(name, NAMES[name][0]) for name in NAMES}
            rows.setdefault(matrix.title(whole), whole)
            if len(rows) == count:
                return list(rows.values())
    raise AssertionError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--results", type=Path, default=Path("build/verified.jsonl"))
    arguments = parser.parse_args()
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    done = matrix.read(arguments.results)
    bad = 0
    for row in chosen(arguments.rows):
        if matrix.title(row) in done:
            continue
        result = judged(row)
        bad += result["kind"] in ("different", "failed")
        with arguments.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        said = result.get("first") or result.get("said") or f"{result['largest']:.2g}"
        print(
            f"{result['s']:5.1f} s {result['kind']:10} {result['title']}: {said[:300]}", flush=True
        )
    return min(bad, 100)


if __name__ == "__main__":
    raise SystemExit(main())
