"""``dscore doctor``: looks at everything a run needs and says, for each fault, what fixes it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from ds_cli.show import other_output_to_stderr, show_json, show_list

__all__ = ["doctor"]


def doctor(as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False) -> None:
    """Check python, torch, the accelerator, compilers, kernels and plugins; exits with 1 when a run would fail."""
    from ds_cli.checks import examine

    with other_output_to_stderr():
        findings = examine()
    broken = [f for f in findings if f.level == "fault"]
    if as_json:
        show_json([asdict(f) for f in findings])
    else:
        order = ("fault", "note", "ok")
        ranked = sorted(findings, key=lambda f: order.index(f.level))
        show_list([(f.level, f"{f.part}: {f.found}", f"-> {f.fix}" if f.fix else "") for f in ranked])
        typer.echo(f"{len(broken)} fault{'' if len(broken) == 1 else 's'}" if broken else "nothing is broken")
    if broken:
        raise typer.Exit(1)
