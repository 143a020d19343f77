"""What the positions of waiting ranks prove: arithmetic only, no processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SHOWN = 8
FIX = (
    "All ranks must make the same calls in the same order: run the same modules (a module whose "
    "parts only some ranks run must be one that the partitioner treats as a leaf), and call "
    "backward and step equally often."
)


@dataclass(frozen=True, slots=True)
class Activity:
    """What an engine is doing."""

    # In words; may be empty.
    text: str
    # Passes through the model that have ended.
    passes: int = 0
    # The modules of this pass, in order, and those of the one before.
    trail: tuple[str, ...] = ()
    last: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupHistory:
    """What a rank has called on one group."""

    members: tuple[int, ...]
    count: int
    # The last calls, as (number, digest of all calls up to it, description).
    calls: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank stands that waits, was asked, or has ended. Texts are empty where unknown."""

    rank: int
    # Grows with each publication.
    beat: int
    # What the rank has called, by group name.
    groups: Mapping[str, GroupHistory]
    # -- what it waits for
    # The call: (group name, number).
    wait: tuple[str, int] | None
    # The user's line, and what the rank's engines are doing.
    at: str = ""
    activities: tuple[Activity, ...] = ()
    # How the rank has ended; empty while it lives.
    ended: str = ""
    # The wait in words.
    waits: str = ""
    # It waits for some of what it called, and it is not known for which.
    queued: bool = False
    # -- who it is
    # The last question that it has received.
    heard: str = ""
    # Its process, in words.
    home: str = ""

    @property
    def issued(self) -> int:
        """All collectives that the rank has called."""
        return sum(group.count for group in self.groups.values())

    def as_json(self) -> dict[str, Any]:
        """For `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Position:
        """The reverse of `as_json`, after a trip through JSON."""
        groups = {
            name: GroupHistory(
                tuple(v["members"]), v["count"], tuple((n, d, t) for n, d, t in v["calls"])
            )
            for name, v in data["groups"].items()
        }
        activities = tuple(
            Activity(**{**a, "trail": tuple(a["trail"]), "last": tuple(a["last"])})
            for a in data["activities"]
        )
        wait = (data["wait"][0], data["wait"][1]) if data["wait"] else None
        return cls(**{**data, "groups": groups, "wait": wait, "activities": activities})

    def missing(self, positions: Mapping[int, Position]) -> dict[int, tuple[str, int]]:
        """Who has not made a call that it waits for, and which: (group name, number).

        Ranks not in `positions` have not. With `queued`: the first call that a rank has not made,
        of those made here.
        """
        calls = [self.wait] if self.wait is not None else []
        if self.queued:
            calls = [(name, group.count) for name, group in self.groups.items() if group.count]
        found: dict[int, tuple[str, int]] = {}
        for name, number in calls:
            for rank in self.groups[name].members:
                made = positions[rank].groups.get(name) if rank in positions else None
                count = (
                    number - 1 if rank not in positions else made.count if made is not None else 0
                )
                if count < number:
                    found.setdefault(rank, self.wait or (name, count + 1))
        return found

    def describe(self, call: tuple[str, int]) -> str:
        """One of its last calls, by group name and number."""
        name, number = call
        made = next((text for n, _, text in self.groups[name].calls if n == number), None)
        if made is None and ">" in name:  # a sender and a receiver
            return (
                f"message {number} from rank {self.groups[name].members[0]} to rank "
                f"{self.groups[name].members[1]}"
            )
        return made or f"collective {number} of group {name!r}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A proof that no rank can go on."""

    text: str
    # It holds whenever the positions were read; else only while the ranks in `waiting` stay.
    certain: bool
    waiting: Sequence[int] = field(default=())


def prove(positions: Mapping[int, Position], size: int) -> Verdict | None:
    """What the positions prove; None: nothing (ranks without one, and those that do not wait, may
    be only slow).
    """
    return _difference(positions) or _deadlock(positions, size)


def _difference(positions: Mapping[int, Position]) -> Verdict | None:
    """Two ranks made different collectives under the same number of the same group."""
    # By group: only calls on the same ranks meet each other.
    for name in sorted({name for p in positions.values() for name in p.groups}):
        made: dict[int, dict[int, list[int]]] = {}
        texts: dict[tuple[int, int], str] = {}
        for position in positions.values():
            for number, digest, text in (
                position.groups[name].calls if name in position.groups else ()
            ):
                made.setdefault(number, {}).setdefault(digest, []).append(position.rank)
                texts[number, digest] = text
        for number in sorted(made):
            # The first number is the one that explains all later ones. The digest covers all calls
            # before, so equal digests mean equal histories.
            if len(made[number]) > 1:
                return Verdict(_describe_difference(positions, made[number], number, texts), True)
    return None


def _describe_difference(
    positions: Mapping[int, Position],
    by_digest: Mapping[int, Sequence[int]],
    number: int,
    texts: Mapping[tuple[int, int], str],
) -> str:
    lines = ["ranks disagree on the next collective, so that none can continue:"]
    for digest, ranks in by_digest.items():
        first = positions[ranks[0]]
        lines.append(f"  {ranks_text(ranks)}: {texts[number, digest]}{where(first)}")
    lines += _divergence([positions[ranks[0]] for ranks in by_digest.values()])
    return "\n".join([*lines, FIX])


def _deadlock(positions: Mapping[int, Position], size: int) -> Verdict | None:
    """Ranks that wait for each other, or for one that has ended."""
    # Ranks that do not wait, or have not published, may go on; so may, step by step, all who wait
    # for such ranks only. Who is left waits for ever.
    waiting = {
        rank: p for rank, p in positions.items() if (p.wait is not None or p.queued) and not p.ended
    }
    may_go_on = {
        r for r in range(size) if r not in waiting and not (r in positions and positions[r].ended)
    }
    missing = {rank: _lacking(p, positions) for rank, p in waiting.items()}
    while freed := [r for r in waiting if r not in may_go_on and missing[r].keys() <= may_go_on]:
        may_go_on.update(freed)
    dead = sorted(r for r in waiting if r not in may_go_on)
    if not dead:
        return None
    lines = ["ranks wait for each other, so that none can continue:"]
    for rank in dead[:SHOWN]:
        lacking = sorted(missing[rank].keys() - may_go_on)
        what = waiting[rank].describe(missing[rank][lacking[0]])
        lines.append(
            f"  rank {rank} waits for {what}{where(waiting[rank])}, to which {ranks_text(lacking)} "
            f"{'has' if len(lacking) == 1 else 'have'} not come"
        )
    if len(dead) > SHOWN:
        lines.append(f"  and {len(dead) - SHOWN} more")
    # Where their passes through the model part is what the user has to look at.
    lines += _divergence([waiting[rank] for rank in dead])
    lines += [f"  rank {p.rank} has ended ({p.ended})" for p in positions.values() if p.ended]
    return Verdict("\n".join([*lines, FIX]), False, dead)


def _lacking(position: Position, positions: Mapping[int, Position]) -> dict[int, tuple[str, int]]:
    """Whom it cannot go on without.

    A device waits for ended ranks alone: its host may still make calls.
    """
    missing = position.missing(positions)
    return {
        r: call
        for r, call in missing.items()
        if not position.queued or (r in positions and positions[r].ended)
    }


def _divergence(positions: Sequence[Position]) -> list[str]:
    """Where the modules that the first rank and another one ran begin to differ."""
    for first, other in ((positions[0], p) for p in positions[1:]):
        for mine, theirs in zip(first.activities, other.activities, strict=False):
            # One that has ended the pass in which the other one stands is compared by its last
            # pass.
            ahead = mine.passes - theirs.passes
            trail = mine.last if ahead == 1 else mine.trail
            other_trail = theirs.last if ahead == -1 else theirs.trail
            for index, (a, b) in enumerate(
                zip(trail, other_trail, strict=False) if abs(ahead) <= 1 else ()
            ):
                if a != b:
                    after = f"after {trail[index - 1]}" if index else "at first"
                    return [
                        f"  {after}, rank {first.rank} came to {a}, and rank {other.rank} to {b}"
                    ]
            if ahead:
                return [
                    f"  rank {first.rank} has gone through the model {mine.passes} times, "
                    f"rank {other.rank} {theirs.passes} times"
                ]
    return []


def where(position: Position) -> str:
    """What it is doing and the user's line, to be appended; "" where neither is known."""
    parts = [p.text for p in position.activities if p.text] + (
        [f"at {position.at}"] if position.at else []
    )
    return "".join(f", {part}" for part in parts)


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 1, 2``; a few of many."""
    shown = ", ".join(map(str, sorted(ranks)[:SHOWN])) + (", ..." if len(ranks) > SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
