"""``dscore run``: what a script is given, and the options that change it."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import command
from ds_cli import main
from ds_cli.local.cores import cores_of_ranks, parse_cores
from ds_cli.local.launcher import launch
from ds_command_kit.launch import LaunchRequest
from ds_command_kit.show import CommandError

pytestmark = pytest.mark.usefixtures("one_process_by_default")


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


@pytest.mark.slow
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
