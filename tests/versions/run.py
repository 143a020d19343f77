"""``make test-versions``: install the wheels on each supported version as a user would, train,
write down the result.

One version at a time: a virtual environment of its own, that python, that torch from the registry,
the wheels of ``dscore-train[standard]`` and dscore-testing with what they declare. With "lowest", everything
else that our wheels declare is installed at its lower bound, too. The environment is deleted
afterwards: a CUDA build of torch takes 6 GB. The rows of docs/versions.md are written.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from distributions import DISTRIBUTIONS, ROOT
from ds_testing.processes import clean_environment, run
from packaging.version import Version

sys.path.insert(0, str(ROOT / ".ci"))

import build as builder

HERE = Path(__file__).parent
PAGE = ROOT / "docs" / "versions.md"
VERSIONS = (
    ("3.10", "2.6.0", "lowest"),
    ("3.11", "2.13.0", ""),
    ("3.12", "2.13.0", ""),
    ("3.13", "2.14.1", ""),
)
"""(python, torch, "lowest" for the lower bounds of the rest)"""

LIGHT = """
import importlib, importlib.metadata as metadata, sys
for dist in metadata.distributions():
    if dist.name.startswith("dscore-"):
        for point in dist.entry_points:
            if point.group.startswith("ds_core."):
                point.load()
import ds_core
assert "torch" not in sys.modules, "a declaration loaded torch"
"""
EVERY_MODULE = """
import importlib, pathlib, sys
import ds_core
home = pathlib.Path(ds_core.__file__).parents[1]
files = [f for p in home.glob("ds_*") if (p / "__init__.py").exists() for f in p.rglob("*.py")]
for file in files:
    parts = file.relative_to(home).with_suffix("").parts
    if parts[-1] != "__main__":
        importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
print(len(files), "modules")
"""
KIT = """
from ds_core.setup.builtin import ds_accelerators
from ds_testing import AcceleratorConformance

class TestCpu(AcceleratorConformance):
    entry = tuple(ds_accelerators())[-1]
    resets_peak = False  # depends on the container
"""


def find_python(version: str) -> str:
    """The interpreter of this version, on the PATH or pyenv's."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for found in (shutil.which(f"python{version}"), *map(str, pyenv)):
        if (
            found
            and subprocess.run([found, "-V"], capture_output=True, check=False).returncode == 0
        ):
            return found
    raise SystemExit(
        f"there is no python{version}: install it (pyenv install {version}) or leave it out with "
        "--only"
    )


def lower_bounds(file: Path) -> Path:
    """A constraints file: the lower bound of everything that a distribution of ours declares, but
    torch.
    """
    texts = [(folder / "pyproject.toml").read_text() for folder in (ROOT, *DISTRIBUTIONS)]
    found = re.findall(r'"([A-Za-z][\w-]*)(?:\[\w+\])?>=([\d.]+)', "\n".join(texts))
    highest: dict[str, str] = {}
    for name, bound in found:  # some are declared by several distributions
        if not name.startswith("dscore-") and name != "torch":
            highest[name] = max(highest.get(name, "0"), bound, key=Version)
    rows = [f"{name}=={bound}" for name, bound in highest.items()]
    file.write_text("\n".join(sorted(rows)) + "\n")
    return file


def install(place: Path, wheels: Path, python: str, torch: str, lowest: str) -> str:
    """A new environment with everything; gives its python."""
    here = str(place / "venv" / "bin" / "python")
    run([find_python(python), "-m", "venv", str(place / "venv")])
    pip = [here, "-m", "pip", "install", "-q", "--no-cache-dir"]
    run([*pip, f"torch=={torch}"], timeout=1200)
    bounds = ["-c", str(lower_bounds(place / "bounds.txt"))] if lowest else []
    run(
        [
            *pip,
            "-c",
            str(wheels / "constraints.txt"),
            *bounds,
            "dscore-train[standard]",
            "dscore-testing",
        ],
        timeout=600,
    )
    run([here, "-m", "pip", "check"])
    return here


def try_out(python: str, place: Path) -> dict[str, Any]:
    """Declarations without torch, every module, the accelerator kit, commands, training on one and
    two processes.
    """
    gpt = ROOT / "examples" / "gpt"
    for file in (HERE / "train.py", gpt / "model.py", gpt / "ds_config.json"):
        shutil.copy(file, place)
    (place / "test_kit.py").write_text(KIT)
    env = clean_environment(HOME=str(place), DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    seen: dict[str, Any] = {}
    run([python, "-c", LIGHT], cwd=place, env=env)
    seen["modules"] = run([python, "-c", EVERY_MODULE], cwd=place, env=env).split()[-2]
    options = ["-q", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull]
    kit = run([python, "-m", "pytest", *options, "test_kit.py"], cwd=place, env=env)
    seen["kit"] = re.findall(r"(\d+) passed", kit)[-1]
    dscore = str(Path(python).with_name("dscore"))
    for words in (
        "plugins",
        "doctor",
        "config schema",
        "plan --world 64 --params 7B --device-memory 80GB",
    ):
        run([dscore, *words.split()], cwd=place, env=env)
    for nproc in (1, 2):
        out = place / f"out{nproc}"
        out.mkdir()
        command = [dscore, "run", "--nproc", str(nproc), "train.py", "ds_config.json", str(out)]
        run(command, cwd=place, env=env, timeout=600)
        seen[f"{nproc} processes"] = json.loads((out / "seen.json").read_text())
    return seen


def judge(seen: dict[str, Any]) -> list[float]:
    """The losses of the run, if every stage on one and on two processes has the same and the
    monitor wrote them.
    """
    (reference, *_) = seen["1 processes"]["losses"].values()
    for nproc in (1, 2):
        run_ = seen[f"{nproc} processes"]
        for stage, losses in run_["losses"].items():
            assert close(losses, reference, 1e-4), (
                f"stage {stage}, {nproc} processes: {losses}, not {reference}"
            )
        # rank 0's loss, of all stages one after the other
        written = [float(value) for _, value in run_["csv"]]
        assert len(written) == 4 * len(reference), written
        assert nproc == 2 or close(written[-len(reference) :], losses, 1e-6), (
            f"{written}, not {losses}"
        )
    return list(reference)


def close(a: list[float], b: list[float], tolerance: float) -> bool:
    return len(a) == len(b) and all(
        abs(x - y) <= tolerance * abs(y) for x, y in zip(a, b, strict=True)
    )


def write_row(
    python: str, torch: str, lowest: str, seen: dict[str, Any], losses: list[float]
) -> None:
    """Put the row of this version into the table of docs/versions.md, in place of an older one."""
    text = PAGE.read_text()
    rest = "lower bounds" if lowest else "newest"
    found = seen["1 processes"]
    shown = ", ".join(f"{loss:.5f}" for loss in losses)
    row = (
        f"| {python} | {torch} | {found['python']} | {found['torch']} | {rest} | "
        f"{datetime.date.today()} | "
        f"{seen['modules']} modules, {seen['kit']} checks | {shown} |"
    )
    begin = text.index("<!-- rows -->\n") + len("<!-- rows -->\n")
    end = text.index("<!-- /rows -->")
    head, rule, *rows = text[begin:end].strip().splitlines()
    rows = sorted(
        [r for r in rows if not r.startswith(f"| {python} | {torch} |")] + [row], key=_order
    )
    PAGE.write_text(text[:begin] + "\n".join([head, rule, *rows]) + "\n" + text[end:])


def _order(row: str) -> list[int]:
    return [int(part) for cell in row.split("|")[1:3] for part in cell.strip().split(".")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="one version of Python, as 3.12")
    parser.add_argument("--python", help="an interpreter that has everything already; with --only")
    args = parser.parse_args()
    reference: list[float] | None = None
    with tempfile.TemporaryDirectory(prefix="versions-", dir=ROOT) as folder:
        wheels = Path(folder, "wheels")
        builder.main([str(wheels)])
        for python, torch, lowest in VERSIONS:
            if args.only not in (None, python):
                continue
            place = Path(folder, python)
            place.mkdir()
            seen = try_out(args.python or install(place, wheels, python, torch, lowest), place)
            losses = judge(seen)
            reference = reference or losses
            assert close(losses, reference, 1e-5), (
                f"python {python}, torch {torch}: {losses}, others {reference}"
            )
            write_row(python, torch, lowest, seen, losses)
            print(f"python {python}, torch {torch}: {losses}", flush=True)
            shutil.rmtree(place)


if __name__ == "__main__":
    sys.exit(main())
