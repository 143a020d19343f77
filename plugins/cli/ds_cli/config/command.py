"""``dscore config``: check a file, print the schema of everything installed, explain one key (no
torch).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from ds_command_kit.config_code import Imports, look_at
from ds_command_kit.show import CommandError, other_output_to_stderr, say_error, show_json

from ds_cli.config.init import init

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import Batch, ConfigSource
    from ds_core.setup.compose import Composition


def make_app() -> typer.Typer:
    """The group ``dscore config``."""
    from ds_command_kit.app import OpenGroup

    app = typer.Typer(
        cls=OpenGroup,
        help="Check and explain configs.",
        no_args_is_help=True,
        add_completion=False,
    )
    app.command("check")(check)
    app.command("init")(init)
    app.command("schema")(schema)
    app.command("explain")(explain)
    return app


File = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A .json, .hjson, .yaml or .toml config.")
]
World = Annotated[
    int | None,
    typer.Option(
        "--world",
        min=1,
        metavar="N",
        help="Check the batch sizes and the mesh too, for this number of processes.",
    ),
]
Auto = Annotated[
    bool,
    typer.Option(
        "--auto/--no-auto",
        help='Accept "auto", which a frontend such as the Trainer fills in.',
    ),
]


def check(
    file: File,
    world: World = None,
    auto: Auto = True,
    imports: Imports = False,
) -> None:
    """Check a config as training would, before any process starts; prints every problem.

    Notes name keys without effect, and defaults that are not torch's.

    Exit codes:
      0: training would accept the config
      1: it would not, and stdout says why

    Examples:
      dscore config check ds_config.json
      dscore config check ds_config.json --world 8
      dscore config check ds_config.json --no-auto
    """
    from ds_cli.config.batch import check_batch, check_given
    from ds_cli.config.defaults import defaults_unlike_torch
    from ds_cli.config.problems import with_every_problem
    from ds_core.errors import ConfigError
    from ds_core.setup.compose import compose

    def compose_batch(source: ConfigSource) -> tuple[Composition, Batch | None]:
        chosen = compose(source, fill_later=auto)
        return chosen, check_batch(chosen, world)

    try:
        chosen, batch = with_every_problem(compose_batch, look_at(file, imports))
        check_given(chosen)
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(f"{file}: {problem}")
        raise typer.Exit(1) from None
    typer.echo(f"{file}: ok")
    if world is not None and batch is not None:
        ranks = batch.train // (batch.micro * batch.gas)
        typer.echo(
            f"  on {world} processes: train_batch_size {batch.train} = micro-batch {batch.micro} "
            f"x accumulation {batch.gas} x {ranks} data-parallel rank{'' if ranks == 1 else 's'}"
        )
    for name in chosen.config.sections:
        owner = chosen.plugins.section(name)
        typer.echo(f"  {name}: {owner.owner}" if owner else f"  {name}")
    for note in (*_read_as_hjson(file), *chosen.notes, *defaults_unlike_torch(chosen.config.raw)):
        typer.echo(f"  note: {note}")
    if autos := chosen.config.autos:
        typer.echo(
            '  "auto", filled in by the Trainer, Accelerate or another frontend: '
            f"{', '.join(autos)}"
        )
        typer.echo("  training without one refuses it")


def _read_as_hjson(file: Path) -> Iterator[str]:
    """What to say of a .json file that is no JSON: without hjson it cannot be read."""
    if file.suffix.lower() not in ("", ".json"):
        return
    try:
        json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        yield (
            f"read as hjson, since it is not valid JSON ({error}); without "
            "dscore-config-formats it cannot be read"
        )


def schema() -> None:
    """Print the JSON Schema of the core and of every installed plugin's section.

    Exit codes:
      0: the schema is printed

    Examples:
      dscore config schema > ds_config.schema.json
    """
    from ds_cli.config.schema import json_schema

    show_json(json_schema(_installed_models()))


def explain(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="A dotted path such as fp16.loss_scale.")
    ],
) -> None:
    """Say what a key does, its type, its default and who owns it; of a section, its keys too.

    Exit codes:
      0: the key is explained
      2: there is no such key, or several that end so

    Examples:
      dscore config explain zero_optimization
      dscore config explain fp16.loss_scale
      dscore config explain optimizer.params.lr
    """
    from ds_cli.config.explanation import explain as look_up
    from ds_core.errors import ConfigError

    try:
        said = look_up(key, _installed_models(), _named_models() if ".params." in key else None)
    except ConfigError as error:
        raise CommandError(str(error)) from error
    typer.echo(said.path)
    if said.description:
        typer.echo(f"  {said.description}")
    default = "those of its keys" if said.keys and said.default.startswith("{") else said.default
    for label, value in (("type", said.type), ("default", default), ("owner", said.owner)):
        typer.echo(f"  {label + ':':<9}{value}")
    for name, about in said.keys:
        typer.echo(f"    {name}: {about}" if about else f"    {name}")


def _installed_models() -> dict[str, tuple[type[BaseModel], str]]:
    """The model of every installed section; a broken one is named on stderr and left out."""
    from ds_core.errors import PluginError
    from ds_core.plugins import Plugins

    models: dict[str, tuple[type[BaseModel], str]] = {}
    with other_output_to_stderr():
        plugins = Plugins()
        for name in plugins.sections():
            try:
                models.update(plugins.models([name]))
            except PluginError as error:
                say_error(f"left out: {error}")
    return models


def _named_models() -> dict[str, dict[str, tuple[type[BaseModel], str]]]:
    """``optimizer`` and ``scheduler`` -> name -> the model of its parameters and its owner, as
    installed.
    """
    from ds_core.entries import resolve
    from ds_core.errors import PluginError
    from ds_core.plugins import Plugins

    plugins = Plugins()
    found: dict[str, dict[str, tuple[type[BaseModel], str]]] = {}
    for kind, hook in (("optimizer", "ds_optimizers"), ("scheduler", "ds_schedulers")):
        found[kind] = {}
        for name, answer in plugins.named(hook, kind).items():
            if answer.value.params is None:
                continue
            try:
                model = resolve(answer.value.params)
            except PluginError as error:
                say_error(f"left out: {error}")
                continue
            found[kind][name] = (model, answer.plugin.owner)
    return found


app = make_app()
