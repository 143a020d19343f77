"""Worker processes for tests of multi-process code: started once per size, used by many tests.

`run_ranks(2, fn, x)` calls the module-level function ``fn(x)`` on two ranks with torch.distributed
(gloo) initialised and returns both results. Functions go by reference, values by `ds_testing.wire`;
nothing is pickled. After any failure the workers are killed and new ones serve the next call.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_testing import wire
from ds_testing.processes import free_port

if TYPE_CHECKING:
    from typing_extensions import Self

GRACE = 1.0
"""Seconds that the other ranks get to finish or fail on their own after the first failure."""
START = 300.0
"""Seconds that the fork server may take to import torch."""
TAIL = 6000
"""Characters of a rank's output shown in an error."""
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from ds_testing.worker import serve
serve(int(sys.argv[2]))
"""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """What became of one rank."""

    rank: int
    kind: str
    """``"raised"``, ``"died"``, ``"hung"`` (past the timeout) or ``"stopped"`` (by the pool: others
    failed).
    """
    what: str
    """The exception, exit code or signal in one line."""
    detail: str = ""
    """Traceback or stacks."""
    output: str = ""
    """The end of stdout and stderr."""

    def __str__(self) -> str:
        parts = [f"rank {self.rank} {self.what}"]
        if self.detail:
            parts.append(self.detail.rstrip())
        if self.output.strip():
            parts.append(f"-- output of rank {self.rank} --\n{self.output.rstrip()}")
        return "\n".join(parts)


class RemoteError(Exception):
    """A run failed on at least one rank.

    `rank` failed first; `failures` tells of every rank that did not finish.
    """

    def __init__(self, name: str, size: int, failures: Sequence[RankFailure]) -> None:
        self.failures = tuple(failures)
        self.rank = failures[0].rank
        head = f"{name} on {size} ranks: " + "; ".join(
            f"rank {f.rank} {f.what.splitlines()[0]}" for f in failures
        )
        super().__init__("\n\n".join([head, *map(str, failures)]))


class WorkerPool:
    """`size` gloo ranks on this machine, started at the first `run`.

    Raises ValueError for a size below 1 or above twice the cores (at least 8 are allowed).
    """

    def __init__(self, size: int) -> None:
        most = max(8, 2 * (os.cpu_count() or 1))
        if not 1 <= size <= most:
            raise ValueError(f"a pool of {size} workers on {os.cpu_count()} cores; use 1 to {most}")
        self.size = size
        # Our ends of the sockets to the workers, and their process ids, by rank.
        self._socks: list[socket.socket] = []
        self._pids: list[int] = []
        # Has the outputs and stacks of the workers.
        self._folder: Path | None = None
        self._server: _Server | None = None
        # The port of the store by which the workers make process groups.
        self._store_port = 0
        # Counts how often they had to make their groups again.
        self._generation = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids by rank; empty while the pool is not running."""
        return tuple(self._pids)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
        """Call ``fn(*args)`` on every rank and return the results by rank.

        The worker sees this process's environment, directory and import path as they are now, seeds
        of 0, and RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (a
        free port).
        timeout: seconds for all ranks to answer.

        Raises RemoteError when a rank raises, dies or does not answer; TypeError for an `fn` that
        is not a module-level function or a value that cannot be sent.
        """
        task = reference(fn) | _environment() | {"args": list(args)}
        # A value that cannot be sent is refused before a worker is started for it.
        wire.encode(task["args"], "args")
        if self._pids and self._any_closed():
            self.close()
        if not self._pids:
            self._start()
        task |= {"store_port": self._store_port, "generation": self._generation}
        try:
            answers = self._exchange(task, time.monotonic() + timeout)
        # Ctrl-C in the middle of a run: workers would answer the next run with this one's results.
        except BaseException:
            self.close()
            raise
        failures = self._failures(answers, timeout)
        # Ranks that are left may wait in a collective: new ones are faster than a way out of it.
        if failures:
            self.close()
            raise RemoteError(f"{task['module']}.{task['qualname']}", self.size, failures)
        # A test that made or destroyed groups must not change what the next one finds.
        if any(answers[rank]["dirty"] for rank in range(self.size)):
            self._generation += 1
        return [answers[rank]["value"] for rank in range(self.size)]

    def close(self) -> None:
        """Kill the workers and remove their files; the next `run` starts new ones."""
        self._end()
        for sock in self._socks:
            sock.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._socks = []
        self._folder = None
        self._generation = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _end(self) -> list[int | None]:
        """Kill the workers; wait statuses by rank (of one that had ended before: how it did), None
        where unknown.
        """
        pids = self._pids
        self._pids = []
        for pid in pids:
            # The whole group: what a test has started in a worker ends with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        ended = self._server.reap(pids) if pids and self._server is not None else {}
        return [ended.get(pid) for pid in pids]

    def _start(self) -> None:
        self._server = server = _server()
        self._folder = Path(tempfile.mkdtemp(prefix="ds-pool-"))
        pairs = [socket.socketpair() for _ in range(self.size)]
        self._socks = [ours for ours, _ in pairs]
        self._pids = server.spawn(self._folder, [theirs for _, theirs in pairs])
        try:
            hellos = [wire.receive(sock, time.monotonic() + START) for sock in self._socks]
        except (wire.Closed, TimeoutError) as error:
            logs = "\n".join(self._output(rank) for rank in range(self.size))
            self.close()
            raise RuntimeError(
                f"the {self.size} workers did not start: {type(error).__name__}\n{logs}"
            ) from error
        self._store_port = hellos[0]["store_port"]

    def _any_closed(self) -> bool:
        """Whether a worker has gone since the last run; nothing is ever readable on an idle
        worker's socket.
        """
        with selectors.DefaultSelector() as selector:
            for sock in self._socks:
                selector.register(sock, selectors.EVENT_READ)
            return bool(selector.select(0))

    def _exchange(self, task: Mapping[str, Any], deadline: float) -> dict[int, Any]:
        """Send `task` to all and gather answers by rank in order of arrival; None for a rank that
        died.

        Ranks without an answer at the deadline, or `GRACE` seconds after the first failure, are
        left out.
        """
        answers: dict[int, Any] = {}
        with selectors.DefaultSelector() as selector:
            for rank, sock in enumerate(self._socks):
                sock.settimeout(None)
                # A worker that has died shows below, where its socket reads as closed.
                with contextlib.suppress(wire.Closed):
                    wire.send(sock, task)
                selector.register(sock, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(deadline - time.monotonic(), 0))
                if not ready:
                    break
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    try:
                        answer = wire.receive(self._socks[key.data], deadline)
                    except wire.Closed:
                        answer = None
                    except TimeoutError:
                        continue
                    answers[key.data] = answer
                    if answer is not None and self._server is not None:
                        self._server.learn(answer["loaded"])
                    # The other ranks may wait for this one; they get time to fail by themselves.
                    if answer is None or not answer["ok"]:
                        deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _failures(self, answers: Mapping[int, Any], timeout: float) -> list[RankFailure]:
        """One record per rank that did not finish: the dead, then the raising, then the silent."""
        if len(answers) == self.size and all(a and a["ok"] for a in answers.values()):
            return []
        died = [rank for rank, answer in answers.items() if answer is None]
        raised = [rank for rank, answer in answers.items() if answer and not answer["ok"]]
        silent = [rank for rank in range(self.size) if rank not in answers]
        # Stacks need living processes, and outputs grow until they have ended: in this order.
        stacks = self._stacks(silent)
        ended = self._end()
        failures = [RankFailure(r, "died", _ending(ended[r]), output=self._output(r)) for r in died]
        for rank in raised:
            answer = answers[rank]
            failures.append(
                RankFailure(
                    rank, "raised", f"raised {answer['error']}", answer["trace"], self._output(rank)
                )
            )
        if failures:
            kind = "stopped"
            what = f"was still running {GRACE:g} s after the first failure"
        else:
            kind = "hung"
            what = f"did not answer within {timeout:g} s"
        failures += [
            RankFailure(rank, kind, what, stacks[rank], self._output(rank)) for rank in silent
        ]
        return failures

    def _stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """The Python stacks of all threads of `ranks`, dumped by the workers' signal handler."""
        assert self._folder is not None
        files = {rank: self._folder / f"rank{rank}.stack" for rank in ranks}
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        until = time.monotonic() + 2.0
        texts = dict.fromkeys(ranks, "")
        while time.monotonic() < until:
            time.sleep(0.05)
            # A dump is complete when it did not grow any more.
            before = dict(texts)
            texts = {
                rank: file.read_text(errors="replace") if file.exists() else ""
                for rank, file in files.items()
            }
            if texts == before and all(texts.values()):
                break
        return {
            rank: text or "(no stack: the process did not answer SIGUSR1)"
            for rank, text in texts.items()
        }

    def _output(self, rank: int) -> str:
        assert self._folder is not None
        file = self._folder / f"rank{rank}.log"
        return file.read_text(errors="replace")[-TAIL:] if file.exists() else ""


def run_ranks(size: int, fn: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
    """`WorkerPool.run` on this process's pool of `size` workers.

    The pool is kept until the process ends.
    """
    if size not in _pools:
        _pools[size] = WorkerPool(size)
    return _pools[size].run(fn, *args, timeout=timeout)


def close_pools() -> None:
    """End every pool made by `run_ranks`, and the fork server; later calls start new ones."""
    for pool in _pools.values():
        pool.close()
    _pools.clear()
    while _servers:
        _servers.pop().close()


_pools: dict[int, WorkerPool] = {}
_servers: list[_Server] = []
atexit.register(close_pools)


class _Server:
    """This process's end of `ds_testing.worker.serve`."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        # Ranks share few cores, so each computes with one thread; torch reads this at import.
        env = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
        command = [sys.executable, "-c", _BOOT, json.dumps(_import_path()), str(theirs.fileno())]
        # A session of its own: Ctrl-C is for the test process, which then ends the workers in good
        # order.
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._read()
        # Modules that workers have loaded.
        self._modules: dict[str, None] = {}
        # How many of them the server was given.
        self._told = 0

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def spawn(self, folder: Path, socks: Sequence[socket.socket]) -> list[int]:
        """Fork one worker per socket (which is closed here); pids by rank."""
        modules = list(self._modules)[self._told :]
        self._told = len(self._modules)
        request = {"spawn": str(folder), "modules": modules, "path": _import_path()}
        line = json.dumps(request).encode() + b"\n"
        socket.send_fds(self._sock, [line], [sock.fileno() for sock in socks])
        # A copy kept here would hide that a worker has closed its end.
        for sock in socks:
            sock.close()
        pids: list[int] = self._read()
        return pids

    def learn(self, modules: Sequence[str]) -> None:
        """Have it import `modules` before it forks the next workers."""
        self._modules.update(dict.fromkeys(modules))

    def reap(self, pids: Sequence[int]) -> dict[int, int]:
        """Wait status by pid of those that have ended (waits for up to 5 seconds)."""
        try:
            self._sock.sendall(json.dumps({"reap": list(pids), "timeout": 5.0}).encode() + b"\n")
            return {int(pid): status for pid, status in self._read().items()}
        except (OSError, RuntimeError):
            return {}  # the server is gone, and the workers went with it

    def close(self) -> None:
        """End the server and whatever it still has forked."""
        self._sock.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _read(self) -> Any:
        self._sock.settimeout(START)
        line = b""
        while not line.endswith(b"\n"):
            try:
                part = self._sock.recv(65536)
            except TimeoutError:
                part = b""
            if not part:
                self._log.seek(0)
                said = self._log.read().decode(errors="replace")[-TAIL:]
                self._process.kill()
                code = self._process.wait()
                raise RuntimeError(
                    f"the fork server of the worker pool failed (exit code {code}):\n{said}"
                )
            line += part
        return json.loads(line)


def _server() -> _Server:
    while _servers and not _servers[-1].alive:
        _servers.pop().close()
    if not _servers:
        _servers.append(_Server())
    return _servers[-1]


def reference(fn: Callable[..., Any]) -> dict[str, Any]:
    """Where a worker finds `fn`: module name, file and qualified name.

    Raises TypeError when it cannot be found so.
    """
    module = getattr(fn, "__module__", None)
    qualname = getattr(fn, "__qualname__", "")
    found: Any = sys.modules.get(module or "")
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if module is None or found is None or found != fn:
        raise TypeError(
            f"{fn!r} is not a function at module level, so that a worker cannot import it; "
            "define it with def at the top of the file and pass what varies as arguments"
        )
    file = getattr(sys.modules[module], "__file__", None)
    if file is None:
        raise TypeError(
            f"{module}.{qualname} has no source file; a worker can only import functions from files"
        )
    return {"module": module, "qualname": qualname, "file": os.path.realpath(file)}


def _environment() -> dict[str, Any]:
    return {
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "path": _import_path(),
        "port": free_port(),
    }


def _import_path() -> list[str]:
    return [os.path.abspath(entry) for entry in sys.path]


def _ending(status: int | None) -> str:
    if status is None:
        return "closed its connection (exit status unknown)"
    if os.WIFSIGNALED(status):
        return f"died of {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended itself with exit code {os.WEXITSTATUS(status)}"
