"""The declaration, the section, a host's folder in memory, and that it ends with its process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from ds_checkpoint_peer import guard, room
from ds_checkpoint_peer.exchange import Pace
from ds_testing import PluginConformance

from ds_core.errors import CheckpointError


class TestDeclaration(PluginConformance):
    entry_point = "ds_checkpoint_peer.plugin"
    section = "checkpoint_peer"
    good_config: ClassVar[Any] = {"folder": "runs/a", "every": 5, "max_bytes": 1 << 30}
    bad_configs: ClassVar[Any] = (
        {},
        {"folder": ""},
        {"folder": "a", "every": 0},
        {"folder": "a", "neighbours": -1},
        {"folder": "a", "max_bytes": 0},
        {"folder": "a", "max_bytes_per_second": 0.5},
        3,
    )


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a run's launcher."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"], start_new_session=True
    ) as child:
        yield child
        child.kill()


def end(launcher: subprocess.Popen[bytes]) -> None:
    launcher.kill()
    launcher.wait()


def of(launcher: subprocess.Popen[bytes], memory: Path) -> Path:
    """The folder of a run whose launcher is `child`."""
    own = room.room_of(memory, "runs/a")
    parts = own.name.split("-")
    return memory / "-".join(
        [*parts[:4], str(launcher.pid), str(guard.started(launcher.pid)), parts[-1]]
    )


def wait_until_gone(path: Path) -> None:
    end = time.monotonic() + 20
    while path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not path.exists()


def test_the_folder_ends_with_its_process_also_when_that_is_killed(
    launcher: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    own = of(launcher, tmp_path)
    room.enter(own)
    assert own.stat().st_mode & 0o777 == 0o700
    room.enter(own)  # a restart finds it, and its guard
    (own / "set").write_text("x")
    end(launcher)
    wait_until_gone(own)


def test_a_folder_that_was_left_behind_is_removed_by_the_next_run(
    launcher: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    own = of(launcher, tmp_path)
    own.mkdir(mode=0o700)  # its guard was killed as well
    stranger = tmp_path / own.name.replace(f"-{os.geteuid()}-", "-54321-")
    other = tmp_path / "dscore-peer-notes"
    stranger.mkdir()
    other.mkdir()
    room.clear(tmp_path)
    assert own.exists()
    end(launcher)
    room.clear(tmp_path)
    assert not own.exists() and stranger.exists() and other.exists()


@pytest.mark.parametrize("how", ["open", "link", "file"])
def test_a_folder_that_others_have_planted_is_refused(tmp_path: Path, how: str) -> None:
    own = room.room_of(tmp_path, "runs/a")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if how == "link":
        own.symlink_to(elsewhere)
    elif how == "file":
        own.write_text("")
    else:
        own.mkdir()
        own.chmod(0o777)
    with pytest.raises(CheckpointError, match=r"others could have put files|cannot be used"):
        room.enter(own)
    assert list(elsewhere.iterdir()) == []


def test_the_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = room.room_of(tmp_path, "runs/a")
    own.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CheckpointError, match="belongs to user"):
        room.check(own)


def test_a_link_in_the_place_of_a_left_folder_is_not_followed(
    launcher: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    left = of(launcher, tmp_path)
    end(launcher)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("x")
    left.symlink_to(victim)
    room.clear(tmp_path)
    assert (victim / "file").exists()


def test_what_is_sent_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda s: clock.append(clock.pop() + s))
    pace = Pace(100)
    for _ in range(5):
        pace.add(50)
    assert clock[0] == pytest.approx(2.5)
