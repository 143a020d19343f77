"""Pages whose commands are played: their files are written, their commands run in order, and the
output that the page shows is that of the commands.

A `diff` block holds two whole files: the one of its line ``---`` and the one of ``+++``.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ds_testing.processes import clean_environment, free_port
from pages import DOCS, blocks

PAGES = (
    DOCS / "tutorials" / "train-my-script.md",
    DOCS / "fine-tune.md",
    DOCS / "moving-from-torch.md",
    DOCS / "moving-from-accelerate.md",
    DOCS / "moving-from-lightning.md",
)
FRONTENDS = "no-run: make test-frontends runs it"
"""What marks a block that needs the front-ends."""

CONSOLE = re.compile(r"```console(?P<note> [^\n]+)?\n(?P<text>.*?)```", re.DOTALL)
MODULES = {
    "python": [],
    "dscore": ["-m", "ds_cli"],
    "torchrun": ["-m", "torch.distributed.run"],
    "accelerate": ["-m", "accelerate.commands.accelerate_cli"],
}
PORT = "8000"
"""Of the server that a page starts; another one is used."""


def both_files(diff: str) -> dict[str, str]:
    """The files before and after."""
    before, after, *lines = diff.splitlines()
    assert before.startswith("--- ") and after.startswith("+++ "), diff
    return {
        header.split()[1]: "".join(f"{line[1:]}\n" for line in lines if line[:1] not in left_out)
        for header, left_out in ((before, ("+",)), (after, ("-",)))
    }


def files(page: Path) -> Iterator[tuple[str, str]]:
    """The files that a page tells its reader to write: name and text."""
    for block in blocks(page):
        if block.language == "diff":
            yield from both_files(block.text).items()
        elif block.file:
            yield block.file, block.text
        elif block.language == "json" and not block.left_out:
            yield "ds_config.json", block.text


def played(page: Path, folder: Path, *, frontends: bool = False) -> str:
    """The page with the output that its commands have in `folder`, one after the other.

    frontends: those that need the front-ends, too.
    """
    port = str(free_port())
    servers: list[subprocess.Popen[str]] = []

    def play(found: re.Match[str]) -> str:
        if (found["note"] or "").strip() not in ("", FRONTENDS if frontends else ""):
            return found[0]
        lines = []
        for command in re.findall(r"^\$ (.+)$", found["text"], re.MULTILINE):
            said = told(command.replace(PORT, port), folder, servers)
            lines += [f"$ {command}", *said.replace(port, PORT).rstrip("\n").splitlines()]
        return f"```console{found['note'] or ''}\n" + "\n".join(lines) + "\n```"

    for name, text in files(page):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace(PORT, port))
    try:
        return CONSOLE.sub(play, page.read_text("utf-8"))
    finally:
        for server in servers:
            server.terminate()
            server.communicate(timeout=60)  # closes its pipe, too


def told(command: str, folder: Path, servers: list[subprocess.Popen[str]]) -> str:
    """What a command prints, without its log; of one in the background (``&``), its first line."""
    program, *arguments = shlex.split(command)
    words = (
        [sys.executable, *MODULES[program], *arguments]
        if program in MODULES
        else [program, *arguments]
    )
    env = clean_environment(HF_HUB_OFFLINE="1", DS_ACCELERATOR="cpu")
    if words[-1] == "&":
        server = subprocess.Popen(
            words[:-1], cwd=folder, env=env, stdout=subprocess.PIPE, text=True
        )
        servers.append(server)
        assert server.stdout
        return server.stdout.readline()
    done = subprocess.run(
        words, check=False, cwd=folder, env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def masked(text: str) -> str:
    """`text` without digits, which other processors round otherwise, and without random names."""
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", re.sub(r"cmpl-[0-9a-f]+", "cmpl-", text))
