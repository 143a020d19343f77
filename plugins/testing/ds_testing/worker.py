"""The other side of `ds_testing.pool`: a process that imports torch once and forks workers.

[Note: fork server] On two cores one `import torch` costs seconds, and pools are many and restart
after every failure. So one server imports torch, stays single-threaded (no tensor work, no device),
and forks on request; a worker is ready in milliseconds. The server ends, and its workers with it,
when the test process goes away.

[Note: what workers have loaded] The first `initialize` of a new worker spends half a second on
plugins' modules and metadata. So workers say which modules they have imported, and the server
imports those before it forks the next ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import hashlib
import importlib
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ds_testing import shapes, wire

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "pluggy",
    "importlib_metadata",
    "ds_core.setup.assemble",
)
"""What nearly every worker would import by itself otherwise."""
LEARNED = (
    "ds_",
    "numpy",
    "packaging",
    "pydantic",
    "torch.distributed.",
    "torch.optim.",
    "transformers",
)
"""Beginnings of the names that the server imports when a worker has; see [Note: what workers have loaded].

They start no thread and touch no device when they are imported.
"""
_PR_SET_PDEATHSIG = 1


def serve(control_fd: int) -> None:
    """Answer spawn and reap requests on the control socket until it closes; then end all
    workers."""
    # Before anything of ours is imported: only modules that are imported later are checked.
    packages = os.environ.get(shapes.ENV, "").split()
    shapes.install(packages)
    for name in (*PRELOAD, *(shapes.MODULES if packages else ())):
        try:
            importlib.import_module(name)
        except ImportError:
            if name == "torch":
                raise
    # Forked workers share the pages of these objects; a collection would write to and so copy them.
    gc.freeze()
    control = socket.socket(fileno=control_fd)
    children: set[int] = set()
    folders: set[str] = set()
    control.sendall(b'{"ready": true}\n')
    while True:
        line, fds = _request(control)
        if not line:
            break
        ask = json.loads(line)
        if "spawn" in ask:
            _learn(ask["modules"], ask["path"])
            answer: Any = _spawn(ask["spawn"], fds, control)
            children.update(answer)
            folders.add(ask["spawn"])
        else:
            answer = _reap(ask["reap"], ask["timeout"])
            children.difference_update(int(pid) for pid in answer)
        control.sendall(json.dumps(answer).encode() + b"\n")
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    _reap(list(children), 5.0)
    for folder in folders:  # the test process may have had no time to
        shutil.rmtree(folder, ignore_errors=True)


def _learn(modules: list[str], path: list[str]) -> None:
    """Import what workers have imported, and discover the plugins on the tests' present path."""
    sys.path[:] = path
    for name in modules:
        # A module may be a test's own and gone by now, or need an environment that the test has
        # set.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if "ds_core.plugins" in sys.modules:
        import ds_core
        from ds_core.plugins import discover

        # Workers keep what was discovered as long as their path is the one that it was found on.
        ds_core.reset()
        discover()
    if modules:
        gc.freeze()


def _request(control: socket.socket) -> tuple[bytes, list[int]]:
    line = b""
    fds = []
    while not line.endswith(b"\n"):
        part, more, _, _ = socket.recv_fds(control, 65536, 64)
        fds += more
        if not part:
            return b"", fds
        line += part
    return line, fds


def _spawn(folder: str, fds: list[int], control: socket.socket) -> list[int]:
    pids: list[int] = []
    parent = os.getpid()
    for rank, fd in enumerate(fds):
        pid = os.fork()
        if pid:
            # in both, so that neither needs to wait for the other
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            pids.append(pid)
            continue
        code = 1
        try:
            # A copy of a sibling's socket kept here would hide the sibling's death from the test
            # process.
            control.close()
            for other in fds:
                if other != fd:
                    os.close(other)
            # A group of its own: what a test starts in a worker ends with it.
            os.setpgid(0, 0)
            _die_with(parent)
            _redirect(Path(folder), rank)
            work(rank, len(fds), socket.socket(fileno=fd))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            # `os._exit` flushes nothing; a normal exit would run what the server has registered.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    for fd in fds:
        os.close(fd)
    return pids


def _reap(pids: list[int], timeout: float) -> dict[str, int]:
    """Wait status by pid of those that ended within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    ended = {}
    left = set(pids)
    while left:
        for pid in list(left):
            try:
                done, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:  # reaped before
                left.discard(pid)
                continue
            if done:
                ended[str(pid)] = status
                left.discard(pid)
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.002)
    return ended


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the line above took effect.
    if os.getppid() != parent:
        os._exit(1)


def _redirect(folder: Path, rank: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    stacks = os.open(folder / f"rank{rank}.stack", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)


# -- the worker ------------------------------------------------------------------------------------


def work(rank: int, size: int, sock: socket.socket) -> None:
    """Run what arrives on `sock` until it closes."""
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    torch.set_num_threads(1)
    sys.argv = ["ds_core-test-worker"]
    store: Any = (
        TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        if rank == 0
        else None
    )
    wire.send(sock, {"store_port": store.port if store is not None else None})
    group = _WorkerGroup(rank, size, store)
    modules: dict[tuple[str, int, int], ModuleType] = {}
    known = set(sys.modules)
    while True:
        try:
            task = wire.receive(sock)
        except wire.Closed:
            return
        answer = _answer(task, group, modules)
        wire.send(sock, answer | {"loaded": _loaded(known)})


def _loaded(known: set[str]) -> list[str]:
    """The modules of `LEARNED` that are not `known` yet, in the order of their import."""
    new = [name for name in list(sys.modules) if name not in known]
    known.update(new)
    return [name for name in new if name.startswith(LEARNED)]


def _answer(
    task: Mapping[str, Any], group: _WorkerGroup, modules: dict[tuple[str, int, int], ModuleType]
) -> dict[str, Any]:
    # The output that a failure shows is that of one run, not of all before it.
    os.ftruncate(1, 0)
    try:
        _fresh(task, group)
        group.renew(task["generation"], task["store_port"])
        value = find_function(task, modules)(*task["args"])
        _forget()
        # Here, so that a result that cannot be sent is an error of the test.
        wire.encode(value, "result")
        return {"ok": True, "value": value, "dirty": group.dirty()}
    except BaseException as error:
        # Without this function's own frame, which says nothing to the author of a test.
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
        trace = "".join(traceback.format_exception(type(error), error, frames))
        return {
            "ok": False,
            "error": "".join(traceback.format_exception_only(error)).strip(),
            "trace": trace,
        }
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _fresh(task: Mapping[str, Any], group: _WorkerGroup) -> None:
    """Make this process look newly started by the test: its environment, directory, path, seeds and
    torch defaults.
    """
    import torch

    env = dict(task["env"])
    env |= {"RANK": str(group.rank), "LOCAL_RANK": str(group.rank), "WORLD_SIZE": str(group.size)}
    env |= {
        "LOCAL_WORLD_SIZE": str(group.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(task["port"]),
    }
    for name in set(os.environ) - set(env):
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    os.chdir(task["cwd"])
    sys.path[:] = task["path"]
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _forget() -> None:
    """Reset ds_core's process-wide state, once a test has imported anything of it that could hold
    some.
    """
    if not any(name.startswith("ds_core.") for name in sys.modules):
        return
    reset = getattr(importlib.import_module("ds_core"), "reset", None)
    if reset is not None:
        reset()


def find_function(
    reference: Mapping[str, Any], modules: dict[tuple[str, int, int], ModuleType] | None = None
) -> Any:
    """What `ds_testing.pool.reference` describes.

    modules: those that were run before, by file.
    """
    found: Any = _module(reference["module"], reference["file"], {} if modules is None else modules)
    for part in reference["qualname"].split("."):
        found = getattr(found, part)
    return found


def _module(name: str, file: str, modules: dict[tuple[str, int, int], ModuleType]) -> ModuleType:
    """Import `name` when that leads to `file`, else run `file` under a name of its own.

    Two test files may well have one module name, and ``__main__`` must not be run as a script
    again.
    """
    # A test file may be rewritten during a session: its time and size distinguish versions.
    stat = os.stat(file)
    key = (file, stat.st_mtime_ns, stat.st_size)
    if key not in modules:
        modules[key] = importlib.import_module(name) if _leads_to(name, file) else _run_file(file)
    return modules[key]


def _leads_to(name: str, file: str) -> bool:
    if name == "__main__":
        return False
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == file


def _run_file(file: str) -> ModuleType:
    name = f"_ranks_{hashlib.sha256(file.encode()).hexdigest()[:12]}_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class _WorkerGroup:
    """The default process group of this worker, made anew when the test process asks for a new
    generation.
    """

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank = rank
        self.size = size
        self.store = store
        self.generation = -1
        self.world: Any = None

    def renew(self, generation: int, port: int) -> None:
        """Leave all groups and make the default one under a fresh prefix of the pool's store; a
        collective.
        """
        import torch.distributed as dist
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        if generation == self.generation:
            return
        if dist.is_initialized():
            dist.destroy_process_group()
            # What still refers to a group keeps its threads, and gloo's wake up hundreds of times
            # a second while they wait: some dozens of forgotten groups slow down every later test.
            gc.collect()
        if self.store is None:
            self.store = TCPStore("127.0.0.1", port, self.size, is_master=False)
        store = PrefixStore(f"generation{generation}", self.store)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)
        self.world = dist.group.WORLD
        self.generation = generation

    def dirty(self) -> bool:
        """Whether the test made, replaced or destroyed groups."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        if not dist.is_initialized() or dist.group.WORLD is not self.world:
            return True
        # no public call counts the groups of a process
        return len(distributed_c10d._world.pg_map) != 1
