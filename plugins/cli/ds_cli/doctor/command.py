"""``dscore doctor``: looks at everything a run needs and says, for each fault, what fixes it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from ds_command_kit.show import (
    CommandError,
    check_file,
    other_output_to_stderr,
    show_json,
    show_list,
)

if TYPE_CHECKING:
    from ds_cli.doctor.checks import Finding

HOSTS = "Several hosts"
SERVED = "served by "


AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show every kernel and its providers.")
]
Report = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write a Markdown file for a bug report, without secrets; - prints.",
    ),
]
Config = Annotated[
    Path | None, typer.Option(metavar="CONFIG", help="With --report: the config that was used.")
]
Hostfile = Annotated[
    str,
    typer.Option(
        "--hostfile",
        "-H",
        metavar="FILE",
        rich_help_panel=HOSTS,
        help="Examine the hosts of FILE and their links instead.",
    ),
]
Include = Annotated[
    str,
    typer.Option(
        "--include", "-i", metavar="HOSTS", rich_help_panel=HOSTS, help="Only these hosts."
    ),
]
Exclude = Annotated[
    str,
    typer.Option(
        "--exclude", "-e", metavar="HOSTS", rich_help_panel=HOSTS, help="Not these hosts."
    ),
]
SshPort = Annotated[
    int | None,
    typer.Option(
        min=1, max=65535, metavar="PORT", rich_help_panel=HOSTS, help="Of the ssh servers."
    ),
]
MasterPort = Annotated[
    int,
    typer.Option(
        min=1, max=65535, metavar="PORT", rich_help_panel=HOSTS, help="The run's --master-port."
    ),
]


def doctor(
    as_json: AsJson = False,
    verbose: Verbose = False,
    report: Report = None,
    config: Config = None,
    hostfile: Hostfile = "",
    include: Include = "",
    exclude: Exclude = "",
    ssh_port: SshPort = None,
    master_port: MasterPort = 29500,
) -> None:
    """Check python, torch, the accelerator, compilers, kernels and plugins.

    With --hostfile: reach each host over ssh, compare versions and clocks, measure latency and
    bandwidth of each link.

    Exit codes:
      0: nothing is broken, or the report is written
      1: a run would fail

    Examples:
      dscore doctor
      dscore doctor --report bug.md --config ds_config.json
      dscore doctor --hostfile hosts
    """
    if hostfile:
        if report is not None:
            raise CommandError("--report is about this machine; leave out --hostfile")
        _hosts(hostfile, include, exclude, ssh_port, master_port, as_json)
        return
    if include or exclude or ssh_port is not None:
        raise CommandError("--include, --exclude and --ssh-port need --hostfile")
    _this_host(report, config, as_json, verbose)


def _this_host(report: Path | None, config: Path | None, as_json: bool, verbose: bool) -> None:
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
        _show(findings if verbose else _kernels_in_one(findings))
    if any(f.level == "fault" for f in findings):
        raise typer.Exit(1)


def _kernels_in_one(findings: list[Finding]) -> list[Finding]:
    """The findings, in which kernels that are served are one line, by who serves them."""
    from ds_cli.doctor.checks import Finding

    served = [f for f in findings if f.part.startswith("kernel ") and f.found.startswith(SERVED)]
    if not served:
        return findings
    by = Counter(f.found.removeprefix(SERVED).partition(" on ")[0] for f in served)
    words = ", ".join(f"{count} by {who}" for who, count in by.most_common())
    one = Finding("kernels", "ok", f"{len(served)} served: {words}; see --verbose")
    kept = [f for f in findings if f not in served]
    at = findings.index(served[0])
    return [*kept[:at], one, *kept[at:]]


def _show(findings: list[Finding]) -> None:
    """Print a list, the worst first, and how many faults there are."""
    order = ("fault", "note", "ok", "--")
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

    if config is not None:
        check_file(config, "config file")
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
