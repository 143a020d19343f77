"""Runs the composition matrix: every pair of values of the features, and of the numeric core every
triple. ``python tests/matrix/matrix.py [--shard 1/4] [--triples] [--limit N]``

Results are appended to a file, so a run that was interrupted goes on where it was. Refused pairs
are kept in refused.json: they are in no row, and each is tried by itself.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import table  # noqa: E402
import verdicts  # noqa: E402
from ds_testing import run_ranks  # noqa: E402
from ds_testing.kits.matrix.covering import (  # noqa: E402
    Combination,
    Row,
    Rules,
    combinations,
    cover,
    held,
)
from features import NAMES, NUMERIC, possible  # noqa: E402


def known(results: Path | None = None) -> list[Combination]:
    """The pairs that are known to be refused: by the config, and by runs in `results`."""
    rows = table.read(table.REFUSED)
    if results is not None:
        rows += [row for row in read(results).values() if row["kind"] == "refused"]
    pairs = map(table.pair_of, rows)
    return [pair for pair in pairs if len(pair) == 2]


def rows(results: Path, triples: bool) -> list[dict[str, str]]:
    """Rows with every pair that no run has had; with `triples` also every triple of the numeric
    core.
    """
    refused = known(results)
    done = [row["row"] for row in read(results).values() if row["kind"] in table.GOOD]
    found = _left(Rules(NAMES, refused, possible), done, 2)
    if triples:
        core = {name: NAMES[name] for name in NUMERIC}
        inside = [pair for pair in refused if {name for name, _ in pair} <= core.keys()]
        for row in _left(Rules(core, inside, possible), done, 3):
            whole = Rules(NAMES, refused, possible).complete(row)
            if whole is not None:
                found.append({name: whole[name] for name in NAMES})
    return found


def _left(rules: Rules, done: Sequence[Row], strength: int) -> list[dict[str, str]]:
    had = {
        some
        for row in done
        for some in held({n: row[n] for n in rules.features if n in row}, strength)
    }
    return cover(rules, combinations(rules.features, strength) - had)


def row_of(text: str, values: Mapping[str, tuple[str, ...]] = NAMES) -> dict[str, str]:
    """The plainest row of `values` with those that `text` names."""
    given = dict(choice.split("=") for choice in text.split())
    row = Rules(values, known(), possible).complete(given)
    assert row is not None, f"{text} is refused"
    return row


def title(row: Row) -> str:
    """The row's choices that are not the plainest."""
    plain = {name: values[0] for name, values in NAMES.items()}
    return " ".join(f"{n}={v}" for n, v in row.items() if v != plain[n]) or "plain"


def read(results: Path) -> dict[str, dict[str, Any]]:
    """Results by title."""
    if not results.exists():
        return {}
    lines = results.read_text(encoding="utf-8").splitlines()
    return {row["title"]: row for row in map(json.loads, lines)}


def result_of(row: Row, learned: Rules, temporary: Path) -> dict[str, Any]:
    """The row's result. A refusal is traced to its pair, which `learned` takes."""
    began = time.monotonic()
    verdict = verdicts.judge(run_ranks, row, temporary)
    if verdict["kind"] == "refused":
        pair = verdicts.cause(row, verdict["message"])
        verdict |= {"pair": sorted(pair), "both": verdicts.names_both(pair, verdict["message"])}
        if pair:
            learned.refused.add(pair)
    return {"title": title(row), "row": dict(row), "s": time.monotonic() - began, **verdict}


def line(result: Mapping[str, Any]) -> str:
    """A result on one line."""
    message = result.get("message", "").strip().splitlines()[-1:]
    told = message[0] if message else f"off {result.get('off')} of {result.get('allowed')}"
    at = f" at {result['worst']}" if "worst" in result else ""
    return f"{result['s']:5.1f} s {result['kind']:10} {result['title']}: {told}{at}"


def learn_refused() -> None:
    """Find the pairs that the config refuses, and keep them beside those that runs have found."""
    found = verdicts.learn(Rules(NAMES, (), possible))
    entries = [
        {
            "pair": sorted(pair),
            "names both": verdicts.names_both(pair, message),
            "message": message,
            "by": "config",
        }
        for pair, message in found.items()
    ]
    entries += [entry for entry in table.read(table.REFUSED) if entry["by"] == "initialize"]
    table.REFUSED.unlink(missing_ok=True)
    table.keep_refused(entries)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shard", default="1/1", help="which part of the rows, of how many")
    parser.add_argument("--triples", action="store_true", help="also triples of the numeric core")
    parser.add_argument("--limit", type=int, help="run at most so many rows")
    parser.add_argument("--results", type=Path, default=Path("build/matrix.jsonl"))
    parser.add_argument("--only", help="rows whose title holds this")
    parser.add_argument("--learn", action="store_true", help="write refused.json anew, and end")
    parser.add_argument("--write", action="store_true", help="keep the results, write the page")
    arguments = parser.parse_args()
    if arguments.learn:
        learn_refused()
        return 0
    if arguments.write:
        table.write(list(read(arguments.results).values()))
        return 0
    place, count = map(int, arguments.shard.split("/"))
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    done = read(arguments.results)
    chosen = rows(arguments.results, arguments.triples)[place - 1 :: count]
    left = [row for row in chosen if title(row) not in done]
    if arguments.only:
        left = [row for row in left if arguments.only in title(row)]
    learned = Rules(NAMES, known(arguments.results), possible)
    bad = 0
    for row in left[: arguments.limit]:
        if not learned.allow(row):
            continue  # a pair of it was refused meanwhile; the next run covers its other pairs
        temporary = Path(tempfile.mkdtemp(prefix="matrix-"))
        result = result_of(row, learned, temporary)
        with arguments.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        bad += result["kind"] in ("wrong", "failed") or not result.get("both", True)
        print(line(result), flush=True)
        shutil.rmtree(temporary, ignore_errors=True)
    return min(bad, 100)


if __name__ == "__main__":
    raise SystemExit(main())
