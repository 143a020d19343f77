"""The command-line arguments of DeepSpeed scripts."""

from __future__ import annotations

import argparse
from typing import Any

from ds_deepspeed_compat.arguments import add_config_arguments


def test_the_config_file_is_named_on_the_command_line() -> None:
    parser = add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json"])
    assert (args.deepspeed, args.deepspeed_config) == (True, "x.json")


def test_deprecated_flags_warn(caplog: Any) -> None:
    args = add_config_arguments(argparse.ArgumentParser()).parse_args(
        ["--deepscale", "--deepscale_config", "x.json"]
    )
    assert (args.deepspeed, args.deepspeed_config) == (True, "x.json")
    assert caplog.text.count("deprecated") == 2
