"""The commands of ``dscore`` and how they are found: the core's own here, plugins' by the hook `ds_commands`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ds_core.cli.show import CommandError, other_output_to_stderr, say_error
from ds_core.errors import DSError

if TYPE_CHECKING:
    from ds_core.entries import CommandEntry
    from ds_core.plugins import Answer

__all__ = ["Group", "make_app"]

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # click's, or that of the copy which newer typers bring


class Group(TyperGroup):
    """The core's commands, then those of plugins; a plugin's command is imported only when it is run."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The core's commands in their order, then the plugins' by name."""
        return [*self.commands, *(n for n in sorted(_offers()) if n not in self.commands)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command itself when it is the core's, else a stand-in that carries its help line."""
        own = self.commands.get(cmd_name)
        if own is not None:
            return own
        rows = _offers().get(cmd_name)
        return _stand_in(cmd_name, rows) if rows else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find what is to be run and, if a plugin offers it, import it now."""
        try:
            name, command, rest = super().resolve_command(ctx, args)
        except _UsageError as error:
            error.message += _why_not(args[0])  # type: ignore[attr-defined]
            raise
        if name is not None and name not in self.commands:
            command = _load(name, _offers()[name])
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run a command; an error of ours is one message, never a traceback."""
        try:
            return super().invoke(ctx)
        except DSError as error:
            say_error(str(error))
            raise typer.Exit(2 if isinstance(error, CommandError) else 1) from None


def make_app() -> typer.Typer:
    """The whole command. Its parts are imported only as far as the words on the command line need them."""
    app = typer.Typer(
        cls=Group,
        help="Distributed training whose every feature is a pip package.",
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode="rich" if sys.stdout.isatty() else None,
        pretty_exceptions_enable=False,
    )
    from ds_core.cli import checkpoint, config, doctor, plugins, run

    app.callback()(_global_options)
    # Options may be spelt with underscores too, as in the documents.
    either = {"allow_interspersed_args": False, "token_normalize_func": lambda name: name.replace("_", "-")}
    app.command("run", context_settings=either)(run.run)
    app.command("plugins")(plugins.plugins)
    app.command("doctor")(doctor.doctor)
    app.add_typer(config.make_app(), name="config")
    app.add_typer(checkpoint.make_app(), name="checkpoint")
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from ds_core._version import __version__

        typer.echo(f"ds-core {__version__}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _offers() -> dict[str, list[Answer]]:
    """Command name -> who offers it. A plugin that cannot say what it offers takes only itself down."""
    from ds_core.plugins import Answer, Plugins

    offers: dict[str, list[Answer]] = {}
    with other_output_to_stderr():
        plugins = Plugins()
        plugins.probe_all()
        for answer in plugins.offers("ds_commands"):  # `dscore doctor` tells of who cannot say; all others must work
            for name, entry in answer.value.items():
                offers.setdefault(name, []).append(Answer(answer.plugin, entry))
    return offers


def _why_not(name: str) -> str:
    """What to add to "no such command": who offers it, or whose commands could not be asked for."""
    from ds_core.catalogue import install, offered_by
    from ds_core.plugins import Plugins

    if (dist := offered_by("commands", name)) is not None:
        return f" It comes with {dist}, which is not installed: {install(dist)}."
    with other_output_to_stderr():
        plugins = Plugins()
        plugins.probe_all()
        plugins.offers("ds_commands")
    return plugins.quarantined()


def _stand_in(name: str, rows: list[Answer]) -> Any:
    entry: CommandEntry = rows[0].value
    text = entry.help if len(rows) == 1 else f"offered by {_both(rows)}: disable one"
    holder = typer.Typer(add_completion=False)

    @holder.command(name, help=text)
    def _nothing() -> None:
        pass

    return typer.main.get_command(holder)


def _load(name: str, rows: list[Answer]) -> Any:
    from ds_core.errors import PluginError

    if len(rows) > 1:
        raise PluginError(f"the command {name!r} is offered by {_both(rows)}; uninstall one of them")
    entry: CommandEntry = rows[0].value
    found = rows[0].resolve(entry.load, f"the command {name!r}, which it offers by ds_commands")
    if not isinstance(found, typer.Typer):
        if not callable(found):
            raise PluginError(f"the command {name!r} of plugin {rows[0].plugin}: {entry.load} is not a function")
        holder = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        holder.command(name, help=entry.help or None)(found)
        found = holder
    command = typer.main.get_command(found)
    command.name = name
    return command


def _both(rows: list[Answer]) -> str:
    return " and ".join(f"{row.plugin.dist} {row.plugin.version}" for row in rows)
