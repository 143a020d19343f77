"""Programs that reach hosts: their output, how they end, and `--show`."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from ds_command_kit.hosts import Host, agent_command, run_tools
from ds_command_kit.launch import LaunchRequest
from ds_command_kit.show import CommandError


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


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(CommandError, match="no-such-tool cannot be run"):
        run_tools(LaunchRequest("x"), {"": ["no-such-tool"]})
