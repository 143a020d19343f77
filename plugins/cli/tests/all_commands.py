"""Every command that is installed, with its help, for tests that go over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from ds_cli.plugin import ds_commands
from ds_command_kit.app import make_app
from ds_command_kit.help import render, split


def contexts() -> dict[str, Any]:
    """ "config check" -> the context of that command; of groups too, and "" for ``dscore``."""
    root = typer.main.get_command(make_app(ds_commands()))
    return dict(_below(root.make_context("dscore", [], resilient_parsing=True), root))


def _below(ctx: Any, group: Any) -> Iterator[tuple[str, Any]]:
    yield ctx.command_path.removeprefix("dscore").strip(), ctx
    for name in group.list_commands(ctx) if hasattr(group, "list_commands") else ():
        _, command, _ = group.resolve_command(ctx, [name])
        below = command.context_class(command, info_name=name, parent=ctx)
        yield from _below(below, command)


def helps() -> dict[str, str]:
    """The whole help of each command, as ``-h`` prints it."""
    return {name: render(ctx) for name, ctx in contexts().items()}


def sections(ctx: Any) -> dict[str, list[str]]:
    """The exit codes and examples of a command's docstring."""
    return split(ctx.command.help or "")[1]
