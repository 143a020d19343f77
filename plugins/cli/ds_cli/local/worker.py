"""What every launched process starts with: run the user's script and leave word of how it ended.

Run by its path, as ``python worker.py FOLDER (script | module | command) NAME [ARGS...]``; standard
library only, so that it costs nothing and reads nothing of ours. ``FOLDER/settings`` says what else
was asked for.

[Note: inside the process, not around it] A parent that reads the script's stderr would take its
terminal away (no live progress bar) and could only guess where a traceback begins. So the script
runs in this very process; its output goes straight where the launcher's goes, and only an uncaught
exception is written down, for the launcher to show the first one once instead of each rank's copy.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # spelt like this, it needs no import of typing
    from collections.abc import Mapping

__all__: list[str] = []

# What the documents call torch's variables: hosts are CROSS, processes of one host LOCAL.
_ALSO_NAMED = {
    "LOCAL_SIZE": "LOCAL_WORLD_SIZE",
    "CROSS_RANK": "GROUP_RANK",
    "CROSS_SIZE": "GROUP_WORLD_SIZE",
}


def main() -> None:
    """Prepare the process as ``python SCRIPT ARGS`` would and run the script."""
    safe = getattr(sys.flags, "safe_path", False)
    if not safe:
        sys.path.pop(0)  # this file's folder, before anything is imported from it by mistake
    import faulthandler
    import os
    import runpy

    folder, kind, name, *arguments = sys.argv[1:]
    prefix = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['LOCAL_RANK']}"
    _end_with(os.getppid())
    start = {"pid": os.getpid(), "session": os.getsid(0), "rank": int(os.environ["RANK"])}
    _write(os.path.join(folder, f"{prefix}.start"), start)
    for documented, own in _ALSO_NAMED.items():
        os.environ[documented] = os.environ[own]
    arguments = _settle(os.path.join(folder, "settings"), arguments)
    if kind == "command":
        _become(name, arguments)
    faulthandler.enable()  # a crash in compiled code shows its Python stack
    # Whole lines at once: where processes share a pipe, `python -u` (PYTHONUNBUFFERED) would mix
    # their words.
    options = {"write_through": False} if os.environ["LOCAL_WORLD_SIZE"] != "1" else {}
    getattr(sys.stdout, "reconfigure", lambda **_: None)(line_buffering=True, **options)

    sys.argv = [name, *arguments]
    if kind == "script":
        name = os.path.abspath(name)  # what `__file__` is, as under Python itself
    try:
        if kind == "module":
            if not safe:
                sys.path.insert(0, os.getcwd())
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            if not safe:
                sys.path.insert(0, os.path.dirname(os.path.realpath(name)))
            runpy.run_path(name, run_name="__main__")
    except BaseException as error:
        if os.getpid() == start["pid"]:  # not a child that the script forked
            _leave_word(
                os.path.join(folder, f"{prefix}.error"), error, name if kind == "script" else None
            )
        raise


def _settle(path: str, arguments: list[str]) -> list[str]:
    """Do what the launcher wants of each process besides the script; returns the script's
    arguments.
    """
    import json
    import os

    with open(path, encoding="utf-8") as stream:
        settings = json.load(stream)
    local_rank = int(os.environ["LOCAL_RANK"])
    if settings["logs"]:
        log = os.open(
            f"{settings['logs']}_rank{os.environ['RANK']}.log",
            os.O_WRONLY | os.O_CREAT | os.O_APPEND,
            0o666,
        )
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    if settings["cores"]:
        os.sched_setaffinity(0, settings["cores"][local_rank])
    return [f"--local_rank={local_rank}", *arguments] if settings["local_rank"] else arguments


def _become(name: str, arguments: list[str]) -> None:
    """Run a program that is not Python's in place of this process."""
    import os

    try:
        os.execvp(name, [name, *arguments])
    except OSError as error:
        sys.exit(f"{name}: {error.strerror}")


def _leave_word(path: str, error: BaseException, script: str | None) -> None:
    """Write the exception down and keep Python from printing it; exit codes stay Python's own."""
    import signal
    import time
    import traceback

    at = time.monotonic()
    if isinstance(error, SystemExit):  # Python prints its text, if it has one, and says no more
        number = isinstance(error.code, int)
        if error.code not in (None, 0):
            text = "" if number else str(error.code)
            _write(
                path,
                {"time": at, "code": error.code if number else 1, "error": text, "traceback": ""},
            )
        return
    inner = error.__traceback__
    while inner is not None and _is_ours(inner.tb_frame.f_code.co_filename, script):
        inner = inner.tb_next
    error.__traceback__ = inner
    observer = None
    hook = sys.excepthook
    # ds_core's: tells observers, then calls who had the hook before it
    while hasattr(hook, "before"):
        observer, hook = hook, hook.before
    own = hook is not sys.__excepthook__ and not str(getattr(hook, "__module__", "")).startswith(
        "torch."
    )
    # a SyntaxError begins with its place, notes follow
    lines = traceback.format_exception_only(type(error), error)
    facts = {
        "time": at,
        "code": -int(signal.SIGINT) if isinstance(error, KeyboardInterrupt) else 1,
        "error": next(line for line in lines if line[:1] != " ").strip(),
        "traceback": "" if own else "".join(traceback.format_exception(type(error), error, inner)),
    }
    shown = _write(path, facts) and not own

    def last(kind: type[BaseException], value: BaseException, _: object) -> None:
        if not shown:
            hook(kind, value.with_traceback(inner), inner)

    if observer is None:
        sys.excepthook = last
    else:
        observer.before = last


def _is_ours(filename: str, script: str | None) -> bool:
    """Whether a frame belongs to this file or to runpy rather than to the script."""
    import runpy

    return filename != script and filename in (__file__, runpy.__file__, "<frozen runpy>")


def _write(path: str, facts: Mapping[str, object]) -> bool:
    """Put `facts` at `path`, whole; False when that cannot be done (the launcher and its folder are
    gone).
    """
    import json
    import os

    try:
        with open(path + ".new", "w", encoding="utf-8", errors="backslashreplace") as stream:
            json.dump(facts, stream)
        os.replace(path + ".new", path)
    except OSError:
        return False
    return True


def _end_with(parent: int) -> None:
    """Ask Linux to end this process when the launcher is killed in a way that leaves it no time to
    do so.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes
    import os
    import signal

    set_death_signal = 1  # PR_SET_PDEATHSIG
    try:
        ctypes.CDLL(None).prctl(set_death_signal, int(signal.SIGTERM), 0, 0, 0)
    except (OSError, AttributeError):  # a libc without prctl: the launcher's own care has to do
        return
    if os.getppid() != parent:
        sys.exit(143)


if __name__ == "__main__":
    main()
