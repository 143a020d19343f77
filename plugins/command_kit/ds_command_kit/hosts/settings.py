"""What travels to the agent of each host, and the agent's command (torch-free).

It is one line of base64 (the `LaunchRequest`, the working folder, the variables to set), on the
agent's standard input, in a variable or, where a tool has neither, as an argument. The first two
keep it out of `ps` and of logs.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ds_command_kit.hosts.hostfile import Host
from ds_command_kit.show import CommandError

if TYPE_CHECKING:
    from ds_command_kit.launch import LaunchRequest

SETTINGS = "DSCORE_AGENT"
LONGEST = 16 << 20  # bytes of settings, packed or not
# What the documents send to every host, the accelerators' own, and ours. Not what only holds on one
# machine.
_PREFIXES = (
    "MLFLOW",
    "PYTHON",
    "MV2",
    "UCX",
    "NCCL",
    "GLOO",
    "CCL_",
    "TORCH_",
    "DS_",
    "DEEPSPEED_",
    "LD_LIBRARY_PATH",
)
_NAMES = ("PATH", "OMP_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class FromVariable:
    """An agent's number is in this variable of its environment, put there by the tool that starts
    it.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Settings:
    """What an agent is given."""

    request: LaunchRequest
    folder: str
    variables: Mapping[str, str]


def agent_command(
    request: LaunchRequest,
    number: int | str | FromVariable,
    *,
    settings: Literal["stdin", "variable", "argument"] = "stdin",
    lifeline: bool | Literal["end"] = False,
) -> list[str]:
    """What to run on a host. Its folder may be any; the same Python must be at the same path.

    number: the host's, from 0; a text is one that the tool replaces (pdsh's "%n").
    settings: how they reach the agent.
    lifeline: its standard input stays open as long as the launcher lives, with a line break every
        few seconds; "end": with nothing.
    """
    words = [sys.executable, "-m", "ds_cli.multi_host.agent"]
    words += (
        ["--number-from", number.name]
        if isinstance(number, FromVariable)
        else ["--number", str(number)]
    )
    words += (
        ["--settings", _pack(request)] if settings == "argument" else [f"--settings-by-{settings}"]
    )
    return [*words, "--lifeline", "end" if lifeline == "end" else "beats"] if lifeline else words


def settings_line(request: LaunchRequest) -> bytes:
    """What an agent with ``settings="stdin"`` reads first."""
    return _pack(request).encode() + b"\n"


def settings_variable(request: LaunchRequest) -> tuple[str, str]:
    """Name and value of the variable that an agent with ``settings="variable"`` reads, and
    removes."""
    return SETTINGS, _pack(request)


def _pack(request: LaunchRequest) -> str:
    fields = {f.name: getattr(request, f.name) for f in dataclasses.fields(request)}
    fields |= {
        "hosts": [[h.name, h.slots] for h in request.hosts],
        "launcher_args": (),
        "exported": (),
        "show": False,
    }
    said = {"request": fields, "folder": os.getcwd(), "variables": dict(request.exported)}
    return base64.b64encode(zlib.compress(json.dumps(said).encode())).decode()


def read_settings(text: str | bytes) -> Settings:
    """The settings of `settings_line`; raises CommandError for anything else."""
    from ds_command_kit.launch import LaunchRequest

    def thaw(value: Any) -> Any:
        return tuple(map(thaw, value)) if isinstance(value, list) else value

    try:
        unpack = zlib.decompressobj()
        said = json.loads(unpack.decompress(base64.b64decode(text, validate=True), LONGEST))
        fields = {name: thaw(value) for name, value in said["request"].items()}
        fields["hosts"] = tuple(Host(*row) for row in fields["hosts"])
        return Settings(LaunchRequest(**fields), said["folder"], said["variables"])
    except (ValueError, TypeError, KeyError, zlib.error) as error:
        raise CommandError(
            "what this agent was given is not what `dscore run` of the same version sends "
            f"({error}); is one dscore-cli "
            "installed on all hosts?"
        ) from error


# -- the environment -------------------------------------------------------------------------------


def exported(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables for every host: those of `environment` with the documented prefixes, then those
    of the env files.

    The files are ``.deepspeed_env`` in the home and in the working folder (the latter wins), or
    what DS_ENV_FILE names. Raises CommandError for a line that is not ``KEY=VALUE``.
    """
    found = {n: v for n, v in environment.items() if n.startswith(_PREFIXES) or n in _NAMES}
    found.pop("DS_ENV_FILE", None)
    name = environment.get("DS_ENV_FILE", "")
    files = [Path(folder, name or ".deepspeed_env") for folder in (Path.home(), Path.cwd())]
    files = [file for file in dict.fromkeys(files) if file.is_file()]
    if name and not files:
        raise CommandError(
            f"DS_ENV_FILE is {name!r}, and there is no such file in {Path.home()} or {Path.cwd()}"
        )
    for file in files:
        found |= _read_env_file(file)
    return tuple(sorted(found.items()))


def _read_env_file(file: Path) -> dict[str, str]:
    found = {}
    for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        name = name.strip().removeprefix("export ").strip()
        if not equals or not name.isidentifier():
            # without its text: it may be a secret
            raise CommandError(f"{file}, line {number} is not KEY=VALUE")
        found[name] = value.strip()
    return found
