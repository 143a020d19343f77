"""Several hosts: which are chosen, what their agents are given, and how the programs that reach
them end.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from ds_cli import main
from ds_cli.multi_host.agent import on_host
from ds_cli.run.host_choice import Choice, choose_hosts
from ds_command_kit.hosts import Host, agent_command, run_tools, settings_line
from ds_command_kit.hosts.hostfile import filter_hosts, read_hostfile
from ds_command_kit.hosts.settings import exported, read_settings
from ds_command_kit.launch import LaunchRequest
from ds_command_kit.show import CommandError

DEVICES = {"a": [0, 1, 2, 3], "b": [0, 1]}


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "hosts"
    file.write_text("# ours\nh0 slots=4\n\nh1 slots=2  # small\n")
    return file


def asked(text: str, monkeypatch: Any) -> tuple[str, LaunchRequest]:
    """The launcher and what it is given for these words of ``dscore run``."""
    seen: list[tuple[str, LaunchRequest]] = []
    monkeypatch.setattr(
        "ds_cli.run.command.find_launcher",
        lambda name: lambda request: seen.append((name, request)) or 0,
    )
    monkeypatch.setattr(
        sys, "argv", ["dscore", "run", *shlex.split(text), "--no-python", sys.executable]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0 or not seen
    if not seen:
        raise CommandError(str(ended.value.code))
    return seen[0]


# -- which hosts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h0 slots=x\n", "line 1: 'h0 slots=x'"),
        ("h0 slots=1\nh0 slots=1\n", "line 2.*twice"),
        ("#\n", "names no host"),
        ("-oProxyCommand=x slots=1\n", "line 1.*no host"),
        ("a slots=1\nu@-oProxyCommand=touch${IFS}X slots=1\n", "line 2: '-oProxyCommand.*no host"),
        ("a,-oProxyCommand=x slots=1\n", "line 1: 'a,-oProxyCommand=x'.*no host"),
        ("-oX@a slots=1\n", "line 1: '-oX'.*no user"),
        ("^/etc/hostname slots=1\n", "no host"),
        ("node-b: slots=1\n", "line 1: 'node-b:'.*no host"),
        ("fe80::1%$x slots=1\n", "no host"),
        ("h\u00e9 slots=1\n", "no host"),
        ("u@ slots=1\n", "no host"),
        ("h0 slots=0\n", "0 slots"),
    ],
)
def test_bad_hostfiles(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_hostfile(str(tmp_path / "hosts"))


def test_names_of_hosts(tmp_path: Path) -> None:
    names = [
        "node-1",
        "10.0.0.7",
        "a.b-c.example.org",
        "user.x@node_1",
        "fe80::1",
        "fe80::1%eth0",
        "u@2001:db8::7",
    ]
    (tmp_path / "hosts").write_text("".join(f"{name} slots=2\n" for name in names))
    hosts = read_hostfile(str(tmp_path / "hosts"))
    assert hosts is not None and list(hosts) == names
    slots = {name: [0, 1] for name in ("a", "fe80::1")}
    assert filter_hosts(slots, include="fe80::1:1") == {"fe80::1": [1]}
    assert filter_hosts(slots, exclude="fe80::1") == {"a": [0, 1]}
    with pytest.raises(ValueError, match="host 'b' in 'b:1' is not known"):
        filter_hosts(slots, include="b:1")
    with pytest.raises(ValueError, match="no host"):
        Host("a;b")  # whoever makes it, such as the list that slurm gives


def test_filters() -> None:
    assert filter_hosts(DEVICES, include="b@a:2,0") == {"a": [0, 2], "b": [0, 1]}
    assert filter_hosts(DEVICES, exclude="a:0,1@b") == {"a": [2, 3]}
    assert filter_hosts(DEVICES) == DEVICES
    for filters in ({"include": "c"}, {"include": "b:2"}, {"include": "a", "exclude": "b"}):
        with pytest.raises(ValueError, match=r"'c'|\[2\]|give one"):
            filter_hosts(DEVICES, **filters)


@pytest.mark.parametrize(
    ("text", "launcher", "given"),
    [
        (
            "",
            "ssh",
            {
                "hosts": (Host("h0", (0, 1, 2, 3)), Host("h1", (0, 1))),
                "min_nodes": 2,
                "max_nodes": 2,
            },
        ),
        ("-i h0:1,3@h1", "ssh", {"hosts": (Host("h0", (1, 3)), Host("h1", (0, 1)))}),
        ("-e h0:0,2", "ssh", {"hosts": (Host("h0", (1, 3)), Host("h1", (0, 1)))}),
        ("--num_gpus 1 --launcher Pdsh", "Pdsh", {"hosts": (Host("h0", (0,)), Host("h1", (0,)))}),
        (
            "--num_nodes 1 --ssh_port 23",
            "ssh",
            {"hosts": (Host("h0", (0, 1, 2, 3)),), "ssh_port": 23},
        ),
        (
            "--no_ssh --node_rank 1",
            "local",
            {"node_rank": 1, "nproc": 2, "master_addr": "h0", "max_nodes": 2},
        ),
        ("--elastic_training", "ssh", {"min_nodes": 1, "max_nodes": 2}),
        ("--launcher_args '-v -o \"A b\"'", "ssh", {"launcher_args": ("-v", "-o", "A b")}),
    ],
)
def test_documented_flags(
    hosts: Path, text: str, launcher: str, given: dict[str, Any], monkeypatch: Any
) -> None:
    name, request = asked(f"-H {hosts} {text}", monkeypatch)
    assert name == launcher
    assert {field: getattr(request, field) for field in given} == given


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("-i h0 -e h1", "give one of them"),
        ("-i h2", "'h2'"),
        ("-i h0:7", "[7]"),
        ("-i h0 --num_gpus 1", "do not go together"),
        ("--num_nodes 3", "2 hosts"),
        ("--num_gpus 3", "'h1' has 2 slots"),
        ("--no_ssh", "--node-rank"),
        ("--no_ssh --node_rank 2", "use 0 to 1"),
        ("--launcher local", "this machine only"),
        ("--launcher ssh --node_rank 1", "leave out"),
        ("--min_elastic_nodes 1", "--elastic-training"),
        ("--elastic_training --min_elastic_nodes 3 --max_elastic_nodes 2", "more than 2"),
        ("-H nowhere", "no hostfile 'nowhere'"),
    ],
)
def test_words_that_do_not_fit(
    hosts: Path, text: str, said: str, monkeypatch: Any, capsys: Any
) -> None:
    with pytest.raises(CommandError, match="^2$"):
        asked(text if text.startswith("-H") else f"-H {hosts} {text}", monkeypatch)
    assert said in capsys.readouterr().err


def test_a_hostfile_that_is_no_regular_file_means_this_machine() -> None:
    assert choose_hosts(Choice(hostfile="/dev/null")) == ()


def test_one_host_that_is_this_machine_is_local_unless_forced(
    tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "one").write_text("localhost slots=2\n")
    name, request = asked(f"-H {tmp_path / 'one'}", monkeypatch)
    assert (name, request.nproc, request.max_nodes, request.node_rank) == ("local", 2, 1, None)
    assert asked(f"-H {tmp_path / 'one'} --force_multi", monkeypatch)[0] == "ssh"


# -- what their agents are given -------------------------------------------------------------------


def test_settings_arrive_and_each_host_takes_its_own(tmp_path: Path) -> None:
    request = LaunchRequest(
        "x.py",
        ("--a", "b c"),
        hosts=(Host("u@h0", (0, 2)), Host("h1")),
        min_nodes=2,
        max_nodes=2,
        cores=(1, 2),
        exported=(("TOKEN", "hidden"),),
        launcher_args=("-v",),
    )
    got = read_settings(settings_line(request).strip())
    assert got.request == dataclasses.replace(request, exported=(), launcher_args=())
    assert (got.folder, got.variables) == (os.getcwd(), {"TOKEN": "hidden"})
    assert "hidden" not in repr(request)
    first = on_host(got.request, 0)
    second = on_host(got.request, 1)
    assert (first.slots, first.nproc, first.node_rank, first.master_addr) == ((0, 2), 2, 0, "h0")
    assert (second.slots, second.nproc, second.node_rank, second.master_addr) == (
        None,
        None,
        1,
        "h0",
    )
    with pytest.raises(CommandError, match="host 2 of 2"):
        on_host(got.request, 2)
    for bad in (b"", b"eJw=", b"\x00"):
        with pytest.raises(CommandError, match="same version"):
            read_settings(bad)


def test_variables_for_every_host(tmp_path: Path, monkeypatch: Any) -> None:
    home = tmp_path / "home"
    here = tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    (home / ".deepspeed_env").write_text("# ours\nA=1\nexport B=2 = 3\n")
    (here / ".deepspeed_env").write_text("A=4\n")
    found = dict(
        exported({"NCCL_X": "1", "MLFLOW_URL": "u", "AWS_SECRET": "s", "CUDA_VISIBLE_DEVICES": "1"})
    )
    assert found == {"NCCL_X": "1", "MLFLOW_URL": "u", "A": "4", "B": "2 = 3"}
    (here / "bad").write_text("\nhidden word\n")
    with pytest.raises(CommandError, match="bad, line 2 is not KEY=VALUE") as error:
        exported({"DS_ENV_FILE": "bad"})
    assert "hidden" not in str(error.value)
    with pytest.raises(CommandError, match="no such file"):
        exported({"DS_ENV_FILE": "nowhere"})


# -- programs that reach hosts ---------------------------------------------------------------------


def tool(body: str) -> list[str]:
    return [sys.executable, "-S", "-c", f"import os, sys, time\n{body}"]


def test_output_is_whole_lines_and_what_all_say_comes_once(capfd: Any) -> None:
    body = (
        "print('x' * 3000, end=''); sys.stdout.flush(); print('y'); print('dscore: lost host "
        "z', "
        "file=sys.stderr)"
    )
    assert run_tools(LaunchRequest("x"), {"a": tool(body), "b": tool(body)}) == 0
    out, err = capfd.readouterr()
    assert out == ("x" * 3000 + "y\n") * 2
    assert err == "dscore: lost host z\n"


def test_the_first_bad_end_ends_all_by_the_lifeline(capfd: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("ds_command_kit.hosts.tools.OTHERS_SECONDS", 0.1)
    waits = "data = sys.stdin.buffer.read(); print(data[:5]); sys.exit(9)"
    bad = {"a": tool(waits), "b": tool("sys.stdin.readline(); sys.exit(4)")}
    assert run_tools(LaunchRequest("x"), bad, feed=b"head\n", lifeline=True) == 4
    assert "b'head\\n'" in capfd.readouterr().out
    bad["b"] = tool("os.kill(os.getpid(), 15)")
    assert (
        run_tools(
            LaunchRequest("x"), bad, lifeline=True, explain=lambda where, code: f"{where} {code}"
        )
        == 1
    )
    assert "dscore: b -15" in capfd.readouterr().err


def test_a_host_whose_python_lacks_ds_core_is_named(capfd: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("ds_command_kit.hosts.tools.OTHERS_SECONDS", 0.2)
    lacking = [sys.executable, "-S", "-c", "import ds_core_that_is_not_there"]
    waiting = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
    assert run_tools(LaunchRequest("x"), {"node-a": waiting, "node-b": lacking}, lifeline=True) == 1
    said = capfd.readouterr().err
    assert (
        "ModuleNotFoundError" in said
        and "dscore: host node-b ended with exit code 1 before its agent" in said
    )
    noise = (
        "[W1 socket.cpp:767] [c10d] The hostname of the client socket cannot be retrieved. err=-3"
    )
    telling = [
        sys.executable,
        "-S",
        "-c",
        f"import sys; print({noise!r}, file=sys.stderr); sys.exit('dscore: rank 1 failed')",
    ]
    assert run_tools(LaunchRequest("x"), {"node-b": telling}) == 1
    assert capfd.readouterr().err == "dscore: rank 1 failed\n"


def test_show_runs_nothing_and_tells_no_values(capfd: Any) -> None:
    request = LaunchRequest(
        "x.py", ("a b",), hosts=(Host("h", (0,)),), exported=(("TOKEN", "hidden"),), show=True
    )
    assert run_tools(request, {"h": ["false", *agent_command(request, 0)]}) == 0
    out = capfd.readouterr().out
    assert "h: false" in out
    assert "x.py 'a b'" in out
    assert "TOKEN" in out
    assert "hidden" not in out


def test_show_runs_nothing_on_this_machine_either(
    tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    (tmp_path / "x.py").write_text("raise SystemExit('must not run')")
    monkeypatch.setattr(
        sys, "argv", ["dscore", "run", "--show", "--nproc", "2", str(tmp_path / "x.py"), "a b"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert (
        capfd.readouterr().out
        == f"this machine: 2 processes\neach process: python {tmp_path / 'x.py'} 'a b'\n"
    )


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(CommandError, match="no-such-tool cannot be run"):
        run_tools(LaunchRequest("x"), {"": ["no-such-tool"]})
