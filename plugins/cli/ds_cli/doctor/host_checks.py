"""What `dscore doctor --hostfile` makes of the hosts' answers: findings, and the tables that show
them (torch-free).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_cli.doctor.checks import Finding
from ds_cli.doctor.probing import Link

Facts = Mapping[str, Any]
CLOCK_NOTE = 0.5  # seconds
LITTLE = 2**30  # bytes left on a disk, or of shared memory
SLOW_SHARE = 0.5  # of the rate that the best links have
# bytes per second; above it, what one Python process moves says more of the processors than of the
# link
FAST = 2.5e9
SLOW_TRIPS = 3.0  # times the usual round trip, and
SLOW_EXTRA = 0.0005  # seconds more
MATRIX_HOSTS = 8  # up to so many, every link is shown


@dataclass(frozen=True, slots=True)
class HostReport:
    """One host of a hostfile, and what was found there."""

    name: str
    """As in the hostfile."""
    address: str
    """Without the user's name that ssh may need."""
    slots: int | None
    """How many are asked of it."""
    facts: Facts | None
    """What it said; None where it was not reached."""
    error: str = ""
    """Why it was not reached."""
    offset: float = 0.0
    """Of its clock."""


# -- hosts -----------------------------------------------------------------------------------------


def compare(reports: Sequence[HostReport], folder: str) -> Iterator[Finding]:
    """Everything about single hosts, and where one differs from the others."""
    for report in reports:
        if report.facts is None:
            yield Finding(
                report.name,
                "fault",
                f"not reached: {report.error}",
                _way_in(report.error, report.name),
            )
    here = [report for report in reports if report.facts is not None]
    for report in here:
        yield from _alone(report, folder)
        yield from _names(report, reports)
    for key, word, fix in (
        ("machine", "processor", "use hosts of one kind"),
        ("python", "python", "use one version of Python on all hosts"),
    ):
        for host, own, usual in _odd(here, lambda facts, key=key: facts[key]):
            yield Finding(host, "note", f"{word} {own}, the others have {usual}", fix)
    for host, own, usual in _odd(here, lambda facts: facts["torch"] or None):
        yield Finding(
            host,
            "fault",
            f"torch {own}, the others have {usual}",
            f"install torch {usual} on {host}",
        )
    yield from _packages(here)
    yield from _clocks(here)


def _alone(report: HostReport, folder: str) -> Iterator[Finding]:
    facts = report.facts
    host = report.name
    assert facts is not None
    if not facts["torch"]:
        why = facts.get("torch_error", "")
        yield Finding(
            host,
            "fault",
            f"torch cannot be imported by {facts['executable']}: {why}",
            "install it there",
        )
    elif report.slots is not None and 0 < facts["devices"] < report.slots:
        found = f"{facts['devices']} accelerators, and the hostfile gives it slots={report.slots}"
        yield Finding(host, "fault", found, f"write slots={facts['devices']}")
    if not facts["folder"]:
        yield Finding(
            host,
            "note",
            f"there is no folder {folder}, where a run would start",
            "share it, or make it there",
        )
    for key, name in (("shm", "/dev/shm"), ("disk", folder)):
        if facts[key] is not None and facts[key] < LITTLE:
            yield Finding(
                host, "note", f"{facts[key] / 2**20:.0f} MiB are left in {name}", "make room there"
            )
    if facts["own"] and all(
        address.startswith("127.") or address == "::1" for address in facts["own"]
    ):
        found = (
            f"its own name {facts['hostname']} means {facts['own'][0]} to itself, where no "
            "other "
            "host reaches it"
        )
        yield Finding(
            host, "note", found, "take that line out of its /etc/hosts, or set GLOO_SOCKET_IFNAME"
        )


def _names(report: HostReport, reports: Sequence[HostReport]) -> Iterator[Finding]:
    assert report.facts is not None
    unknown = [one.address for one in reports if not report.facts["names"].get(one.address)]
    if unknown:
        found = f"does not know the name{'s' if len(unknown) > 1 else ''} {', '.join(unknown[:8])}"
        yield Finding(
            report.name,
            "fault",
            found,
            "add to its /etc/hosts or DNS, or use addresses in the hostfile",
        )


def _odd(reports: Sequence[HostReport], value: Any) -> list[tuple[str, str, str]]:
    """(host, its value, the value that most have) for each host that has another one; None does not
    count.
    """
    found = {report.name: value(report.facts) for report in reports}
    counts = Counter(one for one in found.values() if one is not None)
    if len(counts) < 2:
        return []
    usual = counts.most_common(1)[0][0]
    return [(host, one, usual) for host, one in found.items() if one is not None and one != usual]


def _packages(reports: Sequence[HostReport]) -> Iterator[Finding]:
    names = sorted({name for report in reports for name in (report.facts or {})["packages"]})
    for name in ["dscore-train", *(n for n in names if n != "dscore-train")]:
        odd = _odd(reports, lambda facts, of=name: facts["packages"].get(of, ["none"])[0])
        for host, own, usual in odd:
            if own == "none":
                yield Finding(
                    host,
                    "fault",
                    f"{name} is not installed, the others have {usual}",
                    _pip(name, usual, host),
                )
            elif usual == "none":
                yield Finding(
                    host,
                    "fault",
                    f"{name} {own}, which the others do not have",
                    f"uninstall it on {host}",
                )
            else:
                yield Finding(
                    host, "fault", f"{name} {own}, the others have {usual}", _pip(name, usual, host)
                )
        if not odd:
            files = _odd(
                reports, lambda facts, of=name: (facts["packages"].get(of) or [0, None])[1]
            )
            for host, _, _ in files:
                found = f"{name} has the same version as on the others, but its files differ"
                yield Finding(host, "note", found, "bring the working copies to one state")


def _pip(name: str, version: str, host: str) -> str:
    return f"pip install '{name}=={version}' on {host}"


def _clocks(reports: Sequence[HostReport]) -> Iterator[Finding]:
    for report in reports:
        ahead = report.offset - reports[0].offset
        if abs(ahead) >= CLOCK_NOTE:
            word = "ahead of" if ahead > 0 else "behind"
            found = f"its clock is {abs(ahead) * 1000:.0f} ms {word} that of {reports[0].name}"
            fix = (
                "no run needs equal clocks, but who compares logs does: run an NTP client "
                "(chrony) "
                "on all hosts"
            )
            yield Finding(report.name, "note", found, fix)


def port_finding(report: HostReport, port: int) -> Iterator[Finding]:
    """Whether rank 0's store can listen on the first host."""
    if report.facts is not None and report.facts["port"]:
        found = (
            f"port {port}, where rank 0's store is to listen, cannot be used: "
            f"{report.facts['port']}"
        )
        yield Finding(
            report.name, "fault", found, "end what has it, or choose another one with --master-port"
        )


_WAYS_IN = (
    (
        "host key verification failed",
        "connect once by hand (`ssh {}`) and compare the key, or repair known_hosts",
    ),
    (
        "host identification has changed",
        "if that is right, `ssh-keygen -R {}` and connect once by hand",
    ),
    (
        "permission denied",
        "let it accept your key (`ssh-copy-id {}`), or load the key into ssh-agent",
    ),
    (
        "could not resolve",
        "correct the name in the hostfile, or add it to /etc/hosts, DNS or ~/.ssh/config",
    ),
    ("connection refused", "start its ssh server, or give the right --ssh-port"),
    ("timed out", "is it switched on, and does a firewall let ssh pass?"),
    ("no answer", "is it switched on, and not overloaded?"),
    ("no route", "is it switched on, and in this network?"),
    ("not found", "install the same Python environment there, at the same path"),
    ("no such file", "install the same Python environment there, at the same path"),
)


def _way_in(error: str, host: str) -> str:
    return next(
        (fix.format(host) for words, fix in _WAYS_IN if words in error.lower()),
        f"try `ssh {host} true`",
    )


# -- links -----------------------------------------------------------------------------------------


def slow_links(links: Sequence[Link]) -> Iterator[Finding]:
    """What cannot connect, and what is much slower than the best links; a host whose links are all
    slow comes once.
    """
    for error in dict.fromkeys(link.error for link in links if link.error):
        yield Finding(
            "network",
            "fault",
            error,
            "let every port between the hosts pass (firewall, security group)",
        )
    good = [link for link in links if not link.error]
    if not good:
        return
    rates = sorted(link.rate for link in good)
    best = min(rates[int(0.9 * len(rates))], FAST)
    yield from _slow(
        [link for link in good if link.rate < SLOW_SHARE * best],
        good,
        f"the best have {rate_text(rates[-1])}",
    )
    trips = sorted(link.round_trip for link in good)
    usual = trips[int(0.1 * len(trips))]
    far = [link for link in good if link.round_trip > SLOW_TRIPS * usual + SLOW_EXTRA]
    yield from _far(far, good, f"the best take {usual * 1000:.2f} ms")


def _slow(slow: Sequence[Link], links: Sequence[Link], best: str) -> Iterator[Finding]:
    fix = "look at its cable, switch port, speed (ethtool) and who else uses it"
    hosts, rest = _by_host(slow, links)
    for host, own in hosts:
        rates = _span([link.rate for link in own], rate_text)
        yield Finding(host, "note", f"all its links are slow: {rates}; {best}", fix)
    for link in rest:
        found = f"the link is slow: {rate_text(link.rate)}; {best}"
        yield Finding(f"{link.source} -> {link.target}", "note", found, fix)


def _far(far: Sequence[Link], links: Sequence[Link], best: str) -> Iterator[Finding]:
    hosts, rest = _by_host(far, links)
    for host, own in hosts:
        trips = _span([link.round_trip for link in own], trip_text)
        yield Finding(
            host,
            "note",
            f"is far from all others: round trips of {trips}; {best}",
            "is it in another place?",
        )
    for pair in dict.fromkeys(tuple(sorted((link.source, link.target))) for link in rest):
        trip = next(link.round_trip for link in rest if {link.source, link.target} == set(pair))
        yield Finding(
            " - ".join(pair),
            "note",
            f"round trip {trip_text(trip)}; {best}",
            "what lies between them?",
        )


def _by_host(
    some: Sequence[Link], links: Sequence[Link]
) -> tuple[list[tuple[str, list[Link]]], list[Link]]:
    """Of `some` of `links`: hosts all of whose links (out, in or both) are among them, with these;
    and what is left.
    """
    left = list(some)
    found = list[tuple[str, list[Link]]]()
    counts = Counter(host for link in some for host in (link.source, link.target))
    for host, _ in counts.most_common():
        known = {explained for explained, _ in found}
        own: list[Link] = []
        for out in (True, False):
            ends = [
                (link, *((link.source, link.target) if out else (link.target, link.source)))
                for link in links
            ]
            mine = [link for link, here, there in ends if here == host and there not in known]
            own += mine if len(mine) > 1 and all(link in left for link in mine) else []
        if own:
            found.append((host, own))
            left = [link for link in left if host not in (link.source, link.target)]
    return found, left


def _span(values: Sequence[float], text: Any) -> str:
    low = text(min(values))
    high = text(max(values))
    return low if low == high else f"{low} to {high}"


# -- tables ----------------------------------------------------------------------------------------


def rate_text(rate: float) -> str:
    """``943 Mbit/s`` of bytes per second."""
    bits = rate * 8
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


def trip_text(seconds: float) -> str:
    """``1.24 ms``."""
    return f"{seconds * 1000:.2f} ms"


def host_rows(
    reports: Sequence[HostReport], levels: Mapping[str, str]
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table of hosts.

    levels: of each host's worst finding.
    """
    columns = [
        "host",
        "state",
        "slots",
        "cores",
        "devices",
        "python",
        "torch",
        "dscore-train",
        "plugins",
        "clock",
    ]
    first = next((report.offset for report in reports if report.facts is not None), 0.0)
    rows = []
    for report in reports:
        head = [
            report.name,
            levels.get(report.name, "ok"),
            "auto" if report.slots is None else str(report.slots),
        ]
        if report.facts is None:
            rows.append([*head, *["-"] * (len(columns) - len(head))])
            continue
        facts = report.facts
        packages = report.facts["packages"]
        plugins = sum(name != "dscore-train" for name in packages)
        core = packages.get("dscore-train", ["none"])[0]
        versions = [facts["python"], facts["torch"] or "none", core, str(plugins)]
        offset = f"{(report.offset - first) * 1000:+.1f} ms"
        rows.append([*head, str(facts["cores"]), str(facts.get("devices", "-")), *versions, offset])
    return columns, rows


def link_rows(links: Sequence[Link], hosts: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table of links: from each host to each, or the slowest where there
    are many.
    """
    hosts = [host for host in hosts if any(host in (link.source, link.target) for link in links)]
    if len(hosts) > MATRIX_HOSTS:
        slowest = sorted(links, key=lambda link: (not link.error, link.rate))[:10]
        return ["slowest links", "", ""], [
            [f"{link.source} -> {link.target}", *_cell(link)] for link in slowest
        ]
    by_ends = {(link.source, link.target): link for link in links}
    rows = []
    for source in hosts:
        cells = [by_ends.get((source, target)) for target in hosts]
        rows.append(
            [
                source,
                *("" if link is None else "  ".join(filter(None, _cell(link))) for link in cells),
            ]
        )
    return ["from \\ to", *hosts], rows


def _cell(link: Link) -> list[str]:
    return (
        ["no connection", ""] if link.error else [rate_text(link.rate), trip_text(link.round_trip)]
    )
