"""``dscore new plugin NAME --kind KIND``: check the words, write the files, say what comes next."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from ds_command_kit.app import OpenGroup
from ds_command_kit.show import CommandError

from ds_core.errors import nearest
from ds_new.kinds import KINDS

app = typer.Typer(
    cls=OpenGroup,
    help="Write something new from a template.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def _group() -> None:
    """Keep ``plugin`` a command of its own, while it is the only one."""


@app.command()
def plugin(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]",
            help="What pip will call it, such as my-lines; without it the kinds are listed.",
        ),
    ] = "",
    kind: Annotated[
        str, typer.Option(help="What it is; without it the kinds are listed.", metavar="KIND")
    ] = "",
    folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The folder to make. Default: ./NAME.")
    ] = None,
) -> None:
    """Write a new plugin: a distribution that can be installed, and whose tests pass, as it is.

    Exit codes:
      0: the plugin is written, or the kinds are listed
      2: wrong usage, such as a folder that is there already

    Examples:
      dscore new plugin
      dscore new plugin my-lines --kind monitor
      dscore new plugin my-lines --kind monitor --folder plugins/my-lines
    """
    from ds_new.naming import names_of
    from ds_new.rendering import render

    if not name and not kind:
        typer.echo(_which(""))
        return
    if kind not in KINDS:
        raise CommandError(_which(kind))
    if not name:
        raise CommandError(f"give a name too, as in `dscore new plugin my-{kind} --kind {kind}`")
    names = names_of(name, kind)
    target = Path(names.name) if folder is None else folder
    # For `exists` a dangling link is not there, but it is in the way too.
    if target.exists() or target.is_symlink():
        raise CommandError(
            f"{target} is there already, and nothing is overwritten; give another --folder"
        )
    for path, text in render(kind, names).items():
        file = target / path
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise CommandError(f"cannot write {file}: {error.strerror}") from error
        typer.echo(f"  {file}")
    where = shlex.quote(str(target))
    typer.echo(
        f"\n{names.name}, {KINDS[kind].meaning}."
        " Next, with DS_CORE=a clone of ds_core after `make wheels`:\n"
        f'  pip install -c "$DS_CORE/dist/constraints.txt" -e {where}\n'
        f"  dscore run {where}/example/train.py\n"
        f'  pip install -c "$DS_CORE/dist/constraints.txt" -e {shlex.quote(f"{target}[test]")}\n'
        f"  pytest {where}"
    )


def _which(kind: str) -> str:
    """What there is to choose from, and which name is like `kind`."""
    close = nearest(kind, KINDS) if kind else None
    said = f"there is no kind {kind!r}" if kind else "give a name and a --kind"
    guess = f"; did you mean {close!r}?" if close else ""
    wide = max(map(len, KINDS))
    rows = "\n".join(f"  {name:<{wide}}  {row.meaning}" for name, row in sorted(KINDS.items()))
    how = "\nas in: dscore new plugin my-lines --kind monitor"
    return f"{said}{guess or ';'} {'The' if guess else 'the'} kinds are:\n{rows}{how}"
