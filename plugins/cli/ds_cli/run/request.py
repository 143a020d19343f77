"""From the words of ``dscore run`` to a `LaunchRequest` that does not name its hosts yet."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ds_command_kit.launch import LaunchRequest, parse_nodes, parse_nproc
from ds_command_kit.show import CommandError, say_error

from ds_cli.local.cores import parse_cores
from ds_cli.run.launchers import check_program, check_script

ALIKE = (
    "script",
    "max_restarts",
    "rdzv_endpoint",
    "rdzv_id",
    "master_addr",
    "master_port",
    "tag",
    "grace",
    "notice",
    "local_rank",
    "venv_script",
    "save_pid",
    "ssh_port",
    "show",
)
"""The options that a `LaunchRequest` has under their names, as they were given."""


def check_words(given: Mapping[str, Any]) -> None:
    """Raises CommandError for options that contradict each other, and for a script that is not
    there.

    given: the values of the options of ``dscore run``, by name.
    """
    if given["no_python"] and given["module"]:
        raise CommandError("--no-python and --module contradict each other; give one of them")
    if given["world"] is not None and given["nproc"] != "auto":
        raise CommandError(
            "--world is the processes in all, --nproc those of each host; give one of them"
        )
    if given["tag"] and given["each_rank_log"]:
        raise CommandError(
            "--tag and --enable-each-rank-log are two ways to tell ranks apart; give one of them"
        )
    if given["no_python"]:
        # The script that is sourced first may put the program on the PATH.
        if not given["venv_script"]:
            check_program(given["script"])
    elif not given["module"]:
        check_script(given["script"], given["arguments"] or ())


def read_request(given: Mapping[str, Any]) -> LaunchRequest:
    """What the options say of the processes. Raises CommandError.

    given: the values of the options of ``dscore run``, by name.
    """
    check_words(given)
    fewest, most = _elastic(
        parse_nodes(given["nnodes"]),
        given["elastic_training"],
        given["min_elastic_nodes"],
        given["max_elastic_nodes"],
    )
    level: int = getattr(logging, given["log_level"].upper())
    if given["no_ssh_check"] and level <= logging.INFO and not given["quiet"]:
        say_error("--no-ssh-check has no effect: hosts are not tried before they are used")
    return LaunchRequest(
        **{name: given[name] for name in ALIKE},
        arguments=tuple(given["arguments"] or ()),
        is_module=given["module"],
        nproc=parse_nproc(given["nproc"]),
        min_nodes=fewest,
        max_nodes=most,
        node_rank=None if given["node_rank"] == -1 else given["node_rank"],
        is_command=given["no_python"],
        log_folder=given["each_rank_log"],
        bind=given["bind_cores"],
        cores=tuple(parse_cores(given["core_list"])) if given["core_list"] else (),
        level=max(logging.ERROR, level) if given["quiet"] else level,
        launcher_args=_split(given["launcher_args"]),
    )


def apply_settings(texts: Sequence[str], *, quiet: bool) -> None:
    """Set the variable by which ``--set`` reaches the processes, and say so. Raises CommandError."""
    from ds_command_kit.overrides import describe, read_settings, variables_for

    settings = read_settings(texts)
    os.environ.update(variables_for(settings))
    if not quiet:
        say_error(f"--set replaces keys of the script's config: {describe(settings)}")


def _split(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise CommandError(f"--launcher-args {text!r}: {error}") from error


def _elastic(nodes: tuple[int, int], wanted: bool, fewest: int, most: int) -> tuple[int, int]:
    """The bounds on hosts; (0, 0): not told.

    ``--elastic-training`` without a most: MIN:0, all hosts.
    """
    if not wanted:
        if fewest != -1 or most != -1:
            raise CommandError(
                "--min-elastic-nodes and --max-elastic-nodes need --elastic-training"
            )
        return nodes
    low = max(fewest, 1)
    high = max(most, 0) or nodes[1]
    if high and low > high:
        raise CommandError(f"--min-elastic-nodes {low} is more than {high}, the most")
    return low, high
