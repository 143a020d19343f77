"""``dscore doctor --hostfile F``: reach every host, compare them, measure their links, and say what
is wrong.

Data flow: `probing` starts `probe` on each host over ssh; facts and clocks come back, then pairs of
hosts measure their link in rounds; `host_checks` makes findings and tables of all that. Nothing is
left on a host (torch-free).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import typer
from ds_command_kit.hosts.hostfile import Host
from ds_command_kit.show import CommandError, show_json, show_list, show_table

from ds_cli.doctor.checks import Finding
from ds_cli.doctor.host_checks import (
    HostReport,
    compare,
    host_rows,
    link_rows,
    port_finding,
    slow_links,
)
from ds_cli.doctor.probing import Link, Probe, Reach, clock_offset, measure, probes, to_all
from ds_core.errors import CommError

CONNECT_SECONDS = 10
ANSWER_SECONDS = 150.0  # torch is imported there, perhaps from a slow network disk
LEVELS = ("fault", "note", "ok")


@dataclass(frozen=True, slots=True)
class Examination:
    """All that was found."""

    hosts: list[HostReport]
    links: list[Link]
    findings: list[Finding]


def by_ssh(port: int | None = None) -> Reach:
    """Commands on hosts by the user's ssh, which asks nothing and checks host keys as it always
    does.
    """
    program = shutil.which("ssh")
    if program is None:
        raise CommandError(
            "dscore doctor --hostfile needs ssh, which is not installed (Debian: openssh-client)"
        )
    options = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
    options += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
    options += ["-p", str(port)] if port is not None else []

    def reach(host: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        words = [program, *options, "--", host, shlex.join(command)]
        return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)

    return reach


def examine_hosts(hosts: Sequence[Host], reach: Reach, port: int) -> Examination:
    """Everything about `hosts` (the first has rank 0's store, at `port`) and the links between
    those that answer.
    """
    folder = os.getcwd()
    request = {
        "do": "facts",
        "names": [host.address for host in hosts],
        "port": port,
        "folder": folder,
    }
    with probes([host.name for host in hosts], reach, ANSWER_SECONDS) as started:
        offsets = to_all(clock_offset, started)
        facts = to_all(lambda probe: probe.ask(request), started)
        reports = [_report(*row) for row in zip(hosts, facts, offsets, strict=True)]
        answered = [
            probe
            for probe, report in zip(started, reports, strict=True)
            if report.facts is not None
        ]
        links = measure(answered, _addresses(answered, reports, hosts))
    findings = [*compare(reports, folder), *port_finding(reports[0], port), *slow_links(links)]
    return Examination(
        reports, links, sorted(findings, key=lambda finding: LEVELS.index(finding.level))
    )


def _report(host: Host, facts: Any, offset: Any) -> HostReport:
    slots = None if host.slots is None else len(host.slots)
    error = next((answer for answer in (offset, facts) if isinstance(answer, CommError)), None)
    if error is not None:
        return HostReport(host.name, host.address, slots, None, str(error))
    return HostReport(host.name, host.address, slots, facts, "", offset)


def _addresses(
    answered: Sequence[Probe], reports: Sequence[HostReport], hosts: Sequence[Host]
) -> dict[str, dict[str, str]]:
    """Host -> other host -> under which address it knows it, "" for none."""
    facts = {report.name: report.facts for report in reports if report.facts is not None}
    return {
        probe.name: {
            host.name: next(iter(facts[probe.name]["names"][host.address]), "") for host in hosts
        }
        for probe in answered
    }


def show_hosts(found: Examination, as_json: bool) -> None:
    """Print the tables and the findings; raises typer.Exit(1) when something would stop a run."""
    faults = sum(finding.level == "fault" for finding in found.findings)
    if as_json:
        show_json(
            {
                name: [asdict(row) for row in getattr(found, name)]
                for name in ("hosts", "links", "findings")
            }
        )
    else:
        # Reversed: of several findings on a part the first, which is the worst, remains.
        levels = {f.part: f.level for f in reversed(found.findings)}
        show_table(*host_rows(found.hosts, levels))
        if found.links:
            typer.echo("")
            show_table(*link_rows(found.links, [host.name for host in found.hosts]))
        typer.echo("")
        show_list(
            [
                (f.level, f"{f.part}: {f.found}", f"-> {f.fix}" if f.fix else "")
                for f in found.findings
            ]
        )
        typer.echo(
            f"{faults} fault{'' if faults == 1 else 's'} would stop a run"
            if faults
            else "nothing stops a run"
        )
    if faults:
        raise typer.Exit(1)
