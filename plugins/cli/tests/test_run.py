"""``dscore run``: processes start, fail and end as promised.

Scripts are tiny and load no torch unless they must.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ds_cli import main
from ds_cli.local.cores import cores_of_ranks, parse_cores
from ds_cli.local.guard import Guard
from ds_cli.local.launcher import launch
from ds_command_kit.launch import LaunchRequest
from ds_command_kit.show import CommandError
from ds_testing import processes

ROOT = Path(__file__).parents[3]
LEAVE_PID = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
HERE, RANK = Path(__file__).parent, int(os.environ["RANK"])
def leave(name, pid):
    (HERE / "new").with_suffix(f".{name}{RANK}").write_text(str(pid))
    (HERE / "new").with_suffix(f".{name}{RANK}").rename(HERE / f"{name}{RANK}.pid")
def wait_for(*names):
    while not all((HERE / f"{n}.pid").exists() for n in names):
        time.sleep(0.01)
leave("rank", os.getpid())
"""
CHILD = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', "
    "flush=True); time.sleep(600)"
)
IN_BACKGROUND = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
STUBBORN = f"""
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()
leave("child", child.pid)
"""


@pytest.fixture
def script(tmp_path: Path) -> Any:
    def make(body: str, name: str = "script.py") -> str:
        file = tmp_path / name
        file.write_text(LEAVE_PID + body)
        return str(file)

    return make


@pytest.fixture(autouse=True)
def one_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has collected yet has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def pids(folder: Path) -> dict[str, int]:
    return {file.stem: int(file.read_text()) for file in folder.glob("*.pid")}


def wait_until(what: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def command(
    tmp_path: Path, *words: str, cwd: Path | None = None, background: bool = False
) -> subprocess.Popen[str]:
    """``dscore run`` in a process of its own, as the console script would start it."""
    entry = tmp_path / "entry"
    entry.mkdir(exist_ok=True)
    (entry / "dscore").write_text("from ds_cli import main\nmain()\n")
    with processes.disposed(ignored=background, signals=IN_BACKGROUND):
        return subprocess.Popen(
            [sys.executable, str(entry / "dscore"), "run", *words],
            cwd=cwd or tmp_path,
            env=processes.clean_environment(PYTHONPATH=str(ROOT), TMPDIR=str(tmp_path)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


# -- how it fails ----------------------------------------------------------------------------------


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
        "command goes on from it\n"
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
    with Guard(tmp_path, grace=600) as guard:
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


# -- what the script meets -------------------------------------------------------------------------

TELL = """
print(json.dumps({"argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__,
                  "main": sys.modules["__main__"].__dict__ is globals(), "env": dict(os.environ)}))
"""


def test_arguments_are_untouched_and_the_working_directory_is_not_read(
    script: Any, tmp_path: Path
) -> None:
    empty = tmp_path / "cwd"
    empty.mkdir()
    for name in ("torch", "typer", "json", "runpy", "ds_core", "worker", "sitecustomize", "pluggy"):
        (empty / f"{name}.py").write_text("raise SystemExit('read from the working directory')")
    arguments = ["--help", "--nproc", "7", "--", "-m", "", "a b", "$HOME", "*", "--version"]
    running = command(tmp_path, "--nproc", "1", script(TELL), *arguments, cwd=empty)
    out, err = running.communicate(timeout=300)
    assert err == ""
    seen = json.loads(out)
    file = str(tmp_path / "script.py")
    assert seen["argv"] == [file, *arguments]
    assert (seen["path"], seen["name"], seen["file"], seen["main"]) == (
        str(tmp_path),
        "__main__",
        file,
        True,
    )
    ranks = [
        seen["env"][k]
        for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    ]
    assert ranks == ["0", "0", "1", "1", "127.0.0.1"]


def test_a_script_named_from_where_it_lies_knows_its_path(
    script: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    script("(HERE / 'told').write_text(__file__)")
    monkeypatch.chdir(tmp_path)
    assert launch(LaunchRequest("script.py", nproc=1)) == 0
    assert (tmp_path / "told").read_text() == str(tmp_path / "script.py")


def test_a_module_runs_like_python_m(
    script: Any, tmp_path: Path, capfd: Any, monkeypatch: Any
) -> None:
    (tmp_path / "package").mkdir()
    script(
        "from package.other import word\nprint(word, __name__, __package__, sys.argv[1:])",
        "package/tool.py",
    )
    (tmp_path / "package" / "other.py").write_text("word = 'found'")
    monkeypatch.chdir(tmp_path)
    assert launch(LaunchRequest("package.tool", ("-x",), is_module=True)) == 0
    assert capfd.readouterr().out == "found __main__ package ['-x']\n"
    assert launch(LaunchRequest("package.missing", is_module=True)) == 1
    assert "No module named package.missing" in capfd.readouterr().err


def test_cores_are_shared_unless_the_user_says_otherwise(
    script: Any, capfd: Any, monkeypatch: Any
) -> None:
    file = script('print(os.environ["OMP_NUM_THREADS"])')
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    launch(LaunchRequest(file, nproc=2))
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert capfd.readouterr().out.split() == [str(share)] * 2
    assert "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    launch(LaunchRequest(file))
    assert capfd.readouterr().out.split() == ["3"]


def test_auto_is_one_process_per_accelerator(script: Any, capfd: Any, monkeypatch: Any) -> None:
    class Three:
        device_type = "abacus"

        def device_count(self) -> int:
            return 3

    monkeypatch.setattr("ds_core.accelerator.select_accelerator", lambda plugins: Three())
    assert launch(LaunchRequest(script('print(os.environ["WORLD_SIZE"])'))) == 0
    assert capfd.readouterr().out.split() == ["3", "3", "3"]


@pytest.mark.slow
def test_lines_stay_whole_and_tags_name_the_rank(
    script: Any, tmp_path: Path, capfd: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    file = script("for i in range(50):\n    print('rank', RANK, 'line', i)")
    lines = [f"rank {rank} line {i}" for rank in range(2) for i in range(50)]
    launch(LaunchRequest(file, nproc=2))
    assert sorted(capfd.readouterr().out.splitlines()) == sorted(lines)
    out, err = command(tmp_path, "--nproc", "2", "--tag", file).communicate(timeout=300)
    assert err == ""
    assert sorted(out.splitlines()) == sorted(f"[rank {line[5]}] {line}" for line in lines)


def test_the_scripts_own_excepthook_and_children_are_respected(script: Any, capfd: Any) -> None:
    body = """
import multiprocessing, traceback
def work(x):
    return x * 2
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [1, 2]))
    if not os.fork():
        raise ValueError("a child's own affair")
    os.wait()
    sys.excepthook = lambda kind, value, tb: print("mine:", value, len(traceback.extract_tb(tb)), file=sys.stderr)
    raise OSError("hooked")
"""
    # the spawned child imports the script under another name
    assert launch(LaunchRequest(script(body))) == 1
    out, err = capfd.readouterr()
    assert out == "[2, 4]\n"
    assert err.count("Traceback") == 1
    assert "ValueError: a child's own affair" in err
    assert "mine: hooked 1\n" in err
    assert err.splitlines()[-1].endswith("OSError: hooked")


def test_observers_of_the_failure_hear_of_it_and_its_traceback_is_shown_once(
    script: Any, tmp_path: Path, capfd: Any
) -> None:
    (tmp_path / "hears.py").write_text(
        "def ds_close(ctx, error):\n    print('heard', ctx.rank, error)\n"
    )
    body = """
import torch, ds_core
config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "plugins": {"load": ["hears"]}}
engine, *_ = ds_core.initialize(model=torch.nn.Linear(2, 2), config=config)
raise OSError("no more")
"""
    assert launch(LaunchRequest(script(body), nproc=2)) == 1
    out, err = capfd.readouterr()
    assert "heard" in out and "no more" in out
    assert err.count("Traceback") == 1


def test_the_launcher_leaves_the_process_as_it_was(script: Any) -> None:
    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in watched]
    launch(LaunchRequest(script("")))
    assert [signal.getsignal(number) for number in watched] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_the_documented_variables_and_the_argument(script: Any, capfd: Any) -> None:
    """`--local_rank=i` comes first and only when asked for: a script that does not know it would
    fail.
    """
    names = ["LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"]
    file = script(f"print(*[os.environ[name] for name in {names}], *sys.argv[1:])")
    launch(LaunchRequest(file, ("--x",), nproc=2, local_rank=True))
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "2 0 1 --local_rank=0 --x",
        "2 0 1 --local_rank=1 --x",
    ]


def test_each_rank_has_a_log(script: Any, tmp_path: Path, capfd: Any) -> None:
    file = script("print('out', RANK, flush=True)\nprint('err', RANK, file=sys.stderr)")
    launch(LaunchRequest(file, nproc=2, log_folder=str(tmp_path / "logs")))
    assert capfd.readouterr() == ("", "")
    logs = sorted((tmp_path / "logs").iterdir())
    assert [log.name.partition("_")[2] for log in logs] == ["rank0.log", "rank1.log"]
    assert [log.read_text() for log in logs] == ["out 0\nerr 0\n", "out 1\nerr 1\n"]


def test_a_program_that_is_not_pythons(tmp_path: Path, capfd: Any) -> None:
    # Rank 1, which fails, ends rank 0: it waits until that has said its line.
    script = (
        "echo $RANK $1; touch $2/$RANK; while [ ! -e $2/0 ]; do sleep 0.05; done; exit "
        "$((3 * "
        "LOCAL_RANK))"
    )
    words = ("-c", script, "sh", "a b", str(tmp_path))
    assert launch(LaunchRequest("/bin/sh", words, nproc=2, is_command=True)) == 3
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 a b", "1 a b"]


def test_cores_are_bound(script: Any, capfd: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    file = script('print(sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"])')
    one = min(os.sched_getaffinity(0))
    launch(LaunchRequest(file, nproc=1, cores=(one,)))
    assert capfd.readouterr().out == f"[{one}] 1\n"
    shares = cores_of_ranks(1)
    assert [sorted(share) for share in shares] == [sorted(os.sched_getaffinity(0))]


@pytest.mark.parametrize(
    ("nproc", "listed", "words"),
    [
        (1, [99999], "core 99999 cannot be used here"),
        (100_000, [], "cannot be divided among 100000 processes"),
    ],
)
def test_cores_that_cannot_be_shared(nproc: int, listed: list[int], words: str) -> None:
    with pytest.raises(CommandError, match=words):
        cores_of_ranks(nproc, listed)


def test_core_lists() -> None:
    assert parse_cores("0,2-4, 7") == [0, 2, 3, 4, 7]
    for bad in ("", "a", "3-1", "1,,2", "1,1", "-1", "0-2,1", "1-2-3"):
        with pytest.raises(CommandError, match="--bind-core-list"):
            parse_cores(bad)


def test_an_environment_is_activated_first(script: Any, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    activate = tmp_path / "activate"
    activate.write_text(
        f'echo hello; export MARK="two\nlines" PATH="{tmp_path}/bin:$PATH"; unset GONE\n'
    )
    file = script('print(sys.executable, repr(os.environ["MARK"]), "GONE" in os.environ)')
    os.environ["GONE"] = "here"
    try:
        assert launch(LaunchRequest(file, venv_script=str(activate))) == 0
        assert os.environ["GONE"] == "here"
    finally:
        del os.environ["GONE"]
    assert capfd.readouterr().out == f"{tmp_path}/bin/python 'two\\nlines' False\n"
    assert "MARK" not in os.environ
    activate.write_text("echo no such thing >&2; false\n")
    with pytest.raises(CommandError, match="failed with exit code 1: no such thing"):
        launch(LaunchRequest(file, venv_script=str(activate)))


def test_how_much_the_launcher_says(script: Any, capfd: Any) -> None:
    file = script('sys.exit(10 + int(os.environ["TORCHELASTIC_RESTART_COUNT"]))')
    assert launch(LaunchRequest(file, max_restarts=1, level=logging.INFO)) == 11
    said = capfd.readouterr().err
    assert "dscore: starting ranks 0 to 0 of 1; they meet at 127.0.0.1:" in said
    assert "restart 1 of 1" in said
    assert launch(LaunchRequest(file, max_restarts=1, level=logging.ERROR)) == 11
    (last,) = capfd.readouterr().err.splitlines()
    assert "failed with exit code 11" in last


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (
            "--num_gpus 3 --local_rank --save_pid -q",
            {"nproc": 3, "local_rank": True, "save_pid": True, "level": 40},
        ),
        (
            "--num_accelerators -1 --no_local_rank",
            {"nproc": None, "local_rank": False, "level": logging.WARNING},
        ),
        (
            "--nnodes 2 --node_rank 1 --master_addr h --master_port 7",
            {"node_rank": 1, "master_addr": "h"},
        ),
        (
            "--enable_each_rank_log d --bind_cores_to_rank --bind_core_list 0-1",
            {"bind": True, "cores": (0, 1)},
        ),
        ("--venv_script v --log_level debug", {"venv_script": "v", "level": logging.DEBUG}),
        ("--no_python", {"is_command": True}),
    ],
)
def test_flags_have_their_documented_names(
    words: str, given: dict[str, Any], monkeypatch: Any
) -> None:
    seen: list[LaunchRequest] = []
    monkeypatch.setattr(
        "ds_cli.run.command.find_launcher", lambda name: lambda request: seen.append(request) or 0
    )
    monkeypatch.setattr(
        sys, "argv", ["dscore", "run", *words.split(), sys.executable, "--node_rank", "x"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert {name: getattr(seen[0], name) for name in given} == given
    assert seen[0].arguments == ("--node_rank", "x")


@pytest.mark.parametrize(
    "words", ["--no-python --module x", "--tag --enable-each-rank-log d x", "--no-python no-such-x"]
)
def test_flags_that_do_not_fit_are_refused(words: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["dscore", "run", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("dscore: --")


# -- who can reach it ------------------------------------------------------------------------------


def listening(pid: int) -> set[str]:
    """The addresses, in hexadecimal as the kernel writes them, at which a process listens."""
    links = [os.readlink(f) for f in Path(f"/proc/{pid}/fd").iterdir() if os.path.islink(f)]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="Linux tells who listens where")
def test_on_one_machine_nothing_listens_beyond_it(script: Any, tmp_path: Path) -> None:
    """The launcher's store and what the ranks talk over, in a script that uses torch alone."""
    body = (
        "import torch.distributed as dist\ndist.init_process_group('gloo')\nleave('ready', "
        "1)\ntime.sleep(600)"
    )
    running = command(tmp_path, "--nproc", "2", script(body))
    wait_until(lambda: {"ready0", "ready1"} <= set(pids(tmp_path)), 100)
    seen = pids(tmp_path)
    addresses = [listening(pid) for pid in (running.pid, seen["rank0"], seen["rank1"])]
    running.terminate()
    running.communicate(timeout=300)
    assert addresses == [{"0100007F"}] * 3


def test_what_strangers_write_where_machines_meet_is_not_unpickled(
    script: Any, tmp_path: Path
) -> None:
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

    mark = tmp_path / "ran"
    port = processes.free_port()
    words = ["--nnodes", "2", "--nproc", "1", "--rdzv-endpoint", f"127.0.0.1:{port}", script("")]
    running = command(tmp_path, *words)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    backend = C10dRendezvousBackend(store, "dscore")
    harmful = f"cposix\nsystem\n(Vtouch {mark}\ntR.".encode()

    def write() -> bool:
        found = backend.get_state()
        answer = found and backend.set_state(harmful, found[1])
        return bool(answer and answer[2])

    wait_until(write)
    _, err = running.communicate(timeout=300)
    assert running.returncode == 1
    assert "what lies at the --rdzv-endpoint is not the state of a dscore run" in err
    assert not mark.exists()


# -- machines --------------------------------------------------------------------------------------


def test_a_port_can_be_chosen_and_one_in_use_is_named(
    script: Any, tmp_path: Path, capfd: Any
) -> None:
    port = processes.free_port()
    assert launch(LaunchRequest(script('print(os.environ["MASTER_PORT"])'), master_port=port)) == 0
    assert capfd.readouterr().out.split() == [str(port)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        running = command(tmp_path, "--master-port", str(taken), str(tmp_path / "script.py"))
        _, err = running.communicate(timeout=300)
    assert running.returncode == 1
    assert f"port {taken} of 127.0.0.1 is already in use" in err
    assert "choose another one with MASTER_PORT or --master-port" in err


@pytest.mark.parametrize(
    "meet",
    [
        pytest.param("--node-rank 0 --master-addr 127.0.0.1 --master-port", marks=pytest.mark.slow),
        "--rdzv-endpoint",
    ],
)
def test_a_launcher_that_waits_for_other_machines_can_be_stopped(
    script: Any, tmp_path: Path, meet: str
) -> None:
    port = processes.free_port()
    where = str(port) if meet.endswith("--master-port") else f"127.0.0.1:{port}"
    running = command(tmp_path, "--nnodes", "2", "--nproc", "1", *meet.split(), where, script(""))

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(listens)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=300)
    assert (running.returncode, out) == (130, "")
    assert err == "dscore: stopped by SIGINT; all processes were ended\n"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["static", pytest.param("endpoint", marks=pytest.mark.slow)])
def test_two_machines_meet(script: Any, tmp_path: Path, way: str) -> None:
    file = script('print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"])')
    port = str(processes.free_port())
    meet = {
        "static": ["--master-addr", "127.0.0.1", "--master-port", port],
        "endpoint": ["--rdzv-endpoint", f"127.0.0.1:{port}"],
    }[way]
    both = [
        command(tmp_path, "--nnodes", "2", "--node-rank", rank, "--nproc", "1", *meet, file)
        for rank in ("0", "1")
    ]
    said = [running.communicate(timeout=300) for running in both]
    assert [running.returncode for running in both] == [0, 0], said
    assert sorted(out for out, _ in said) == ["0 2 0\n", "1 2 0\n"]
