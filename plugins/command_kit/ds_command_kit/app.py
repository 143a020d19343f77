"""The commands of ``dscore`` and how they are found: by the hook ``ds_commands``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ds_command_kit.help import HelpContext, with_help
from ds_command_kit.show import CommandError, other_output_to_stderr, say_error
from ds_core.entries import resolve
from ds_core.errors import DSError, UsageError, nearest

if TYPE_CHECKING:
    from ds_core.entries import CommandEntry
    from ds_core.plugins.calls import Answer

# click's, or that of the copy which newer typers bring
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class Group(TyperGroup):
    """Every command comes from a plugin, and is imported only when it is run."""

    context_class = HelpContext
    own: Mapping[str, CommandEntry] = MappingProxyType({})
    """Commands that need no search, by name: of the package whose program this is."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """The command is called dscore, whoever starts it."""
        return super().make_context("dscore", args, parent, **extra)

    @functools.cached_property
    def offers(self) -> dict[str, list[Answer]]:
        """The commands of all plugins; every plugin is asked once."""
        return _offers()

    def list_commands(self, ctx: Any) -> list[str]:
        """The own commands in their order, then the other plugins' by name.

        One that a group has too is listed there alone.
        """
        grouped = {row.value.load for n, rows in self.offers.items() if " " in n for row in rows}
        others = (
            n
            for n, rows in sorted(self.offers.items())
            if n not in self.own and " " not in n and rows[0].value.load not in grouped
        )
        return [*self.own, *others]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """``dscore help run`` is ``dscore run --help``."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in that carries the command's help line; `resolve_command` imports the command
        itself.
        """
        if (own := self.own.get(cmd_name)) is not None:
            return _stand_in(cmd_name, own.help)
        return _offered(cmd_name, self.offers.get(cmd_name))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find what is to be run and import it now."""
        try:
            name, _, rest = super().resolve_command(ctx, args)
        except _UsageError as error:
            error.message = _no_command(args[0], (*self.own, *self.offers))  # type: ignore[attr-defined]
            raise
        assert name is not None
        return name, self.imported(name), rest

    def imported(self, name: str) -> Any:
        """The command itself, which is imported now."""
        if (own := self.own.get(name)) is not None:
            return _command(name, own, resolve(own.load))
        return _load(name, self.offers[name])

    def invoke(self, ctx: Any) -> Any:
        """Run a command; an error of ours is one message, never a traceback."""
        try:
            return super().invoke(ctx)
        except DSError as error:
            say_error(str(error))
            wrong_usage = isinstance(error, (CommandError, UsageError))
            raise typer.Exit(2 if wrong_usage else 1) from None


class OpenGroup(TyperGroup):
    """A group that other packages add to: ``ds_commands`` names their command "config migrate".

    Its own come first.
    """

    context_class = HelpContext

    @functools.cached_property
    def offers(self) -> dict[str, list[Answer]]:
        """Name inside this group -> who offers it."""
        prefix = f"{self.name} "
        return {
            n.removeprefix(prefix): rows for n, rows in _offers().items() if n.startswith(prefix)
        }

    def list_commands(self, ctx: Any) -> list[str]:
        """Those of the group, then the other plugins' by name."""
        own = super().list_commands(ctx)
        return [*own, *(n for n in sorted(self.offers) if n not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command; of another plugin's its help line, until it is run."""
        own = super().get_command(ctx, cmd_name)
        return _offered(cmd_name, self.offers.get(cmd_name)) if own is None else own

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find what is to be run and import it now."""
        try:
            name, command, rest = super().resolve_command(ctx, args)
        except _UsageError as error:
            known = [f"{self.name} {name}" for name in self.list_commands(ctx)]
            error.message = _no_command(f"{self.name} {args[0]}", known)  # type: ignore[attr-defined]
            raise
        foreign = super().get_command(ctx, str(name)) is None
        return name, _load(str(name), self.offers[str(name)]) if foreign else command, rest


def find_command(name: str) -> Any:
    """The click command that ``dscore NAME`` runs, for tools that read its words.

    Raises CommandError where no installed package brings it.
    """
    group: Group = typer.main.get_command(make_app())  # type: ignore[assignment]
    if name not in group.offers:
        raise CommandError(_no_command(name, group.offers))
    return group.imported(name)


def make_app(own: Mapping[str, CommandEntry] = MappingProxyType({})) -> typer.Typer:
    """The whole command.

    own: commands that need no search, and are listed first.
    """
    app = typer.Typer(
        cls=type("Group", (Group,), {"own": own}),
        help="Distributed training whose every feature is a pip package.",
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    app.callback()(_global_options)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from ds_core import __version__

        typer.echo(f"dscore-train {__version__}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def _offers() -> dict[str, list[Answer]]:
    """Command name -> who offers it.

    A plugin that cannot say what it offers takes only itself down.
    """
    from ds_core.plugins import Plugins
    from ds_core.plugins.calls import Answer

    offers: dict[str, list[Answer]] = {}
    with other_output_to_stderr():
        plugins = Plugins()
        plugins.probe_all()
        # `dscore doctor` tells of who cannot say; all others must work
        for answer in plugins.offers("ds_commands"):
            for name, entry in answer.value.items():
                offers.setdefault(name, []).append(Answer(answer.plugin, entry))
    return offers


def _no_command(name: str, known: Iterable[str]) -> str:
    """That there is no such command, and what was meant or brings it."""
    group, _, word = name.rpartition(" ")
    words = [n.removeprefix(f"{group} ") for n in known if n.rpartition(" ")[0] == group]
    close = nearest(word, words)
    meant = f" Did you mean {close!r}?" if close else ""
    listed = "" if close else f" `dscore{group and ' ' + group} --help` lists the commands."
    return f"No such command {word!r}.{meant}{_why_not(name) or listed}"


def _why_not(name: str) -> str:
    """What to add to "no such command": who offers it, or whose commands could not be asked for."""
    from ds_core.catalogue import missing, offered_by
    from ds_core.plugins import Plugins

    if offered_by("commands", name) is not None:
        return f" The {missing('commands', name)}."
    with other_output_to_stderr():
        plugins = Plugins()
        plugins.probe_all()
        plugins.offers("ds_commands")
    return plugins.quarantined()


def _offered(name: str, rows: list[Answer] | None) -> Any:
    """What shows a plugin's command in a list; None without one."""
    if not rows:
        return None
    return _stand_in(
        name, rows[0].value.help if len(rows) == 1 else f"offered by {_both(rows)}: disable one"
    )


def _stand_in(name: str, text: str) -> Any:
    holder = typer.Typer(add_completion=False)

    @holder.command(name, help=text)
    def _nothing() -> None:
        pass

    return typer.main.get_command(holder)


def _load(name: str, rows: list[Answer]) -> Any:
    from ds_core.errors import PluginError

    if len(rows) > 1:
        raise PluginError(
            f"the command {name!r} is offered by {_both(rows)}; uninstall one of them"
        )
    entry: CommandEntry = rows[0].value
    found = rows[0].resolve(entry.load, f"the command {name!r}, which it offers by ds_commands")
    if not isinstance(found, typer.Typer) and not callable(found):
        raise PluginError(
            f"the command {name!r} of plugin {rows[0].plugin}: {entry.load} is not a function"
        )
    return _command(name, entry, found)


def _command(name: str, entry: CommandEntry, found: Any) -> Any:
    """The command of a function or ``typer.Typer``."""
    if not isinstance(found, typer.Typer):
        holder = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        holder.command(name, help=inspect.getdoc(found) or entry.help or None)(found)
        found = holder
    command = typer.main.get_command(found)
    command.name = name
    return with_help(command)


def _both(rows: list[Answer]) -> str:
    return " and ".join(row.plugin.owner for row in rows)
