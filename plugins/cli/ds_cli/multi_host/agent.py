"""What a launcher starts on each host: ``python -m ds_cli.multi_host.agent``.

See `agent_command` for its words.

It takes its settings, becomes host NUMBER of the run, and does what the local launcher does. It
ends with the exit code of the run, the same on all hosts.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import select
import signal
import sys
import threading
import time

from ds_command_kit.hosts.settings import LONGEST, SETTINGS, Settings, read_settings
from ds_command_kit.launch import LaunchRequest
from ds_command_kit.show import CommandError, say_error

from ds_cli.run.launchers import check_script
from ds_core.errors import DSError

SILENCE_SECONDS = 20.0  # a launcher that has said nothing for so long is gone


def main() -> None:
    """Run as one host's agent."""
    # where a login begins; it is not ours to import from
    if sys.path and sys.path[0] in ("", os.getcwd()):
        sys.path.pop(0)
    try:
        code = _run(_words())
    except (DSError, OSError) as error:  # the latter: no room for a file, perhaps
        here = f"host {os.uname().nodename}"
        say_error(str(error) if here in str(error) else f"{here}: {error}")
        code = 2 if isinstance(error, CommandError) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread may still wait for an answer of a store that is gone


def _words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ds_cli.multi_host.agent", description=__doc__)
    number = parser.add_mutually_exclusive_group(required=True)
    number.add_argument("--number", type=int)
    number.add_argument("--number-from", metavar="VARIABLE")
    settings = parser.add_mutually_exclusive_group(required=True)
    settings.add_argument("--settings")
    settings.add_argument("--settings-by-stdin", action="store_true")
    settings.add_argument("--settings-by-variable", action="store_true")
    parser.add_argument("--lifeline", choices=("beats", "end"))
    return parser.parse_args()


def _run(words: argparse.Namespace) -> int:
    lifeline, settings = _take(words)
    for name, value in settings.variables.items():
        os.environ[name] = value
    sys.path[:0] = [
        folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder
    ]
    number = words.number if words.number is not None else _number(words.number_from)
    request = on_host(settings.request, number)
    if words.lifeline:
        silence = SILENCE_SECONDS if words.lifeline == "beats" else float("inf")
        threading.Thread(
            target=_watch, args=(lifeline, silence), name="dscore-lifeline", daemon=True
        ).start()
    from ds_cli.local.launcher import launch

    return launch(request, _problem(request, settings.folder))


def _problem(request: LaunchRequest, folder: str) -> str:
    """Go to the folder of the launcher; what keeps this host from running the script, or ""."""
    here = f"host {os.uname().nodename}"
    try:
        os.chdir(folder)
        if not request.is_module and not request.is_command:
            check_script(request.script)
    except OSError as error:
        return (
            f"{here} has no {folder!r}, where the launcher runs ({error.strerror}); files are "
            "not "
            "copied to hosts"
        )
    except CommandError as error:
        return f"{here}: {error}; files are not copied to hosts"
    return ""


def on_host(request: LaunchRequest, number: int) -> LaunchRequest:
    """The part of `request` that is for host `number`.

    Raises CommandError where there is no such host.
    """
    count = request.max_nodes
    if not 0 <= number < count:
        raise CommandError(
            f"this is host {number} of {count}: the tool that starts hosts has started too many"
        )
    own = request.hosts[number] if request.hosts else None
    slots = own.slots if own is not None and own.slots is not None else request.slots
    return dataclasses.replace(
        request,
        node_rank=None if request.rdzv_endpoint else number,
        slots=slots,
        nproc=len(slots) if slots is not None else request.nproc,
        master_addr=request.master_addr or (request.hosts[0].address if request.hosts else ""),
    )


def _number(variable: str) -> int:
    value = os.environ.get(variable, "")
    if not value.isascii() or not value.isdigit():
        raise CommandError(f"{variable}, which tells the number of this host, is {value!r}")
    return int(value)


def _take(words: argparse.Namespace) -> tuple[int, Settings]:
    """What stays of the standard input, and the settings; what the ranks get as theirs is empty."""
    line: str | bytes = words.settings or os.environ.pop(SETTINGS, "")
    if words.settings_by_stdin:
        line = _read_line(0)
    if words.settings_by_stdin or words.lifeline:
        lifeline = os.dup(0)
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)
    else:
        lifeline = 0
    return lifeline, read_settings(line)


def _read_line(descriptor: int) -> bytes:
    """Byte for byte by large reads: a launcher sends nothing but line breaks after the settings."""
    line = b""
    while b"\n" not in line and len(line) < LONGEST:
        more = os.read(descriptor, 1 << 16)
        if not more:
            break
        line += more
    return line.strip()


def _watch(lifeline: int, silence: float) -> None:
    """End this process and its ranks when the launcher is gone; what is said then, nobody hears."""
    heard = time.monotonic()
    while time.monotonic() < heard + silence:
        if select.select([lifeline], [], [], 1.0)[0]:
            if not os.read(lifeline, 4096):
                break
            heard = time.monotonic()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nowhere, output)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
