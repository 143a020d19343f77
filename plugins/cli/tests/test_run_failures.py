"""``dscore run``: processes fail, are stopped and end as promised.

Scripts are tiny and load no torch unless they must.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cli_runs import IN_BACKGROUND, STUBBORN, command, is_gone, pids, wait_until
from ds_cli.local.launcher import launch
from ds_cli.local.process_monitor import ProcessMonitor
from ds_command_kit.launch import LaunchRequest

pytestmark = pytest.mark.usefixtures("one_process_by_default")


def test_the_first_failure_is_shown_once_and_the_others_are_ended(
    script: Any, tmp_path: Path, capfd: Any
) -> None:
    file = script(
        "wait_for('rank0', 'rank1')\nif RANK == 1:\n    raise "
        "ValueError('too\\nbad')\ntime.sleep(600)"
    )
    assert launch(LaunchRequest(file, nproc=2)) == 1
    seen = pids(tmp_path)
    assert is_gone(seen["rank0"])
    err = capfd.readouterr().err
    assert err.count("Traceback") == 1
    assert "worker.py" not in err
    assert "runpy" not in err
    assert "ChildFailedError" not in err
    assert f'File "{file}"' in err
    last = err.splitlines()[-2:]
    pid = seen["rank1"]
    host = socket.gethostname()
    assert (
        last[0]
        == f"dscore: rank 1 of 2 failed with exit code 1 (pid {pid} on {host}): ValueError: too"
    )
    assert last[1] == "dscore: the other process was ended"


def test_one_mistake_on_all_ranks_is_one_traceback(script: Any, capfd: Any) -> None:
    # each waits until the other has begun, so that both do fail
    file = script("wait_for('rank0', 'rank1')\n1 / 0")
    assert launch(LaunchRequest(file, nproc=2)) == 1
    err = capfd.readouterr().err
    assert err.count("Traceback") == 1
    assert "ZeroDivisionError" in err.splitlines()[-2]


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("sys.exit(3)", 3, "rank 0 of 1 failed with exit code 3"),
        ("os._exit(7)", 7, "rank 0 of 1 failed with exit code 7"),
        (
            "sys.exit('no data here')",
            1,
            "no data here\ndscore: rank 0 of 1 failed with exit code 1",
        ),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "rank 0 of 1 was killed by SIGKILL (signal 9)",
        ),
        (
            "os.kill(os.getpid(), signal.SIGSEGV)",
            139,
            "rank 0 of 1 was killed by SIGSEGV (signal 11)",
        ),
        (
            "os.kill(os.getpid(), signal.SIGTERM)",
            143,
            "rank 0 of 1 was killed by SIGTERM (signal 15)",
        ),
        ("raise KeyboardInterrupt", 130, "rank 0 of 1 was killed by SIGINT (signal 2)"),
        ("def f(:", 1, "SyntaxError"),
    ],
)
def test_exit_codes_and_signals(script: Any, capfd: Any, body: str, code: int, words: str) -> None:
    assert launch(LaunchRequest(script(body))) == code
    assert words in capfd.readouterr().err


def test_success_is_silent_and_leaves_what_the_script_left_on_purpose(
    script: Any, tmp_path: Path, capfd: Any
) -> None:
    file = script(STUBBORN + "print('done')\nsys.exit()")
    assert launch(LaunchRequest(file)) == 0
    assert capfd.readouterr() == ("done\n", "")
    child = pids(tmp_path)["child0"]
    assert not is_gone(child)
    os.kill(child, signal.SIGKILL)


def test_deaf_processes_and_their_children_are_ended(
    script: Any, tmp_path: Path, capfd: Any
) -> None:
    file = script(
        STUBBORN + "wait_for('child0', 'child1')\nif RANK == 0:\n    os._exit(5)\ntime.sleep(600)"
    )
    assert launch(LaunchRequest(file, nproc=2, grace=0.3)) == 5
    seen = pids(tmp_path)
    assert sorted(seen) == ["child0", "child1", "rank0", "rank1"]
    wait_until(lambda: all(map(is_gone, seen.values())))
    assert "rank 0 of 2 failed with exit code 5" in capfd.readouterr().err


def test_a_handler_has_the_grace_to_finish(script: Any, tmp_path: Path) -> None:
    body = """
def save(*_):
    time.sleep(0.5)
    leave("saved", 1)
    sys.exit()
signal.signal(signal.SIGTERM, save)
leave("ready", 1)
wait_for("ready0", "ready1")
if RANK == 0:
    os._exit(5)
time.sleep(600)
"""
    assert launch(LaunchRequest(script(body), nproc=2, grace=20)) == 5
    assert "saved1" in pids(tmp_path)


def test_restarts_show_each_failure_and_can_succeed(
    script: Any, tmp_path: Path, capfd: Any
) -> None:
    body = """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if RANK == 1:
        leave("child", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
        raise OSError("the disk hiccups")
    time.sleep(600)
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "rank", RANK)
"""
    assert launch(LaunchRequest(script(body), nproc=2, max_restarts=2)) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["attempt 1 rank 0", "attempt 1 rank 1"]
    assert err.count("OSError: the disk hiccups\n\n") == 1
    assert err.splitlines()[-1] == "dscore: restart 1 of 2"
    assert is_gone(pids(tmp_path)["child1"])


def test_the_last_restart_decides(script: Any, capfd: Any) -> None:
    body = 'sys.exit(10 + int(os.environ["TORCHELASTIC_RESTART_COUNT"]))'
    assert launch(LaunchRequest(script(body), max_restarts=1)) == 11
    err = capfd.readouterr().err
    codes = [
        line.split("exit code ")[1].split()[0] for line in err.splitlines() if "exit code" in line
    ]
    assert codes == ["10", "11"]


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_a_stopped_launcher_ends_everything(
    script: Any, tmp_path: Path, number: int, code: int
) -> None:
    file = script(STUBBORN + "time.sleep(600)")
    running = command(tmp_path, "--nproc", "2", "--grace", "0.3", "--notice", "0.3", file)
    wait_until(lambda: {"child0", "child1"} <= set(pids(tmp_path)))
    running.send_signal(number)
    _, err = running.communicate(timeout=300)
    assert running.returncode == code
    assert err == f"dscore: stopped by {signal.Signals(number).name}; all processes were ended\n"
    wait_until(lambda: all(map(is_gone, pids(tmp_path).values())))


LASTS = """
leave("ready", 1)
wait_for("over")
"""


@pytest.mark.slow
def test_signals_that_were_ignored_at_the_start_stay_so(script: Any, tmp_path: Path) -> None:
    """``nohup dscore run ... &`` outlives its terminal; SIGTERM ends it as ever."""
    running = command(tmp_path, "--nproc", "2", script(LASTS), background=True)
    wait_until(lambda: {"ready0", "ready1"} <= set(pids(tmp_path)))
    for number in IN_BACKGROUND:
        running.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        running.communicate(timeout=0.5)
    (tmp_path / "over.pid").write_text("1")
    _, err = running.communicate(timeout=300)
    assert (running.returncode, err) == (0, "")


SAVES = """
def save(*_):
    wait_for("heard")
    sys.exit(75 if RANK else 0)  # the first to end must not take the others along
signal.signal(signal.SIGTERM, save)
leave("ready", 1)
while True:
    time.sleep(600)
"""


@pytest.mark.slow
def test_ranks_that_save_have_the_notice_and_their_exit_code_is_kept(
    script: Any, tmp_path: Path
) -> None:
    """Longer than the grace, and through a second SIGTERM."""
    running = command(tmp_path, "--nproc", "2", "--grace", "0.1", "--notice", "60", script(SAVES))
    wait_until(lambda: {"ready0", "ready1"} <= set(pids(tmp_path)))
    running.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        running.communicate(timeout=0.5)
    running.terminate()
    (tmp_path / "heard.pid").write_text("1")
    _, err = running.communicate(timeout=300)
    assert running.returncode == 75
    assert err == (
        "dscore: stopped by SIGTERM, exit code 75: a checkpoint was saved first, and the same "
        "command resumes from it\n"
    )


def test_a_killed_launcher_takes_all_along_and_leaves_nothing(script: Any, tmp_path: Path) -> None:
    """Deaf ranks, their own children, the folder and the file with its id."""
    file = script(STUBBORN + "time.sleep(600)")
    running = command(
        tmp_path, "--nproc", "2", "--grace", "0.3", "--notice", "0.3", "--save_pid", file
    )
    wait_until(lambda: {"child0", "child1"} <= set(pids(tmp_path)))
    assert (tmp_path / f"{running.pid}.dscore").read_text() == f"{running.pid}\n"
    assert list(tmp_path.glob("dscore-*"))
    running.kill()
    wait_until(lambda: all(map(is_gone, pids(tmp_path).values())))
    wait_until(lambda: not [*tmp_path.glob("dscore-*"), *tmp_path.glob("*.dscore")])
    running.communicate(timeout=300)


@pytest.mark.slow
def test_over_gloo_the_cause_is_named_and_not_its_echo(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "assert total.item() == 2\n"
        "if dist.get_rank() == 1:\n"
        "    try:\n"
        "        raise KeyError('the cause')\n"
        "    finally:\n"
        "        dist.destroy_process_group()\n"
        "dist.all_reduce(total)\n"
    )
    running = command(tmp_path, "--nproc", "2", str(file))
    _, err = running.communicate(timeout=300)
    assert running.returncode == 1
    assert err.count("Traceback") == 1
    assert "rank 1 of 2 failed with exit code 1" in err
    assert "KeyError: 'the cause'" in err


def test_processes_that_are_started_anew_are_not_ended_for_those_before(tmp_path: Path) -> None:
    """As when a machine joins: torch ends the processes and starts others under the same
    attempt."""
    with ProcessMonitor(tmp_path, grace=600) as guard:
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        facts = {"pid": child.pid, "session": child.pid, "rank": 0}
        (tmp_path / "0-0.start").write_text(json.dumps(facts))
        child.terminate()
        wait_until(lambda: guard.endings)
        (pending,) = guard._timers.values()
        guard.forget(0)
        assert pending.finished.is_set()
        assert not guard.endings
        assert not list(guard.started())
    child.wait()
