"""``dscore plugins``: what is installed, what it offers and how it stands; what brings a plugin
forward (no torch).
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from ds_command_kit.app import OpenGroup
from ds_command_kit.show import (
    CommandError,
    other_output_to_stderr,
    show_json,
    show_table,
    terminal_width,
)

from ds_cli.plugins.upgrade import upgrade

if TYPE_CHECKING:
    from ds_core.plugins import Plugins
    from ds_core.plugins.discovery import Report

KINDS = {
    "ds_config_formats": "config format",
    "ds_accelerators": "accelerator",
    "ds_kernels": "kernel",
    "ds_collectives": "collectives",
    "ds_rendezvous": "rendezvous",
    "ds_optimizers": "optimizer",
    "ds_schedulers": "scheduler",
    "ds_monitors": "monitor",
    "ds_metrics": "metrics",
    "ds_listens": "observer",
    "ds_batch": "batch sizes",
    "ds_mesh": "mesh",
    "ds_mesh_axes": "mesh axis",
    "ds_param_axes": "param axes",
    "ds_interceptors": "interceptor",
    "ds_transforms": "transform",
    "ds_precision": "precision",
    "ds_partitioner": "partitioner",
    "ds_runner": "runner",
    "ds_loader": "loader",
    "ds_gradients": "gradients",
    "ds_engine_methods": "engine methods",
    "ds_open": "acts at the start",
    "ds_compile_passes": "compile pass",
    "ds_pipeline_schedules": "pipeline schedule",
    "ds_checkpointables": "checkpointed state",
    "ds_checkpointer": "checkpointer",
    "ds_launchers": "launcher",
    "ds_commands": "command",
    "ds_run_options": "option of dscore run",
    "ds_charts": "chart",
    "ds_memory": "memory",
    "ds_planners": "planner",
    "ds_check": "check",
}
"""What a hook of the core, or of one of our kits, makes of its plugin; for others see `_kind`."""


class _Group(OpenGroup):
    """``dscore plugins NAME`` is ``dscore plugins show NAME``, and without a name all are shown."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the word ``show`` where no command is named."""
        if args not in (["--help"], ["-h"]) and (
            not args or self.get_command(ctx, args[0]) is None
        ):
            args = ["show", *args]
        return super().parse_args(ctx, args)


def make_app() -> typer.Typer:
    """The group ``dscore plugins``."""
    app = typer.Typer(
        cls=_Group,
        help="Show every installed plugin, or all about one; rewrite your plugin's old names.",
        add_completion=False,
    )
    app.command("show")(show)
    app.command("upgrade")(upgrade)
    return app


def show(
    name: Annotated[
        str,
        typer.Argument(metavar="[NAME]", help="Of a plugin or a distribution: all about it."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Show every installed plugin: what it offers by which names, its state and why.

    Exit codes:
      0: the list is shown
      2: no such plugin is installed

    Examples:
      dscore plugins
      dscore plugins dscore-zero
      dscore plugins show --json
    """
    from ds_core.plugins import Plugins
    from ds_core.plugins.discovery import offers

    with other_output_to_stderr():
        known = Plugins()
        reports = known.examine()
        offered = offers()
        if name:
            rows = [_details(known, report, offered) for report in _named(name, reports)]
        else:
            rows = [_row(known, report, offered) for report in reports]
    if as_json:
        show_json(rows)
    elif name:
        typer.echo("\n\n".join(map(_described, rows)))
    else:
        show_table(("package", "state", "offers"), _table(rows), fold=True)


def _named(name: str, reports: list[Report]) -> list[Report]:
    """The plugins of this name, or of this distribution."""
    found = [r for r in reports if name in (r.found.name, r.found.dist)]
    if not found:
        from ds_core.catalogue import missing, offered_by
        from ds_core.errors import did_you_mean

        names = sorted({n for r in reports for n in (r.found.name, r.found.dist)})
        if offered_by("sections", name):
            raise CommandError(str(missing("sections", name, names)))
        close = did_you_mean(name, names, "see `dscore plugins`")
        if parts := [repr(n) for n in names if name in n][:4]:
            close = f"did you mean {' or '.join(parts)}?"
        raise CommandError(f"no plugin or distribution {name!r} is installed; {close}")
    return found


def _offers(known: Plugins, report: Report, offered: Collection[str]) -> dict[str, list[str]]:
    """Kind -> the names that the plugin offers; none where names depend on a config, or it has
    none.

    offered: the hooks that say what a plugin offers.
    """
    from ds_core.plugins.discovery import PluginState

    found: dict[str, list[str]] = (
        {"section": [report.found.name]} if report.found.owns_section else {}
    )
    for hook in (hook for hook in report.hooks if hook != "ds_config"):
        names = found.setdefault(_kind(hook, offered=hook in offered), [])
        if hook in offered and report.state is PluginState.LOADED:
            names += _names(known.ask_one(hook, report.found))
    return found


def _kind(hook: str, *, offered: bool) -> str:
    """What `hook` makes of its plugin.

    offered: whether the hook says what the plugin offers. Kits, also of others, define such hooks;
        their names are plural: ``ds_state_stores`` makes it a state store.
    """
    if hook in KINDS:
        return KINDS[hook]
    return hook.removeprefix("ds_").removesuffix("s").replace("_", " ") if offered else "observer"


def _names(answer: Any) -> list[str]:
    """The names in what a hook without arguments gave: a mapping's keys, or those of entries."""
    if isinstance(answer, Mapping):
        return list(answer)
    if not isinstance(answer, tuple):  # a rendezvous, or none
        return list(getattr(answer, "variables", ()))
    return list(dict.fromkeys(getattr(entry, "op", None) or entry.name for entry in answer))


def _trouble(row: dict[str, Any]) -> int:
    """What is wrong first, then what has something said of it, then the rest."""
    return 0 if row["state"] == "quarantined" else 1 if row["why"] else 2


def _table(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """A line for each distribution and state: (package, state, what its plugins offer, and why they
    do not).
    """
    packages: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda r: (_trouble(r), r["distribution"])):
        package = f"{row['distribution']} {row['version']}"
        packages.setdefault((package, row["state"]), []).append(row)
    for (package, state), plugins in packages.items():
        offers: dict[str, dict[str, None]] = {}
        for row in plugins:
            for kind, names in row["offers"].items():
                offers.setdefault(kind, {}).update(dict.fromkeys(names))
        what = "; ".join(f"{kind} {', '.join(names)}".strip() for kind, names in offers.items())
        whys = [f"{row['name']}: {row['why']}" for row in plugins if row["why"]]
        yield package, state, "\n".join(filter(None, [what, *whys]))


def _row(known: Plugins, report: Report, offered: Collection[str]) -> dict[str, Any]:
    found = report.found
    return {
        "name": found.name,
        "distribution": found.dist,
        "version": found.version,
        "group": found.group,
        "module": found.module,
        "offers": _offers(known, report, offered),
        "hooks": list(report.hooks),
        "state": report.state.value,
        "why": report.why,
    }


def _details(known: Plugins, report: Report, offered: Collection[str]) -> dict[str, Any]:
    """`_row`, and the file, the requirements and the keys of the section."""
    from ds_core.plugins.discovery import PluginState

    row = _row(known, report, offered)
    row["file"] = _file(report.found.module)
    row["requires"] = _requirements(report.found.dist)
    if report.state is PluginState.LOADED and report.found.owns_section:
        from ds_cli.config.explanation import explain

        owner = report.found.owner
        section = report.found.name
        models = {section: (known.model(report.found), owner)}
        found = (
            (key, explain(f"{section}.{key}", models)) for key, _ in explain(section, models).keys
        )
        row["keys"] = {
            key: {"type": one.type, "default": one.default, "description": one.description}
            for key, one in found
        }
    return row


def _file(module: str) -> str:
    """Where a declaration module lies, though it may fail to import; "" where there is none."""
    import importlib.util

    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # a package on the way to it fails
        return ""
    return (spec.origin if spec is not None else "") or ""


def _requirements(dist: str) -> list[str]:
    import importlib_metadata

    try:
        return [r for r in importlib_metadata.requires(dist) or () if "extra ==" not in r]
    except importlib_metadata.PackageNotFoundError:
        return []


def _described(row: dict[str, Any]) -> str:
    """A plugin's details as lines, one of a kind."""
    said = [
        f"{row['name']} ({row['distribution']} {row['version']}): {row['state']}",
        *([f"  {row['why']}"] if row["why"] else []),
        f"  entry point: {row['name']} = {row['module']} ({row['group']})",
        f"  file: {row['file'] or 'not found'}",
        f"  requires: {', '.join(row['requires']) or 'nothing'}",
        f"  hooks: {', '.join(row['hooks']) or 'none'}",
        *(f"  {kind}: {', '.join(names)}" for kind, names in row["offers"].items() if names),
    ]
    lines = [line for text in said for line in _folded(text)]
    for key, one in row.get("keys", {}).items():
        # The keys of an object have defaults of their own.
        default = "those of its keys" if one["default"].startswith("{") else one["default"]
        lines += _folded(f"    {row['name']}.{key}: {one['type']}, default {default}")
        lines += _folded(f"        {one['description']}") if one["description"] else []
    return "\n".join(lines)


def _folded(text: str) -> list[str]:
    """A line, folded between words; what is folded is indented more."""
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(
        text.strip(),
        terminal_width(),
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


app = make_app()
