"""The three runs of a verification: the subject, the reference, and the perturbed reference
(torch-free).

Each is ``dscore run`` of the script with a config that has a section ``verify``, which the variable
DS_CONFIG_OVERRIDES adds: the script needs no change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_command_kit.show import CommandError

from ds_core.config import read_config

ALONE: Mapping[str, Any] = {
    "zero_optimization": {"stage": 0},
    "tensor_parallel": {"autotp_size": 1},
    "sequence_parallel": {"size": 1},
    "sequence_parallel_size": 1,
    "pipeline": {"stages": 1, "chunks": 1},
}
"""What sections of a layout are in one process."""

VARIABLE = "DS_CONFIG_OVERRIDES"


@dataclass(frozen=True, slots=True)
class Script:
    """What is verified: words of ``dscore run``."""

    options: tuple[str, ...]
    """Before the script, such as ``--module``."""
    name: str
    arguments: tuple[str, ...]


@dataclass(slots=True)
class Running:
    """A run that was started."""

    process: subprocess.Popen[bytes]
    folder: Path
    log: Path
    world: int

    def wait(self, what: str) -> None:
        """Wait for its end; CommandError, with the end of its output, where the record is not
        whole.
        """
        code = self.process.wait()
        if all((self.folder / f"rank{rank}" / "done").exists() for rank in range(self.world)):
            return
        text = self.log.read_text(encoding="utf-8", errors="replace").strip()
        tail = "\n".join(text.splitlines()[-30:])
        raise CommandError(f"{what} did not come to its end (exit code {code}):\n{tail}")


def start_run(script: Script, world: int, overrides: Mapping[str, Any], folder: Path) -> Running:
    """Start `script` on `world` processes of this host."""
    folder.mkdir(parents=True, exist_ok=True)
    given = read_config(os.environ.get(VARIABLE) or {}).raw
    section = {**overrides["verify"], "folder": str(folder)}
    more = folder / "overrides.json"
    more.write_text(json.dumps({**given, **overrides, "verify": section}), encoding="utf-8")
    # The number of threads changes the order of sums, so it is the same in all runs.
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    environment = {**os.environ, VARIABLE: str(more), "OMP_NUM_THREADS": threads}
    words = [*script.options, script.name, *script.arguments]
    command = [sys.executable, "-m", "ds_cli", "run", "--nproc", str(world), *words]
    log = folder / "output.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    return Running(process, folder, log, world)


def reference_overrides(facts: Mapping[str, Any], against: Mapping[str, Any]) -> dict[str, Any]:
    """The config of one process that computes what the subject does, or of the layout `against`."""
    layout: dict[str, Any] = {key: ALONE[key] for key in facts["keys"] if key in ALONE}
    if facts["mesh"].get("pp", 1) > 1:  # the model has the section, and not the config
        layout["pipeline"] = ALONE["pipeline"]
    if facts["compute"] == "float16":
        # A sum of so many micro-batches would overflow where the subject's mean does not.
        layout["data_types"] = {"grad_accum_dtype": "fp32"}
    micro = int(facts["micro"])
    count = int(facts["gas"]) * int(facts["parts"])
    batch = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": count,
        "train_batch_size": micro * count,
    }
    return {**layout, **batch, **against}


def replay_overrides(
    facts: Mapping[str, Any],
    config: Mapping[str, Any],
    against: Mapping[str, Any] | None,
    world: int = 1,
) -> dict[str, Any]:
    """The config of a reference on `world` processes; see `make_runs`.

    Raises CommandError where they cannot share the subject's micro-batches.
    """
    if against is None:
        return {**config, **reference_overrides(facts, {})}
    # The layout's own processes share the subject's micro-batches; one that divides the model over
    # processes says itself how many each of its data-parallel ranks gets.
    share = int(facts["gas"]) * int(facts["parts"])
    overrides = {**config, **reference_overrides({**facts, "keys": [], "mesh": {}}, against)}
    if "gradient_accumulation_steps" not in against:
        if share % world:
            raise CommandError(
                f"the subject's step has {share} micro-batches, which {world} processes cannot "
                "share; give gradient_accumulation_steps in the file of --against"
            )
        overrides["gradient_accumulation_steps"] = share // world
    return overrides


def make_runs(
    script: Script,
    world: int,
    folder: Path,
    *,
    config: Mapping[str, Any],
    against: Mapping[str, Any] | None,
    section: Mapping[str, Any],
    reference_world: int = 1,
    reference_arguments: Sequence[str] = (),
) -> tuple[Path, Path, Path]:
    """Make the three runs; gives the folders of subject, reference and perturbed reference.

    config: keys that the subject's config gets, in place of its own.
    against: those of the reference's layout; None: one process.
    section: of ``verify``.
    reference_arguments: words after the script's own, where it divides its model by itself.
    """
    subject = folder / "subject"
    role = {"verify": {**section, "role": "record"}}
    start_run(script, world, {**config, **role}, subject).wait("the run")
    facts = json.loads((subject / "facts.json").read_text(encoding="utf-8"))
    overrides = replay_overrides(facts, config, against, reference_world)
    again = replace(script, arguments=(*script.arguments, *reference_arguments))
    started = []
    for name, perturb in (("reference", False), ("perturbed", True)):
        role = {"verify": {**section, "role": "replay", "source": str(subject), "perturb": perturb}}
        started.append(start_run(again, reference_world, {**overrides, **role}, folder / name))
    for run, name in zip(started, ("the reference", "the perturbed reference"), strict=True):
        run.wait(name)
    return subject, started[0].folder, started[1].folder
