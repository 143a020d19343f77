"""What hosts decide after a failure: one message, one exit code, and whether to start again.

Pure functions over plain values; `host_monitor` carries reports and decisions through the store at
which the hosts meet.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_command_kit.stopping import PREEMPTED

from ds_cli.local.failure import WorkerFailure, describe, exit_code, first, is_echo


@dataclass(frozen=True, slots=True)
class Report:
    """What one host says of an attempt that has failed somewhere."""

    number: int
    host: str
    order: int = 0
    """Its place among the alarms, from 1; 0 for a host that only received one."""
    failures: tuple[WorkerFailure, ...] = ()
    """Its own."""
    ended: int = 0
    """How many processes it ended because of others."""
    finished: bool = False
    """All of its processes had ended well."""
    lost: tuple[int, ...] = ()
    """The numbers of hosts that it has not heard from for too long."""
    used: int = 0
    """Restarts so far."""

    def text(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: bytes | str) -> Report:
        """Of `text`; what another program wrote raises ValueError, KeyError or TypeError."""
        said = json.loads(text)
        rows = tuple(WorkerFailure(**row) for row in said.pop("failures"))
        return cls(**said | {"failures": rows, "lost": tuple(said["lost"])})


@dataclass(frozen=True, slots=True)
class Decision:
    """What all hosts do after a failure: the decision of one host, read by the others."""

    number: int
    """The host that shows `text`."""
    code: int
    text: str
    again: bool = False
    """The processes are started again."""
    used: int = 0

    def json(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: bytes | str) -> Decision:
        """Of `text`; see `Report.read`."""
        said: dict[str, Any] = json.loads(text)
        return cls(**said)


def decide(
    reports: Sequence[Report],
    hosts: Mapping[int, str],
    world_size: int,
    *,
    me: int,
    elastic: bool,
    used: int,
    most: int,
) -> Decision:
    """What `reports` amount to.

    hosts: what to call each host, by number.
    used: restarts so far, of at most `most`.

    The cause is what was noticed first and is no mere echo of a lost peer. A host that has not
    reported is lost, and the cause where there is nothing else than echoes.
    """
    silent = [number for number in hosts if number not in {report.number for report in reports}]
    finished = any(report.finished for report in reports)
    causes = _causes(reports, silent, len(hosts))
    # The failures of all hosts, in the order of their alarms.
    rows = [
        row
        for report in sorted(reports, key=lambda r: r.order or len(hosts) + 1)
        for row in report.failures
    ]
    # The earliest cause; the number of the host makes the choice the same everywhere.
    if causes:
        _, _, row, number = min(causes, key=lambda cause: (cause[0], cause[1], cause[3]))
    elif rows:
        row = first(rows)
        number = next(report.number for report in reports if row in report.failures)
    else:
        return Decision(
            me, 1, "dscore: a host raised an alarm, but none knows of a failure", used=used
        )
    if row is None:  # a host is gone
        text = f"dscore: lost {hosts[number]}: nothing is heard of it any more, or its link is cut"
        more = sorted({cause[3] for cause in causes if cause[2] is None} - {number})
        text += "".join(f"\ndscore: lost {hosts[other]} too" for other in more)
        return Decision(me, 1, text, again=elastic and not finished, used=used)
    if row.code == PREEMPTED:  # a host that was asked to stop may have left already
        return Decision(
            number,
            PREEMPTED,
            describe([row], 0, world_size),
            again=elastic and not finished,
            used=used,
        )
    # Ordinary failures: a restart is used up, and a lost host cannot be replaced unless elastic.
    ended = sum(report.ended for report in reports)
    text = describe(
        [row, *(other for other in rows if other is not row)], ended, world_size, root=row
    )
    again = used < most and not finished and (elastic or not silent)
    return Decision(number, exit_code(row), text, again, used + again)


def _causes(
    reports: Sequence[Report], silent: Sequence[int], hosts: int
) -> list[tuple[int, float, WorkerFailure | None, int]]:
    """What may have come first: (order of the alarm, time, failure, host); None: the host is lost.

    silent: hosts without a report.
    hosts: how many there are.
    """
    causes: list[tuple[int, float, WorkerFailure | None, int]] = []
    for report in reports:
        # A host that raised no alarm itself comes after all that did.
        order = report.order or hosts + 1
        causes += [
            (order, row.time, row, report.number) for row in report.failures if not is_echo(row)
        ]
        causes += [(order, 0.0, None, number) for number in report.lost]
    causes += [(hosts + 2, 0.0, None, number) for number in silent]
    return causes


def unequal(facts: Sequence[Mapping[str, Any]]) -> tuple[int, str]:
    """The number of the first host that does not fit to host 0 or has a problem, and what is wrong;
    (0, "") if none.
    """
    for number, row in enumerate(facts):
        if row["problem"]:
            return number, str(row["problem"])
    for number, row in enumerate(facts[1:], 1):
        mine = facts[0]["versions"]
        other = row["versions"]
        odd = [
            name for name in sorted(mine.keys() | other.keys()) if mine.get(name) != other.get(name)
        ]
        if odd:
            told = "; ".join(
                f"{name} is {other.get(name, 'missing')}, on {facts[0]['host']} "
                f"{mine.get(name, 'missing')}"
                for name in odd[:4]
            )
            more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
            return (
                number,
                f"host {row['host']} has other versions: {told}{more}; install the same on all "
                "hosts",
            )
    return 0, ""
