"""Options of ``dscore run`` that plugins bring (hook ``ds_run_options``), torch-free."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from ds_command_kit.run_options import RunOption
from ds_command_kit.show import CommandError
from typer.core import TyperCommand

from ds_core.catalogue import install, offered_by
from ds_core.errors import PluginError
from ds_core.plugins import Plugins

if TYPE_CHECKING:
    from ds_core.plugins import Answer

WORDS = "ds_cli.run.words"


class RunCommand(TyperCommand):
    """The command ``run``. It keeps the words as they were given.

    Plugins are asked for their options when a word is not an option of its own, or for the help:
    most runs need none.
    function: what it calls, with its own options alone.
    """

    function: Callable[..., None]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse with the options of plugins where the own ones do not do."""
        ctx.meta[WORDS] = list(args)
        try:
            return super().parse_args(ctx, list(args))
        except Exception as error:
            if getattr(error, "option_name", None) is None:
                raise
        self._extend()
        try:
            return super().parse_args(ctx, list(args))
        except Exception as error:
            name = getattr(error, "option_name", None)
            if name is not None and (why := _missing(str(name).replace("_", "-"))):
                raise CommandError(why) from None
            raise

    def prepare_help(self) -> None:
        """Take the options of all plugins."""
        self._extend()

    def _extend(self) -> None:
        holder = typer.Typer(add_completion=False)
        holder.command()(with_options(self.function))
        full = typer.main.get_command(holder)
        self.params = full.params
        self.callback = full.callback


def with_options(run: Callable[..., None]) -> Callable[..., None]:
    """The command's function with the options of plugins, which are applied before it is called."""
    own = inspect.signature(run, eval_str=True)
    plugins = Plugins()
    plugins.probe_all()
    offered = plugins.named("ds_run_options", "run_options")
    parameters = {}
    for name, answer in sorted(offered.items()):
        given = name.lstrip("-").replace("-", "_")
        if given in own.parameters:
            raise PluginError(
                f"ds_run_options: plugin {answer.plugin} gives {name}, which `dscore run` has "
                "itself"
            )
        parameters[given] = _parameter(given, name, answer.value)

    @functools.wraps(run)
    def command(ctx: typer.Context, **given: Any) -> None:
        theirs = {"--" + name.replace("_", "-"): given.pop(name) for name in parameters}
        _apply(
            {name: value for name, value in theirs.items() if value},
            offered,
            ctx,
            given["arguments"] or (),
        )
        run(ctx, **given)

    signature = own.replace(parameters=[*own.parameters.values(), *parameters.values()])
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
    return command


def _parameter(given: str, name: str, option: RunOption) -> inspect.Parameter:
    takes = bool(option.metavar or option.choices)
    said = (option.metavar or "|".join(option.choices)) if takes else None
    return inspect.Parameter(
        given,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default="" if takes else False,
        annotation=Annotated[
            str if takes else bool,
            typer.Option(name, help=option.help, metavar=said, rich_help_panel=option.panel),
        ],
    )


def _missing(name: str) -> str:
    """Which package brings the option `name`; "" where none of ours does."""
    dist = offered_by("run_options", name)
    return f"{name} needs {dist}, which is not installed: {install(dist)}" if dist else ""


def _apply(
    given: Mapping[str, Any], offered: Mapping[str, Answer], ctx: Any, arguments: Sequence[str]
) -> None:
    """Do what the options of plugins say: set variables for the processes, or end with an exit
    code.
    """
    for name, value in given.items():
        answer = offered[name]
        option: RunOption = answer.value
        if option.choices and value not in option.choices:
            raise CommandError(f"{name} {value!r}: it is one of {', '.join(option.choices)}")
        function: Callable[..., Any] = answer.resolve(
            option.load, f"the option {name} of dscore run"
        )
        said = function(
            value, _without(ctx.meta[WORDS], 1 + len(arguments), name, flag=value is True)
        )
        if isinstance(said, int):
            raise typer.Exit(said)
        if not isinstance(said, Mapping):
            raise PluginError(
                f"the option {name} of plugin {answer.plugin}: {option.load} gave {said!r}; it "
                "must give variables by "
                "name, or an exit code"
            )
        os.environ.update(said)


def _without(words: list[str], after: int, name: str, *, flag: bool) -> list[str]:
    """The words without the option `name`; the last `after` words are the script's own, whatever
    they say.
    """
    options = words[: len(words) - after]
    own = words[len(words) - after :]
    kept = []
    while options:
        word = options.pop(0)
        spelt = word.partition("=")[0].replace("_", "-")
        if spelt != name:
            kept.append(word)
        elif not flag and "=" not in word:
            del options[:1]
    return [*kept, *own]
