"""``dscore plugins upgrade``: sources of plugins get the names of today."""

from __future__ import annotations

import pytest
from ds_cli.plugins.upgrade import rewritten


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "from ds_cli.show import CommandError\n",
            "from ds_command_kit.show import CommandError\n",
        ),
        ("import ds_cli.hosts.hostfile\n", "import ds_command_kit.hosts.hostfile\n"),
        (
            "from ds_cli.hosts.elastic_store import store_here\n",
            "from ds_launcher_ssh.elastic_store import store_here\n",
        ),
        ("from ds_testing.hosts import Lab\n", "from ds_testing_hosts.lab import Lab\n"),
        (
            "from ds_testing.partitioner import whole_weights\n",
            "from ds_testing.truth import whole_weights\n",
        ),
        # A name that moved twice gets its last place at once.
        ("from ds_core.cli.show import say_error\n", "from ds_command_kit.show import say_error\n"),
        # Names that only begin alike, and ds_cli itself, stay.
        ("import ds_cli.shown, ds_cli\n", "import ds_cli.shown, ds_cli\n"),
        ("from ds_testing import run_ranks\n", "from ds_testing import run_ranks\n"),
    ],
)
def test_names_that_have_moved(old: str, new: str) -> None:
    assert rewritten(old) == new
    assert rewritten(new) == new


def test_texts_that_are_no_code_follow() -> None:
    line = "load = ds_cli.run_options:RunOption"
    assert rewritten(line, code=False) == "load = ds_command_kit.run_options:RunOption"
