"""The conformance kit for commands: subclass `CommandConformance` and name your plugin.

Needs dscore-cli.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from ds_core.entries import CommandEntry, resolve

LIST = """
import contextlib, json, sys
sys.path[:0] = json.loads(sys.argv[1])
from ds_command_kit.app import make_app
with contextlib.suppress(SystemExit):
    make_app()([*sys.argv[3:], "--help"])
print("\\0" + json.dumps(sorted({"torch", *json.loads(sys.argv[2])} & set(sys.modules))))
"""


class CommandConformance:
    """Inherit, and set `plugin` to the reference of your declaration module, which is installed.

    ``class TestMine(CommandConformance)``: the name must start with Test. Add tests of what they
    do, with `run`.
    """

    plugin: str = ""

    def commands(self) -> dict[str, CommandEntry]:
        """What the plugin offers, by name."""
        found: Mapping[str, CommandEntry] = resolve(self.plugin).ds_commands()
        assert found, f"{self.plugin}.ds_commands offers no command"
        return dict(found)

    def run(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """``dscore WORDS`` in a process of its own; it must end with `status`."""
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "200"}
        command = [sys.executable, "-m", "ds_cli", *words]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        said = f"{done.stdout}\n{done.stderr}"
        assert done.returncode == status, (
            f"dscore {' '.join(words)} ended with {done.returncode}, not {status}: {said}"
        )
        return done

    def test_each_is_listed_before_it_is_imported(self) -> None:
        """``dscore --help`` shows the name and the help line, and imports neither the command nor
        torch.
        """
        for name, entry in self.commands().items():
            *group, last = name.split(" ")
            module = entry.load.partition(":")[0]
            command = [
                sys.executable,
                "-c",
                LIST,
                json.dumps(sys.path),
                json.dumps([module]),
                *group,
            ]
            environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200"}
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=120, check=False
            )
            shown, _, imported = done.stdout.rpartition("\0")
            assert last in shown.split(), (
                f"dscore --help does not list {name}; is the plugin installed?\n{done.stderr}"
            )
            loaded = ", ".join(json.loads(imported))
            assert not loaded, (
                f"to list {name}, {loaded} was imported; import it inside the command's function"
            )

    def test_each_has_a_line_of_help(self) -> None:
        """`CommandEntry.help` is one line of at most 80 characters, for the list."""
        for name, entry in self.commands().items():
            assert entry.help.strip(), (
                f"{name} has no help; give CommandEntry(..., help='What it does.')"
            )
            assert len(entry.help) <= 80 and "\n" not in entry.help, (
                f"{name}: the help must be a line of 80 at most"
            )

    def test_each_explains_itself(self) -> None:
        """``--help`` ends with 0 and shows the options."""
        for name in self.commands():
            assert "--help" in self.run(*name.split(" "), "--help").stdout

    def test_a_wrong_option_is_refused(self) -> None:
        """An unknown option ends with 2 and a message, not with a traceback."""
        for name in self.commands():
            done = self.run(*name.split(" "), "--no-such-option-anywhere", status=2)
            if "Traceback" in done.stderr:
                pytest.fail(f"dscore {name} shows a traceback for a wrong option: {done.stderr}")
