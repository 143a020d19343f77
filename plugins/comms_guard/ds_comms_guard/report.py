"""The report of a long wait: who waits for what, who has not come, and where those are.

Arithmetic only: no process is looked at here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_comms_guard.verdict import SHOWN, Position, ranks_text, where


def describe_waits(
    positions: Mapping[int, Position], silent: Mapping[int, str], size: int, seconds: float
) -> str:
    """The text for the log.

    positions: of the ranks that answered.
    silent: what is known of the others.
    """
    waiting = {rank: p for rank, p in positions.items() if p.waits and not p.ended}
    alike: dict[tuple[object, str], list[int]] = {}
    for rank, position in sorted(waiting.items()):
        alike.setdefault((position.wait, position.waits), []).append(rank)
    lines = []
    wanted = set(silent)
    for ranks in alike.values():
        what, missing = _missing(waiting[ranks[0]], positions, size)
        wanted.update(missing)
        wait = "waits" if len(ranks) == 1 else "wait"
        lines.append(
            f"  {ranks_text(ranks)} {wait} for {what}{where(waiting[ranks[0]])}; "
            f"{_not_come(what, missing)}"
        )
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"  and {len(lines) - SHOWN} more waits"]
    first = sorted(wanted, key=lambda r: (r in waiting, r))  # those that do not wait are the cause
    lines += [f"  rank {rank} {_told(rank, positions, silent)}" for rank in first[:SHOWN]]
    if len(first) > SHOWN:
        lines.append(f"  and {len(first) - SHOWN} more ranks")
    have = "has" if len(waiting) == 1 else "have"
    return "\n".join([f"{len(waiting)} of {size} ranks {have} waited {seconds:.3g} s:", *lines])


def _missing(
    position: Position, positions: Mapping[int, Position], size: int
) -> tuple[str, Sequence[int]]:
    """What a rank waits for, and who has not come to it; of a call that is not numbered, who waits
    for another.
    """
    if position.wait is None and not position.queued:
        return position.waits, [
            r for r in range(size) if r not in positions or positions[r].waits != position.waits
        ]
    calls = position.missing(positions)
    known = [call for rank, call in calls.items() if rank in positions]
    what = (
        f"{position.waits}, {position.describe(known[0])}"
        if position.queued and known
        else position.waits
    )
    return what, sorted(calls)


def _not_come(what: str, missing: Sequence[int]) -> str:
    if not missing:
        if what.startswith("open_transport"):  # where kernels are compiled at their first use
            return "all have come; kernels are still being compiled, or the network is interrupted"
        return "all have come, so the backend or the network does not bring it to an end"
    return f"{ranks_text(missing)} {'has' if len(missing) == 1 else 'have'} not come"


def _told(rank: int, positions: Mapping[int, Position], silent: Mapping[int, str]) -> str:
    position = positions.get(rank)
    if position is None:
        return silent.get(rank, "has not answered")
    if position.ended:
        return f"({position.home}) has ended ({position.ended})"
    if position.waits:
        return f"({position.home}) waits itself"
    return f"({position.home}) is busy{where(position) or ', at an unknown line'}"
