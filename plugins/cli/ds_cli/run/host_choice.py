"""From the words of ``dscore run`` to the hosts that it starts on (torch-free, unless accelerators
must be counted).
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from ds_command_kit.hosts.addresses import is_here
from ds_command_kit.hosts.hostfile import DEFAULT, Host, filter_hosts, read_hostfile
from ds_command_kit.show import CommandError

log = logging.getLogger("ds_cli")


@dataclass(frozen=True, slots=True)
class Choice:
    """The words that choose hosts.

    count: the most hosts, nproc: of processes on each; 0 and None: not told.
    """

    hostfile: str = ""
    include: str = ""
    exclude: str = ""
    count: int = 0
    nproc: int | None = None


def choose_hosts(words: Choice) -> tuple[Host, ...]:
    """The hosts of the hostfile that the words leave, in its order; () without a hostfile.

    Raises CommandError for words that do not go together, or leave nothing.
    """
    if (words.count or words.nproc is not None) and (words.include or words.exclude):
        raise CommandError(
            "--nnodes and --nproc (--num_nodes, --num_gpus) do not go together with --include, "
            "--exclude"
        )
    try:
        if words.hostfile and not os.path.isfile(words.hostfile) and os.path.exists(words.hostfile):
            # /dev/null is how scripts ask for this machine alone.
            log.warning(
                "the hostfile %r is no regular file; the run is on this machine alone",
                words.hostfile,
            )
            return ()
        found = read_hostfile(words.hostfile or DEFAULT)
        if found is None:
            if words.hostfile not in ("", DEFAULT):
                raise CommandError(
                    f"there is no hostfile {words.hostfile!r}; without one, leave out --hostfile"
                )
            return ()
        slots = {name: list(range(count)) for name, count in found.items()}
        chosen = filter_hosts(slots, words.include, words.exclude)
    except OSError as error:
        raise CommandError(
            f"the hostfile {words.hostfile or DEFAULT!r} cannot be read: {error.strerror}"
        ) from error
    except ValueError as error:
        raise CommandError(str(error)) from error
    if not chosen:
        raise CommandError("--exclude leaves no host")
    if words.count > len(chosen):
        raise CommandError(f"{words.count} hosts are asked for, but the hostfile has {len(chosen)}")
    rows = list(chosen.items())[: words.count or None]
    if words.nproc is not None:
        for name, slots_there in rows:
            if words.nproc > len(slots_there):
                raise CommandError(
                    f"--nproc {words.nproc}, but host {name!r} has {len(slots_there)} slots"
                )
        rows = [(name, slots_there[: words.nproc]) for name, slots_there in rows]
    return tuple(Host(name, tuple(slots_there)) for name, slots_there in rows)


def slots_here(include: str, exclude: str) -> tuple[int, ...] | None:
    """What the filters leave of this machine's accelerators, where there is no hostfile; None
    without filters.
    """
    if not include and not exclude:
        return None
    from ds_core.accelerator import select_accelerator
    from ds_core.plugins import Plugins

    name = next(
        (part.partition(":")[0] for part in (include or exclude).split("@") if part), "localhost"
    )
    if not is_here(name):
        raise CommandError(
            f"host {name!r} is not known; without a hostfile there is only this machine, localhost"
        )
    slots = list(range(max(1, select_accelerator(Plugins()).device_count())))
    try:
        left = filter_hosts({name: slots}, include, exclude)
    except ValueError as error:
        raise CommandError(str(error)) from error
    if not left:
        raise CommandError("--exclude leaves no accelerator")
    return tuple(left[name])
