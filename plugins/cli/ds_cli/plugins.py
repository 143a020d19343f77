"""``dscore plugins``: what is installed, what it provides and how it stands (no torch)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds_cli.show import other_output_to_stderr, show_json, show_list

if TYPE_CHECKING:
    from ds_core.plugins import Report

__all__ = ["plugins", "provides"]

# What a hook makes of its plugin; hooks that only watch or check are no kind of their own.
_KINDS = {
    "ds_accelerators": "accelerator",
    "ds_kernels": "kernel",
    "ds_rendezvous": "rendezvous",
    "ds_optimizers": "optimizer",
    "ds_schedulers": "scheduler",
    "ds_state_stores": "state store",
    "ds_monitors": "monitor",
    "ds_mesh": "mesh",
    "ds_mesh_axes": "mesh axis",
    "ds_transforms": "transform",
    "ds_param_axes": "param axes",
    "ds_partitioner": "partitioner",
    "ds_runner": "runner",
    "ds_step_begin": "observer",
    "ds_step_end": "observer",
    "ds_checkpointables": "checkpoint",
    "ds_checkpointer": "checkpointer",
    "ds_launchers": "launcher",
    "ds_commands": "command",
    "ds_charts": "chart",
}


def plugins(as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False) -> None:
    """Show every installed plugin: what it provides, its state and why."""
    from ds_core.plugins import Plugins

    with other_output_to_stderr():
        rows = [_row(report) for report in Plugins().examine()]
    if as_json:
        show_json(rows)
        return
    show_list([_line(row) for row in sorted(rows, key=_trouble)])


def provides(report: Report) -> list[str]:
    """The section it owns and the kinds of things it offers."""
    from ds_core.plugins import SECTIONS

    section = [f"section {report.found.name}"] if report.found.group == SECTIONS else []
    return [*section, *dict.fromkeys(_KINDS[hook] for hook in report.hooks if hook in _KINDS)]


def _trouble(row: dict[str, Any]) -> int:
    """What is wrong first, then what has something said of it, then the rest."""
    return 0 if row["state"] == "quarantined" else 1 if row["why"] else 2


def _line(row: dict[str, Any]) -> tuple[str, str, str]:
    what = f": {', '.join(row['provides'])}" if row["provides"] else ""
    return row["state"], f"{row['name']} ({row['distribution']} {row['version']}){what}", row["why"]


def _row(report: Report) -> dict[str, Any]:
    found = report.found
    return {
        "name": found.name,
        "distribution": found.dist,
        "version": found.version,
        "group": found.group,
        "module": found.module,
        "provides": provides(report),
        "hooks": list(report.hooks),
        "state": report.state.value,
        "why": report.why,
    }
