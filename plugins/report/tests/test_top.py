"""``dscore top``: on a terminal, without one, of a run that goes on, ends, fails or dies."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ds_command_kit.app import make_app
from ds_report.recorder import Recorder
from ds_report.top.live import KEPT, Watch
from ds_report.top.screen import BLOCKS, screen, spark
from ds_report.top.state import State
from ds_testing.processes import clean_environment
from rich.console import Console
from typer.testing import CliRunner

from ds_core.accelerator.cpu import CpuAccelerator

Write = Callable[..., Path]


def recorders(folder: Path, world: int = 2, **facts: Any) -> list[Recorder]:
    known = {"world_size": world, "total_steps": 50, "memory": 64 * 2**30, **facts}
    return [
        Recorder(folder, rank, {"rank": rank, **known}, CpuAccelerator(), seconds=0.02)
        for rank in range(world)
    ]


def steps(ranks: list[Recorder], first: int, last: int, slow: int = -1) -> None:
    """Steps of all ranks; all but `slow` wait for it in 40 % of each step."""
    for step in range(first, last + 1):
        for recorder in ranks:
            now = time.perf_counter()
            recorder._phases.append(
                ("backward_allreduce", now - (0.0 if recorder.rank == slow else 0.0005))
            )
            recorder.phase_end("backward_allreduce")
            recorder.step(step, {"loss": 4 / step, "samples": 8.0 * step})
        time.sleep(0.001)
    for recorder in ranks:
        recorder._write()


def text_of(seen: Any, width: int = 100, height: int = 30) -> str:
    console = Console(
        width=width,
        height=height,
        force_terminal=True,
        color_system=None,
        record=True,
        file=io.StringIO(),
    )
    console.print(screen(seen, console))
    return console.export_text()


# -- what is known ---------------------------------------------------------------------------------


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    ranks = recorders(tmp_path / "gpt", world=4)
    steps(ranks, 1, 10, slow=2)
    ranks[1].phase_begin("forward")
    ranks[1]._write()
    watch = Watch(tmp_path / "gpt")
    seen = watch.look()
    assert (seen.standing.state, seen.step, seen.total, seen.world) == (State.RUNNING, 10, 50, 4)
    assert list(seen.losses) == [4 / step for step in range(1, 11)]
    assert seen.left == pytest.approx(40 * seen.step_ms / 1e3)
    assert [rank.straggler for rank in seen.ranks] == [False, False, True, False]
    assert (seen.ranks[1].phase, seen.ranks[0].phase) == ("forward", "between steps")
    steps(ranks, 11, 12)
    assert len(watch.look().losses) == 12
    for size in ((120, 30), (80, 24), (50, 12), (20, 5)):
        shown = text_of(seen, *size)
        assert max(map(len, shown.splitlines())) <= size[0]
        assert "gpt" in shown
    for word in (
        "step 10 of 50",
        "loss",
        "0.4",
        "samples/s",
        "forward",
        "straggler: others wait for it",
        "GiB",
    ):
        assert word in text_of(seen), text_of(seen)
    for recorder in ranks:
        recorder.end("finished")
    assert watch.look().standing.state is State.FINISHED


def test_few_lines_for_many_ranks(tmp_path: Path) -> None:
    ranks = recorders(tmp_path, world=12)
    steps(ranks, 1, 6, slow=11)
    shown = text_of(Watch(tmp_path).look(), 100, 18)
    assert (
        "straggler" in shown
        and re.search(r"and \d+ more ranks", shown)
        and len(shown.splitlines()) <= 18
    )
    for recorder in ranks:
        recorder.end("finished")


def test_a_long_run_is_read_from_its_end_and_kept_short(
    tmp_path: Path, write_record: Write
) -> None:
    write_record(tmp_path, 30_000, world=1)
    started = time.monotonic()
    seen = Watch(tmp_path).look()
    assert (seen.step, seen.total) == (30_000, 50) and len(seen.losses) == 2000
    assert time.monotonic() - started < 30  # it looks at the last 2 MB alone
    watch = Watch(tmp_path)
    record = [
        json.dumps({"kind": "step", "time": 1.0, "step": s, "metrics": {"loss": 1.0}})
        for s in range(1, 2 * KEPT + 9)
    ]
    (tmp_path / "rank0.jsonl").write_text("\n".join(record) + "\n")
    watch.look()
    assert len(watch._tails[0].record.columns.step) <= 2 * KEPT


def test_spark() -> None:
    assert spark([0, 1, 2, 3, 4, 5, 6, 7], 8) == BLOCKS
    assert spark([1.0, 1.0], 8) == "▁▁"
    assert len(spark(list(range(1000)), 30)) == 30


# -- without a terminal ----------------------------------------------------------------------------


def invoke(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(make_app(), ["top", *words])
    return done.exit_code, done.output


def test_one_look_and_the_exit_code(tmp_path: Path, write_record: Write) -> None:
    code, said = invoke(str(write_record(tmp_path / "a")), "--once")
    assert (
        code == 0
        and "a: finished, step 20 of 50, loss 0.2, 80 samples/s" in said
        and "  rank 1, step 20" in said
    )
    code, said = invoke(str(write_record(tmp_path / "b", last="failed", name="no more data")))
    assert (
        code == 1
        and "b: failed" in said
        and "rank 0: ValueError: no more data" in said
        and said.count("\n") == 1
    )
    code, said = invoke(str(tmp_path))
    assert code == 2 and "holds no record of a run" in said


SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[2])
from test_top import Path, recorders, steps
ranks = recorders(Path(sys.argv[1]))
steps(ranks, 1, 5)
Path(sys.argv[1], "go").touch()
for step in range(6, 10_000):
    steps(ranks, step, step)
    time.sleep(0.05)
"""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """The folder and the process of a run that goes on until it is killed."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(Path(__file__).parent)]
    with subprocess.Popen(command, env=clean_environment()) as process:
        while not (tmp_path / "run" / "go").exists():
            assert process.poll() is None
            time.sleep(0.02)
        yield tmp_path / "run", process
        process.kill()


DSCORE = [sys.executable, "-c", "from ds_cli import main; main()"]


@pytest.mark.slow
def test_lines_until_the_run_dies(running: tuple[Path, subprocess.Popen[bytes]]) -> None:
    folder, process = running
    command = [*DSCORE, "top", str(folder), "--every", "0.1"]
    with subprocess.Popen(
        command, env=clean_environment(), stdout=subprocess.PIPE, text=True
    ) as top:
        assert top.stdout is not None
        first = top.stdout.readline()
        assert re.match(r"\d\d:\d\d:\d\d run: running, step \d+ of 50, loss", first), first
        process.send_signal(signal.SIGKILL)
        process.wait()
        rest = top.stdout.read()
    assert top.returncode == 1
    assert "run: died" in rest and "ranks 0, 1 ended without a word; last sign at" in rest


# -- on a terminal ---------------------------------------------------------------------------------


ON_A_TERMINAL = """
import fcntl, signal, termios
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from ds_cli import main
main()
"""


class Terminal:
    """A pseudo-terminal with ``dscore top`` in it."""

    def __init__(self, *words: str, columns: int = 90) -> None:
        self.master, slave = pty.openpty()
        self.resize(columns)
        self.before = termios.tcgetattr(self.master)
        env = clean_environment(TERM="xterm-256color")
        env = {k: v for k, v in env.items() if k not in ("COLUMNS", "NO_COLOR")}
        command = [sys.executable, "-c", ON_A_TERMINAL, "top", *words]
        self.process = subprocess.Popen(
            command, env=env, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.text = ""

    def resize(self, columns: int, rows: int = 24) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, until: str, seconds: float = 60.0) -> str:
        """What is new on the screen, up to the expression `until`."""
        end = time.monotonic() + seconds
        begin = len(self.text)
        while not re.search(until, self.text[begin:], re.DOTALL):
            assert time.monotonic() < end, f"{until!r} has not come:\n{self.text[begin:]!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.text += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    assert re.search(until, self.text[begin:], re.DOTALL), self.text[begin:]
        return self.text[begin:]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


def longest(shown: str) -> int:
    return max(
        len(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line)) for line in re.split(r"\r?\n", shown)
    )


@pytest.mark.slow
def test_a_terminal_resize_and_ctrl_c(running: tuple[Path, subprocess.Popen[bytes]]) -> None:
    terminal = Terminal(str(running[0]), "--every", "0.1")
    try:
        wide = terminal.read(r"\x1b\[\?1049h.*rank.*between steps.*GiB")
        assert "\x1b[?25l" in wide, "the cursor is hidden while it runs"
        terminal.resize(44, 14)
        terminal.read(r"GiB.*GiB.*GiB")  # one more screen may be of the old size
        assert longest(terminal.read(r"\x1b\[H.*GiB.*GiB\s").rpartition("\x1b[H")[2]) <= 44
        os.write(terminal.master, b"\x03")
        end = terminal.read(r"\x1b\[\?1049l.*run: running, step \d+[^\r\n]*\r?\n")
        assert "\x1b[?25h" in end and "Traceback" not in terminal.text
        assert terminal.process.wait(30) == 0
        assert termios.tcgetattr(terminal.master) == terminal.before
    finally:
        terminal.close()


def test_a_terminal_when_the_run_dies(running: tuple[Path, subprocess.Popen[bytes]]) -> None:
    terminal = Terminal(str(running[0]), "--every", "0.1")
    try:
        terminal.read(r"\x1b\[\?1049h")
        running[1].kill()
        running[1].wait()
        end = terminal.read(r"\x1b\[\?1049l.*run: died, [^\r\n]*ended without a word[^\n]*\n")
        assert "\x1b[?25h" in end
        assert terminal.process.wait(30) == 1
    finally:
        terminal.close()
