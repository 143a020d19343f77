"""``dscore doctor`` on this host."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cli_runs import dscore, missing

from ds_core.entries import CommandEntry
from ds_core.plugins import SECTIONS
from ds_core.plugins import registry as P


def test_doctor_finds_a_sound_installation_sound(install: Any) -> None:
    done = dscore("doctor")
    assert done.exit_code == 0, done.output
    assert "nothing is broken" in done.output
    lines = done.output.splitlines()
    for part in ("python", "torch", "accelerator", "g++", "nvcc", "ninja", "/dev/shm"):
        assert any(line.split(maxsplit=1)[-1].startswith(part) for line in lines), part
    rows = json.loads(dscore("doctor", "--json").output)
    assert {row["level"] for row in rows} <= {"ok", "note", "--"}
    assert all(row["fix"] for row in rows if row["level"] == "note")


def test_a_device_that_is_not_here_is_no_success(install: Any) -> None:
    rows = json.loads(dscore("doctor", "--json").output)
    absent = [row for row in rows if row["found"].startswith("unavailable: ")]
    assert absent and {row["level"] for row in absent} == {"--"}
    assert f"--  {absent[0]['part']}: unavailable" in dscore("doctor").output


def test_kernels_are_one_line_unless_all_are_asked_for() -> None:
    pytest.importorskip("ds_kernel_kit")
    lines = dscore("doctor").output.splitlines()
    (line,) = (line for line in lines if line.startswith("ok  kernels: "))
    assert "served: " in line and not any(row.startswith("ok  kernel a") for row in lines)
    assert "ok  kernel adam: served by " in dscore("doctor", "--verbose").output


def test_doctor_names_faults_with_a_fix(install: Any, monkeypatch: Any) -> None:
    install(
        "one",
        "ds-one",
        ds_commands=lambda: {"same": CommandEntry("a:b"), "run": CommandEntry("a:b")},
    )
    install("two", "ds-two", ds_commands=lambda: {"same": CommandEntry("a:b")})
    install("cross", "ds-three", ds_commands=lambda: 1 / 0)
    install("twice", "ds-one", SECTIONS)
    install("twice", "ds-two", SECTIONS)
    found = P.discover()
    monkeypatch.setattr(P, "discover", lambda: (*found, missing()))
    monkeypatch.setenv("DS_ACCELERATOR", "abacus")
    done = dscore("doctor", "--json")
    assert done.exit_code == 1
    faults = {row["part"]: row for row in json.loads(done.stdout) if row["level"] == "fault"}
    assert "dscore-cli and ds-one 1.0" in faults["command run"]["found"]
    assert "ds-one 1.0 and ds-two 1.0" in faults["command same"]["found"]
    assert "ZeroDivisionError" in faults["plugin cross"]["found"]
    assert "quarantined" in faults["plugin bad"]["found"]
    assert "ds-one 1.0 and ds-two 1.0" in faults["section twice"]["found"]
    assert "abacus" in faults["accelerator"]["found"]
    assert [part for part, row in faults.items() if not row["fix"]] == []


def test_doctor_has_nothing_against_its_own_commands() -> None:
    assert [
        row["part"]
        for row in json.loads(dscore("doctor", "--json").stdout)
        if row["part"].startswith("command")
    ] == []


def test_doctor_comes_to_its_end_whatever_fails(install: Any, monkeypatch: Any) -> None:
    from ds_cli.doctor import checks

    def broken(plugins: Any) -> Any:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(checks, "_compilers", broken)
    rows = json.loads(dscore("doctor", "--json").stdout)
    assert {
        "part": "compilers",
        "level": "fault",
        "found": "ZeroDivisionError: oops",
    }.items() <= next(row for row in rows if row["part"] == "compilers").items()
    assert rows[-1]["part"] == "loopback"
