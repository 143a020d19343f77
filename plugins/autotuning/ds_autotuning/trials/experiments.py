"""Trials in a folder: each is run once, and what lies there is all that is known of it.

``exps_dir/NNN_name/{config.json, result.json, log}``. A tuner that was killed asks for the same
trials again in the same order; those that have a result are answered from the folder, and one that
was under way is run anew.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from ds_command_kit.overrides import encode

from ds_autotuning.records import Result, Status, read_json, write_json
from ds_autotuning.trials.launching import Launch
from ds_autotuning.trials.processes import end_all, run_limited
from ds_core.errors import UsageError

_FOLDER = re.compile(r"\d{3,}_.+|profile_\d+")
_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|Cannot allocate "
    r"memory|MemoryError|std::bad_alloc"
)
_KILLED = 137  # by SIGKILL, as the launcher reports it


@dataclass(frozen=True)
class Limits:
    """Of one trial.

    seconds: from its start to its end.
    memory: bytes of each process on the host, 0: none.
    """

    seconds: float
    memory: int = 0


class Experiments:
    """The folder of trials, held by one tuner at a time.

    identity: what makes results comparable: the command, the config, what is measured.

    Raises UsageError where the folder has trials of another identity, or another tuner works in it.
    """

    def __init__(
        self, folder: Path, identity: Mapping[str, Any], limits: Limits, *, anew: bool = False
    ) -> None:
        self.folder = folder.absolute()
        self.limits = limits
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.folder / "lock")
        for path in self._trials():  # of a tuner that was killed
            end_all(str(path))
        if anew:
            self._forget()
        text = json.loads(json.dumps(identity))
        known = read_json(self.folder / "identity.json")
        if known is not None and known != text:
            differs = ", ".join(sorted(k for k in {*known, *text} if known.get(k) != text.get(k)))
            self._lock.close()
            raise UsageError(
                f"{self.folder} has trials of another tuning (other {differs}); set another "
                "autotuning.exps_dir, "
                "or start over with --anew (autotuning.overwrite)"
            )
        write_json(self.folder / "identity.json", text)

    def close(self) -> None:
        """Let another tuner work in the folder."""
        self._lock.close()

    def known(self, name: str) -> Result | None:
        """The result of the trial `name`; None where it is not there or was not finished.

        A trial that was interrupted together with the tuner may have written down that it failed.
        What counts besides a measurement is therefore what the tuner made of it, which says so in
        ``config.json``.
        """
        result = self._written(name)
        ended = "ended" in (read_json(self.folder / name / "config.json") or {})
        return result if result is not None and (ended or result.status is Status.DONE) else None

    def _written(self, name: str) -> Result | None:
        data = read_json(self.folder / name / "result.json")
        try:
            return None if data is None else Result.from_json(data)
        except (KeyError, TypeError, ValueError):
            return None

    def run(
        self,
        name: str,
        launch: Launch,
        overrides: Mapping[str, Any],
        setting: Mapping[str, Any] = {},
    ) -> Result:
        """The result of the trial `name`, from its folder or by running it.

        Never raises for what happens in it.
        """
        if (result := self.known(name)) is not None and self._setting(name) == json.loads(
            json.dumps(setting)
        ):
            return result
        folder = self.folder / name
        begun = folder.is_dir() and all(
            path.name.startswith("config.json.") for path in folder.iterdir()
        )
        if folder.exists() and not (begun or _is_trial(folder)):
            raise UsageError(
                f"{folder} is no trial of a tuner; move it away, or set another autotuning.exps_dir"
            )
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shown = {"setting": setting, "overrides": overrides, "words": launch.words()}
        write_json(folder / "config.json", shown)
        started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        environment = {**os.environ, "DS_CONFIG_OVERRIDES": encode(overrides)}
        ended = run_limited(
            launch.command(), folder, environment, self.limits.seconds, self.limits.memory
        )
        result = self._written(name)
        if result is None or (result.status is not Status.DONE and not ended.in_time):
            status, reason = why_it_failed(
                ended.code, ended.in_time, self.limits.seconds, _tail(folder / "log")
            )
            result = Result(status, reason)
        result = replace(result, started=started, took=round(ended.took, 3))
        write_json(folder / "result.json", result.to_json())
        write_json(
            folder / "config.json",
            {**shown, "ended": {"code": ended.code, "in_time": ended.in_time}},
        )
        return result

    def _setting(self, name: str) -> Any:
        return (read_json(self.folder / name / "config.json") or {}).get("setting")

    def _trials(self) -> Sequence[Path]:
        return [
            p for p in sorted(self.folder.iterdir()) if p.is_dir() and _FOLDER.fullmatch(p.name)
        ]

    def _forget(self) -> None:
        for path in self._trials():
            if _is_trial(path):
                shutil.rmtree(path)
        (self.folder / "identity.json").unlink(missing_ok=True)


def _is_trial(folder: Path) -> bool:
    """Whether a tuner made this folder: a user's own may have such a name, and a config of its
    own."""
    saved = read_json(folder / "config.json") or {}
    return "overrides" in saved and saved.keys() <= {"setting", "overrides", "words", "ended"}


def why_it_failed(code: int, in_time: bool, seconds: float, said: str) -> tuple[Status, str]:
    """What to make of a trial that left no result.

    code: exit code of its launcher.
    said: the end of its output.
    """
    if not in_time:
        return (
            Status.TIMEOUT,
            f"not done after {seconds:g} s (autotuning.trial_seconds); see its log",
        )
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if found := next((line for line in reversed(lines) if _MEMORY.search(line)), None):
        return Status.OUT_OF_MEMORY, found[:300]
    if code in (_KILLED, -9) or "SIGKILL" in said:
        return (
            Status.OUT_OF_MEMORY,
            "a process was killed by the system, which does so when memory runs out",
        )
    if code == 0:
        return (
            Status.CRASHED,
            "the script ended before the last step to measure; see autotuning.end_profile_step",
        )
    last = next(
        (line for line in reversed(lines) if not line.startswith(("dscore: ", "[rank"))),
        lines[-1:] and lines[-1],
    )
    return Status.CRASHED, f"exit code {code}: {(last or 'it said nothing')[:300]}"


def _tail(path: Path, size: int = 20_000) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - size, 0))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _locked(path: Path) -> IO[str]:
    """Hold `path` until the file is closed or this process ends, however it ends."""
    import fcntl

    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UsageError(
            f"another tuner works in {path.parent}; wait for it, or set another autotuning.exps_dir"
        ) from None
    return file
