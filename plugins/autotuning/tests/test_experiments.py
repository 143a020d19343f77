"""Trials that hang, crash, run out of memory, or are interrupted: each is a result, and nothing of
it is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ds_autotuning.records import Result, Status, read_json, write_json
from ds_autotuning.trials.experiments import Experiments, Limits, why_it_failed
from ds_autotuning.trials.launching import Launch
from ds_autotuning.trials.processes import MARK, end_all, run_limited
from ds_testing.processes import disposed

from ds_core.errors import UsageError

Open = Callable[..., Experiments]
linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="needs /proc and RLIMIT_DATA"
)


@dataclass(frozen=True)
class Program(Launch):
    """A trial that is one Python program; the file for its result is argv[1]."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.script, *self.arguments]


def program(text: str, folder: Path, name: str) -> Program:
    return Program((), text, (str(folder / name / "result.json"),))


def opened(folder: Path, seconds: float = 60.0, memory: int = 0, **options: Any) -> Experiments:
    return Experiments(
        folder, options.pop("identity", {"command": "x"}), Limits(seconds, memory), **options
    )


@pytest.fixture
def experiments() -> Iterator[Callable[..., Experiments]]:
    """`opened`, closed when the test ends."""
    with contextlib.ExitStack() as stack:

        def open_(*args: Any, **options: Any) -> Experiments:
            return stack.enter_context(contextlib.closing(opened(*args, **options)))

        yield open_


DONE = "import json, sys; json.dump({'status': 'done', 'throughput': 7.0}, open(sys.argv[1], 'w'))"


def test_a_result_is_kept_and_asked_for_once(tmp_path: Path, experiments: Open) -> None:
    trials = experiments(tmp_path)
    result = trials.run("001_a", program(DONE, tmp_path, "001_a"), {"x": 1}, {"k": 1})
    assert (result.status, result.throughput) == (Status.DONE, 7.0)
    assert result.took > 0
    again = trials.run(
        "001_a", program("raise SystemExit(9)", tmp_path, "001_a"), {"x": 1}, {"k": 1}
    )
    assert again == result
    told = read_json(tmp_path / "001_a" / "config.json") or {}
    assert (told["setting"], told["overrides"], told["ended"]["code"]) == ({"k": 1}, {"x": 1}, 0)


def test_another_setting_under_the_same_name_is_run(tmp_path: Path, experiments: Open) -> None:
    trials = experiments(tmp_path)
    trials.run("001_a", program(DONE, tmp_path, "001_a"), {}, {"k": 1})
    result = trials.run("001_a", program("raise SystemExit(9)", tmp_path, "001_a"), {}, {"k": 2})
    assert result.status is Status.CRASHED


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        ("raise SystemExit(9)", Status.CRASHED, "exit code 9: it said nothing"),
        (
            "print('a word'); raise ValueError('odd shape')",
            Status.CRASHED,
            "exit code 1: ValueError: odd shape",
        ),
        ("pass", Status.CRASHED, "the script ended before the last step"),
        ("raise MemoryError", Status.OUT_OF_MEMORY, "MemoryError"),
        (
            "raise RuntimeError('CUDA out of memory. Tried')",
            Status.OUT_OF_MEMORY,
            "CUDA out of memory",
        ),
        ("import os; os.kill(os.getpid(), 9)", Status.OUT_OF_MEMORY, "killed by the system"),
        ("import os; os.abort()", Status.CRASHED, "exit code -6"),
    ],
)
def test_what_dies_is_a_result_with_its_reason(
    tmp_path: Path, experiments: Open, text: str, status: Status, reason: str
) -> None:
    result = experiments(tmp_path).run("001_a", program(text, tmp_path, "001_a"), {})
    assert result.status is status
    assert reason in result.reason
    assert Result.from_json(read_json(tmp_path / "001_a" / "result.json") or {}) == result


def test_what_the_run_says_of_its_failure_counts(tmp_path: Path, experiments: Open) -> None:
    text = (
        "import json, sys\njson.dump({'status': 'out_of_memory', 'reason': 'rank 1'}, "
        "open(sys.argv[1], 'w'))\n"
        "raise SystemExit(1)"
    )
    result = experiments(tmp_path).run("001_a", program(text, tmp_path, "001_a"), {})
    assert (result.status, result.reason) == (Status.OUT_OF_MEMORY, "rank 1")


HANG = """
import subprocess, sys, time, signal, os
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1] + ".child", "w").write(str(child.pid))
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@linux
def test_a_trial_that_hangs_costs_its_limit_and_leaves_no_process(
    tmp_path: Path, experiments: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds_autotuning.trials.processes.GRACE", 0.2)
    begin = time.monotonic()
    result = experiments(tmp_path, seconds=2).run("001_a", program(HANG, tmp_path, "001_a"), {})
    assert result.status is Status.TIMEOUT
    assert "not done after 2 s" in result.reason
    assert time.monotonic() - begin < 30
    child = int((tmp_path / "001_a" / "result.json.child").read_text())  # in a session of its own
    assert not alive(child)


def test_one_that_is_interrupted_for_its_time_is_no_crash(
    tmp_path: Path, experiments: Open
) -> None:
    text = (
        "import json, sys, time\ntry:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n"
        "    json.dump({'status': 'crashed', 'reason': 'KeyboardInterrupt'}, open(sys.argv[1], "
        "'w'))"
    )
    result = experiments(tmp_path, seconds=2).run("001_a", program(text, tmp_path, "001_a"), {})
    assert result.status is Status.TIMEOUT


@pytest.mark.slow
def test_a_result_that_was_written_before_the_time_was_over_counts(
    tmp_path: Path, experiments: Open
) -> None:
    text = DONE + "; sys.stdout.flush(); import time; time.sleep(600)"
    result = experiments(tmp_path, seconds=3).run("001_a", program(text, tmp_path, "001_a"), {})
    assert (result.status, result.throughput) == (Status.DONE, 7.0)


@linux
def test_memory_has_a_limit_for_each_process(tmp_path: Path, experiments: Open) -> None:
    text = "block = bytearray(800_000_000)\n" + DONE
    free = experiments(tmp_path / "free").run(
        "001_a", program(text, tmp_path / "free", "001_a"), {}
    )
    assert free.status is Status.DONE
    limited = experiments(tmp_path / "limited", memory=400_000_000)
    result = limited.run("001_a", program(text, tmp_path / "limited", "001_a"), {})
    assert (result.status, result.reason) == (Status.OUT_OF_MEMORY, "MemoryError")


# -- the tuner is killed ---------------------------------------------------------------------------


def test_an_interrupted_trial_is_run_again_also_where_it_wrote_that_it_failed(
    tmp_path: Path, experiments: Open
) -> None:
    trials = experiments(tmp_path)
    folder = tmp_path / "001_a"
    write_json(folder / "config.json", {"setting": {}, "overrides": {}})
    write_json(folder / "result.json", Result(Status.CRASHED, "KeyboardInterrupt").to_json())
    assert trials.known("001_a") is None
    assert trials.run("001_a", program(DONE, tmp_path, "001_a"), {}).status is Status.DONE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"status": "odd"}',
        '{"status": "done", "speed": 1}',
        '{"status": "done", "throughput": "abc"}',
        '{"status": "done", "throughput": [1]}',
        '{"status": "done", "latency": NaN}',
        '{"status": "done", "throughput": Infinity}',
        "[" * 100_000,
    ],
)
def test_half_of_a_result_is_none(tmp_path: Path, experiments: Open, text: str) -> None:
    trials = experiments(tmp_path)
    (tmp_path / "001_a").mkdir()
    (tmp_path / "001_a" / "result.json").write_text(text)
    assert trials.known("001_a") is None


@linux
def test_when_the_tuner_is_killed_its_trial_ends_and_the_next_tuner_clears_what_is_left(
    tmp_path: Path, experiments: Open
) -> None:
    text = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\nimport test_experiments as t\n"
        "folder = Path(sys.argv[2])\n"
        "t.opened(folder, seconds=600).run('001_a', t.program(t.HANG, folder, '001_a'), {})"
    )
    tuner = subprocess.Popen(
        [sys.executable, "-c", text, str(Path(__file__).parent), str(tmp_path)]
    )
    note = tmp_path / "001_a" / "result.json.child"
    deadline = time.monotonic() + 60
    while not (note.exists() and note.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(UsageError, match="another tuner works in"):
        experiments(tmp_path)
    os.kill(tuner.pid, signal.SIGKILL)
    tuner.wait()
    child = int(note.read_text())
    assert alive(child)  # it hears nothing
    experiments(tmp_path)
    assert not alive(child)


@linux
def test_a_launcher_hears_that_its_tuner_was_killed(tmp_path: Path) -> None:
    """The process that a trial starts with is interrupted when its parent dies, also in a shell's
    background.
    """
    text = (
        "import sys, pathlib\nfrom ds_autotuning.trials.processes import run_limited\n"
        'sleeper = \'import os, sys, time; open(sys.argv[1], "w").write(str(os.getpid())); '
        "time.sleep(600)'\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "run_limited([sys.executable, '-c', sleeper, str(folder / 'pid')], folder, {}, 600)"
    )
    with disposed(ignored=True):
        tuner = subprocess.Popen([sys.executable, "-c", text, str(tmp_path)])
    deadline = time.monotonic() + 60
    while (
        not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    pid = int((tmp_path / "pid").read_text())
    os.kill(tuner.pid, signal.SIGKILL)
    tuner.wait()
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def test_trials_of_another_command_are_not_taken_for_ours(
    tmp_path: Path, experiments: Open
) -> None:
    experiments(tmp_path, identity={"command": "x", "config": {"a": 1}}).close()
    with pytest.raises(UsageError, match=r"other config.*--anew"):
        experiments(tmp_path, identity={"command": "x", "config": {"a": 2}})
    experiments(tmp_path, identity={"config": {"a": 1}, "command": "x"}).close()


def test_anew_forgets_trials_and_nothing_else(tmp_path: Path, experiments: Open) -> None:
    trials = experiments(tmp_path)
    trials.run("001_a", program(DONE, tmp_path, "001_a"), {})
    trials.close()
    (tmp_path / "notes").mkdir()
    (tmp_path / "002_mine").mkdir()
    (tmp_path / "2024_my_results").mkdir()
    (tmp_path / "2024_my_results" / "config.json").write_text('{"train_batch_size": 1}')
    experiments(tmp_path, identity={"command": "y"}, anew=True).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "002_mine",
        "2024_my_results",
        "identity.json",
        "lock",
        "notes",
    ]


def test_a_folder_that_no_tuner_made_is_not_run_in(tmp_path: Path, experiments: Open) -> None:
    (tmp_path / "001_a").mkdir()
    (tmp_path / "001_a" / "thesis.tex").touch()
    with pytest.raises(UsageError, match="001_a is no trial of a tuner"):
        experiments(tmp_path).run("001_a", program(DONE, tmp_path, "001_a"), {})
    assert (tmp_path / "001_a" / "thesis.tex").exists()


def test_overrides_reach_the_trial_by_the_environment(tmp_path: Path, experiments: Open) -> None:
    text = (
        "import base64, json, os, sys\n"
        "found = json.loads(base64.urlsafe_b64decode(os.environ['DS_CONFIG_OVERRIDES']))\n"
        "json.dump({'status': 'done', 'reason': json.dumps(found)}, open(sys.argv[1], 'w'))"
    )
    result = experiments(tmp_path).run(
        "001_a", program(text, tmp_path, "001_a"), {"a": {"b": None}}
    )
    assert json.loads(result.reason) == {"a": {"b": None}}


@pytest.mark.parametrize(
    ("code", "in_time", "said", "status"),
    [
        (1, False, "CUDA out of memory", Status.TIMEOUT),
        (137, True, "", Status.OUT_OF_MEMORY),
        (1, True, "dscore: rank 1 ended by SIGKILL\n", Status.OUT_OF_MEMORY),
        (1, True, "a\nb\ndscore: rank 0 failed\n", Status.CRASHED),
    ],
)
def test_why(code: int, in_time: bool, said: str, status: Status) -> None:
    assert why_it_failed(code, in_time, 5, said)[0] is status


@linux
def test_only_processes_with_the_mark_are_ended(tmp_path: Path) -> None:
    def sleeper(mark: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-S", "-c", "print(1, flush=True); import time; time.sleep(600)"]
        started = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, MARK: mark})
        assert started.stdout is not None
        started.stdout.readline()
        return started

    ours = sleeper("/a")
    other = sleeper("/a/b")
    try:
        assert end_all("/a") == 1
        assert ours.wait(30) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        for each in (ours, other):
            each.communicate()


def test_the_exit_code_and_the_output_are_kept(tmp_path: Path) -> None:
    words: Sequence[str] = [sys.executable, "-S", "-c", "print('said'); raise SystemExit(3)"]
    ended = run_limited(words, tmp_path, {}, 60)
    assert (ended.code, ended.in_time) == (3, True)
    assert (tmp_path / "log").read_text() == "said\n"
