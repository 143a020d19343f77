"""Local programs that reach other hosts (ssh, mpirun, srun): run them together, bring their output,
end all as one.

One loop in one thread. The programs end when this process does (Linux), and their agents with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from ds_command_kit.show import CommandError, say_error
from ds_command_kit.stopping import PREEMPTED, SAVED, heeded

if TYPE_CHECKING:
    from ds_command_kit.launch import LaunchRequest

BEAT_SECONDS = 5.0
# after the first failure: how long the other agents may take to notice it by themselves
OTHERS_SECONDS = 10.0
RETRY_SECONDS = 10.0
ALONE_SECONDS = 60.0  # how long hosts are tried that have all gone
_SAID_BY_ALL = re.compile(rb"dscore: (lost |stopped by |restart )|ssh: ")
# Of torch, at each connection between hosts that have no names; nothing depends on it.
_NAMELESS = b"[c10d] The hostname of the client socket cannot be retrieved"
_TOLD = re.compile(rb"dscore: (rank|host) ")  # an agent says what went wrong there

End = tuple[str, int]  # a host, or "" for all, and the exit code of what ran for it


def _silent(where: str, code: int) -> str:
    return ""


def _no_end(line: bytes) -> End | None:
    return None


def run_tool(
    request: LaunchRequest,
    argv: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    feed: bytes = b"",
    lifeline: bool = False,
    explain: Callable[[str, int], str] = _silent,
    ends: Callable[[bytes], End | None] = _no_end,
) -> int:
    """Run one program that reaches all hosts; see `run_tools`.

    ends: host and exit code where a line of the program's stderr says that one host's agent has
    ended badly; the line itself is not shown. For programs that then wait for the others.
    """
    loop = _Loop(
        request, [_Tool("", list(argv), feed)], dict(environment or {}), lifeline, explain, ends
    )
    return _run(request, {"": argv}, loop)


def run_tools(
    request: LaunchRequest,
    commands: Mapping[str, Sequence[str]],
    *,
    environment: Mapping[str, str] | None = None,
    feed: bytes = b"",
    lifeline: bool = False,
    explain: Callable[[str, int], str] = _silent,
    again: bool = False,
) -> int:
    """Run all `commands` (by host) until all have ended; the exit code of the first that ends
    badly, or 0.

    With ``request.show`` they are printed instead.

    environment: theirs, besides this process's own.
    feed: goes to the standard input of each.
    lifeline: that then stays open, with a line break every few seconds, and its end is how they are
        asked to end; otherwise it is SIGTERM.
    explain: called as ``explain(where, code)`` for the first bad end, gives what to say of it; ""
        where the agents say it.
    again: one that ends badly while others go on is tried again until they end too.
    """
    tools = [_Tool(where, list(argv), feed) for where, argv in commands.items()]
    return _run(
        request,
        commands,
        _Loop(request, tools, dict(environment or {}), lifeline, explain, _no_end, again),
    )


def _run(request: LaunchRequest, commands: Mapping[str, Sequence[str]], loop: _Loop) -> int:
    if request.show:
        show(request, commands)
        return 0
    return loop.run()


def show(request: LaunchRequest, commands: Mapping[str, Sequence[str]]) -> None:
    """What would be run, as it could be typed; of the variables only the names."""
    for where, argv in commands.items():
        typer.echo(f"{where}: {shlex.join(argv)}" if where else shlex.join(argv))
    for number, host in enumerate(request.hosts if commands else ()):
        slots = (
            "one process per accelerator"
            if host.slots is None
            else f"slots {', '.join(map(str, host.slots))}"
        )
        typer.echo(
            f"host {number}: {host.name}, "
            f"{slots if request.nproc is None else f'{request.nproc} processes'}"
        )
    if not commands:
        count = (
            "one process per accelerator" if request.nproc is None else f"{request.nproc} processes"
        )
        which = (
            ""
            if request.node_rank is None
            else f", host {request.node_rank} of {request.max_nodes}"
        )
        typer.echo(f"this machine{which}: {count}")
    what = "-m " * request.is_module + shlex.join([request.script, *request.arguments])
    typer.echo(f"each process: {what if request.is_command else f'python {what}'}")
    if request.exported:
        typer.echo(f"variables: {', '.join(name for name, _ in request.exported)}")


@dataclass(slots=True)
class _Tool:
    where: str
    argv: list[str]
    first: bytes  # that it gets to read
    feed: bytearray = field(default_factory=bytearray)  # what it has still to get
    process: Any = None
    code: int | None = None
    retry: float = float("inf")
    # what has come since the last whole line, by target
    partial: dict[int, bytes] = field(default_factory=dict)


class _Loop:
    """One run of several tools."""

    def __init__(
        self,
        request: LaunchRequest,
        tools: list[_Tool],
        environment: dict[str, str],
        lifeline: bool,
        explain: Callable[[str, int], str],
        ends: Callable[[bytes], End | None],
        again: bool = False,
    ) -> None:
        self.request = request
        self.tools = tools
        self.environment = environment
        self.lifeline = lifeline
        self.explain = explain
        self.ends = ends
        self.again = again
        self.selector = selectors.DefaultSelector()
        self.said: set[bytes] = set()
        self.told = False  # by an agent, what went wrong
        self.first: End | None = None  # the first bad one
        self.stopped = 0  # by this signal
        self.alone = 0.0  # when the last one ended
        self.deadline = float("inf")  # when to ask who is left to end
        self.asked = False

    def run(self) -> int:
        with self._signals():
            try:
                for tool in self.tools:
                    self._start(tool)
                self._loop()
            finally:
                self._kill()
                self._close()
        return self._say()

    def _start(self, tool: _Tool) -> None:
        piped = self.lifeline or bool(tool.first)
        tool.feed = bytearray(tool.first)
        tool.code = None
        tool.retry = float("inf")
        try:
            tool.process = subprocess.Popen(
                tool.argv,
                env=os.environ | self.environment,
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for us, who ask them to end
                preexec_fn=_end_with_us,  # noqa: PLW1509  this process has one thread
            )
        except OSError as error:
            raise CommandError(
                f"{tool.argv[0]} cannot be run: {error.strerror}; is it installed?"
            ) from error
        for pipe, target in ((tool.process.stdout, 1), (tool.process.stderr, 2)):
            os.set_blocking(pipe.fileno(), False)
            self.selector.register(pipe, selectors.EVENT_READ, (tool, target))
        if piped:
            os.set_blocking(tool.process.stdin.fileno(), False)

    def _loop(self) -> None:
        beat = time.monotonic()
        while self._goes_on():
            for key, _ in self.selector.select(0.1):
                self._copy(key.fileobj, *key.data)
            now = time.monotonic()
            for tool in self.tools:
                self._feed(tool, now >= beat)
                self._look(tool)
                if now >= tool.retry:
                    self._close_pipes(tool)
                    self._start(tool)
            beat = now + BEAT_SECONDS if now >= beat else beat
            if now >= self.deadline:
                self._ask(now)

    def _goes_on(self) -> bool:
        """Whether a tool runs, or all that have not ended well are to be tried again."""
        if any(tool.code is None for tool in self.tools):
            return True
        codes = [(tool.where, tool.code) for tool in self.tools if tool.code]
        return (
            len(codes) == len(self.tools)
            and time.monotonic() < self.alone + ALONE_SECONDS
            and all(
                tool.retry < float("inf") and self.explain(tool.where, tool.code or 0)
                for tool in self.tools
            )
        )

    def _copy(self, pipe: Any, tool: _Tool, target: int) -> bool:
        """Bring what has come: whole lines, or what ends as a progress bar does.

        False when nothing has come.
        """
        try:
            data = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self.selector.unregister(pipe)
        text = tool.partial.pop(target, b"") + data
        end = (
            max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
            if data and len(text) < 1 << 20
            else len(text)
        )
        if text[end:]:
            tool.partial[target] = text[end:]
        lines = [
            line for line in text[:end].splitlines(keepends=True) if self._is_shown(line, target)
        ]
        with contextlib.suppress(OSError):  # the reader has gone: the run continues
            _write(target, b"".join(lines))
        return bool(data)

    def _is_shown(self, line: bytes, target: int) -> bool:
        if target == 2 and (end := self.ends(line)) is not None:
            self._ended(end)
            return False
        if self.told and not self.stopped and line.startswith(b"dscore: stopped by "):
            return False  # by the tool, since another agent has failed
        if target == 2 and _NAMELESS in line:
            return False
        self.told = self.told or _TOLD.match(line) is not None
        return self._is_new(line)

    def _is_new(self, line: bytes) -> bool:
        if not _SAID_BY_ALL.match(line):
            return True
        known = line in self.said
        self.said.add(line)
        return not known

    def _feed(self, tool: _Tool, beat: bool) -> None:
        pipe = tool.process.stdin
        if pipe is None or pipe.closed:
            return
        if beat and self.lifeline:
            tool.feed += b"\n"
        try:
            while tool.feed:
                del tool.feed[: os.write(pipe.fileno(), tool.feed[: 1 << 16])]
        except BlockingIOError:
            return
        except OSError:  # it has ended
            tool.feed.clear()
        if not self.lifeline:
            pipe.close()

    def _look(self, tool: _Tool) -> None:
        """Note the end of a tool, when all that it has written is read."""
        if tool.code is not None or (code := tool.process.poll()) is None:
            return
        for key in [key for key in self.selector.get_map().values() if key.data[0] is tool]:
            while self._copy(key.fileobj, *key.data):
                pass
            if key.fileobj in self.selector.get_map():  # a process that still runs keeps it open
                self.selector.unregister(key.fileobj)
        tool.code = code
        self.alone = time.monotonic()
        if code != 0 and self.again and not self.asked:
            tool.retry = self.alone + RETRY_SECONDS
            if (text := self.explain(tool.where, code)) and any(
                other.code is None for other in self.tools
            ):
                self._tell(f"{text}; tried again every {RETRY_SECONDS:g} s")
        elif code != 0:
            self._ended((tool.where, code))

    def _ended(self, end: End) -> None:
        """The first bad end is the end of all."""
        if self.first is None:
            self.first = end
            own = self.explain(*end)  # of which the other agents do not hear by themselves
            # so all have heard of it
            told = self.told or any(line.startswith(b"dscore: lost ") for line in self.said)
            seconds = 1.0 if own else 3.0 if told else OTHERS_SECONDS
            self.deadline = min(self.deadline, time.monotonic() + seconds)

    def _ask(self, now: float) -> None:
        """Ask who is left to end; later, end them."""
        if self.asked:
            self._kill()
            self.deadline = now + 1.0
            return
        seconds = max(
            self.request.grace, self.request.notice if self.stopped == signal.SIGTERM else 0.0
        )
        self.asked = True
        self.deadline = now + seconds + 5.0
        for tool in self.tools:
            if tool.code is None:
                if self.lifeline:
                    with contextlib.suppress(OSError):
                        tool.process.stdin.close()
                else:
                    tool.process.terminate()

    def _kill(self) -> None:
        for tool in self.tools:
            if tool.process is not None and tool.process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(tool.process.pid, signal.SIGKILL)

    def _close(self) -> None:
        self.selector.close()
        for tool in self.tools:
            if tool.process is not None:
                self._close_pipes(tool)

    def _close_pipes(self, tool: _Tool) -> None:
        tool.process.wait()
        for pipe in filter(None, (tool.process.stdin, tool.process.stdout, tool.process.stderr)):
            with contextlib.suppress(OSError):
                pipe.close()

    def _tell(self, text: str) -> None:
        """Say it, unless it was said."""
        if self._is_new(f"dscore: {text}\n".encode()):
            say_error(text)

    def _say(self) -> int:
        saved = f"stopped by SIGTERM, {SAVED}"
        # a tool's own exit code may be of the signal
        told = f"dscore: {saved}\n".encode() in self.said
        if self.stopped == signal.SIGTERM and (
            told or any(tool.code == PREEMPTED for tool in self.tools)
        ):
            if not told:
                say_error(saved)
            return PREEMPTED
        if self.stopped and any(tool.code == PREEMPTED for tool in self.tools):
            self._tell(f"stopped by {signal.Signals(self.stopped).name}, {SAVED}")
            return PREEMPTED
        if self.stopped:
            self._tell(f"stopped by {signal.Signals(self.stopped).name}; all processes were ended")
            return 128 + self.stopped
        if self.again:  # the run's code is that of the agents that have seen its end
            seen = [tool for tool in self.tools if not self.explain(tool.where, tool.code or 0)]
            self.first = next(
                ((tool.where, tool.code) for tool in seen or self.tools if tool.code), None
            )
            if any(tool.code == 0 for tool in seen):
                return 0
        if self.first is None:
            return 0
        code = self.first[1]
        why = self.explain(*self.first)
        lost = any(line.startswith(b"dscore: lost ") for line in self.said)
        if self.first[0] and not (why or lost or self.told):
            # An agent that begins says what goes wrong; this one could not, as its Python lacks a
            # package perhaps.
            say_error(
                f"host {self.first[0]} ended with exit code {code} before its agent could say why "
                "(what it wrote is "
                f"above); the same ds_core must be installed for {sys.executable} there"
            )
        if why and (lost or not self.told):
            if not lost:
                say_error(why)
            return 1
        return code if code > 0 else 128 - code

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def stop(number: int, frame: FrameType | None) -> None:
            self.stopped = self.stopped or number
            self.deadline = min(self.deadline, 0.0) if not self.asked else self.deadline

        before = {number: signal.signal(number, stop) for number in heeded()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


_LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def _end_with_us() -> None:
    """In the new process: let Linux end it when this one is killed."""
    if _LIBC is not None:
        _LIBC.prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG
