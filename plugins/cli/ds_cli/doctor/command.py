"""``dscore doctor``: looks at everything a run needs and says, for each fault, what fixes it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from ds_command_kit.show import CommandError, other_output_to_stderr, show_json, show_list

if TYPE_CHECKING:
    from ds_cli.doctor.checks import Finding


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a Markdown file for a bug report, without secrets; - prints.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="CONFIG", help="With --report: the config that was used.")
    ] = None,
    hostfile: Annotated[
        str,
        typer.Option(
            "--hostfile",
            "-H",
            metavar="FILE",
            help="Examine the hosts of FILE and their links instead.",
        ),
    ] = "",
    include: Annotated[
        str, typer.Option("--include", "-i", help="With --hostfile: only these hosts.")
    ] = "",
    exclude: Annotated[
        str, typer.Option("--exclude", "-e", help="With --hostfile: not these hosts.")
    ] = "",
    ssh_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="With --hostfile: of the ssh servers.")
    ] = None,
    master_port: Annotated[
        int, typer.Option(min=1, max=65535, help="With --hostfile: the run's --master-port.")
    ] = 29500,
) -> None:
    """Check python, torch, the accelerator, compilers, kernels and plugins; exits with 1 when a run
    would fail.

    With --hostfile: reach each host over ssh, compare versions and clocks, measure latency and
    bandwidth of each link.
    """
    if hostfile:
        if report is not None:
            raise CommandError("--report is about this machine; leave out --hostfile")
        _hosts(hostfile, include, exclude, ssh_port, master_port, as_json)
        return
    if include or exclude or ssh_port is not None:
        raise CommandError("--include, --exclude and --ssh-port need --hostfile")
    _this_host(report, config, as_json)


def _this_host(report: Path | None, config: Path | None, as_json: bool) -> None:
    """Examine this host, and print what was found or write a report of it."""
    from ds_cli.doctor.checks import examine

    if config is not None and report is None:
        raise CommandError(
            "--config goes into a report; give --report FILE too, or use `dscore config check`"
        )
    if as_json and report is not None:
        raise CommandError("--json and --report are two forms of one thing; give one of them")
    with other_output_to_stderr():
        findings = examine()
        text = _report(findings, config) if report is not None else ""
    # A report is needed most from a broken installation, so writing one is a success.
    if report is not None:
        _write(report, text)
        return
    if as_json:
        show_json([asdict(f) for f in findings])
    else:
        _show(findings)
    if any(f.level == "fault" for f in findings):
        raise typer.Exit(1)


def _show(findings: list[Finding]) -> None:
    """Print a list, the worst first, and how many faults there are."""
    order = ("fault", "note", "ok")
    ranked = sorted(findings, key=lambda f: order.index(f.level))
    show_list([(f.level, f"{f.part}: {f.found}", f"-> {f.fix}" if f.fix else "") for f in ranked])
    faults = sum(f.level == "fault" for f in findings)
    plural = "" if faults == 1 else "s"
    typer.echo(f"{faults} fault{plural}" if faults else "nothing is broken")


def _hosts(
    hostfile: str, include: str, exclude: str, ssh_port: int | None, port: int, as_json: bool
) -> None:
    from ds_cli.doctor.host_doctor import by_ssh, examine_hosts, show_hosts
    from ds_cli.run.host_choice import Choice, choose_hosts

    hosts = choose_hosts(Choice(hostfile, include, exclude))
    if not hosts:
        raise CommandError(f"there is no hostfile {hostfile!r}")
    show_hosts(examine_hosts(hosts, by_ssh(ssh_port), port), as_json)


def _report(findings: list[Finding], config: Path | None) -> str:
    from ds_cli.doctor.bug_report import report

    if config is not None and not config.is_file():
        raise CommandError(f"--config: no such file: {str(config)!r}")
    return report(findings, config)


def _write(file: Path, text: str) -> None:
    if str(file) == "-":
        typer.echo(text, nl=False)
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--report {str(file)!r}: {error.strerror}") from error
    typer.echo(
        f"{file}: {len(text.splitlines())} lines; secrets are removed, but look it over before you "
        "send it"
    )
