"""Which of the planned choices to use (torch-free)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_plan.needs import Need, Offload

EQUAL_TRAFFIC = 1.01
"""Choices whose traffic differs by less than this factor count as equal: the rest is padding."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What `recommend` found."""

    need: Need | None
    """What to use; None where nothing fits."""

    reason: str
    """One sentence."""


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that there is."""

    device: int
    """Bytes of one rank's device."""

    host: int | None = None
    """Bytes of one host; None: as much as is needed."""

    ranks_per_host: int = 1
    """Ranks that share a host's memory."""

    def fits(self, need: Need) -> bool:
        """Whether there is room for `need` on every rank."""
        if need.device.peak > self.device:
            return False
        return self.host is None or need.host.peak * self.ranks_per_host <= self.host

    def describe(self, need: Need) -> str:
        """What `need` takes of it."""
        on_host = need.host.peak * self.ranks_per_host
        text = f"{_gigabytes(need.device.peak)} on the device"
        if on_host:
            text += f" and {_gigabytes(on_host)} on the host"
        if need.disk:
            text += f", {_gigabytes(need.disk)} on disk"
        return text


def recommend(needs: Sequence[Need], room: Room) -> Advice:
    """Of what fits, the choice that offloads least, and of those the one that sends least.

    Among those whose traffic is equal within 1 %, stage 3 comes last, since it gathers in every
    pass, and then memory decides.
    """
    fitting = [need for need in needs if room.fits(need)]
    if not fitting:
        least = min(needs, key=lambda n: (n.device.peak, n.host.peak))
        why = f"nothing fits: {_name(least)} needs least, {room.describe(least)}"
        return Advice(None, why)
    level, sent = min(_cost(need) for need in fitting)
    equal = [n for n in fitting if _cost(n)[0] == level and n.sent <= sent * EQUAL_TRAFFIC]
    best = min(equal, key=lambda n: (n.stage == 3, n.device.peak))
    reason = (
        f"{_name(best)}: {room.describe(best)}; of what fits it offloads least and then sends least"
    )
    # Whoever can find a little more memory should know what it would buy: the nearest cheaper choice.
    cheaper = [
        n
        for n in needs
        if n not in fitting and (_cost(n)[0] < level or n.sent * EQUAL_TRAFFIC < sent)
    ]
    if cheaper:
        nearest = min(cheaper, key=lambda n: n.device.peak)
        reason += f" ({_name(nearest)} would need {room.describe(nearest)})"
    return Advice(best, reason)


def _cost(need: Need) -> tuple[int, int]:
    """What is minimised: how much is offloaded, then bytes per step."""
    return list(Offload).index(need.offload), need.sent


def _name(need: Need) -> str:
    if need.offload is Offload.NONE:
        return f"stage {need.stage}"
    where = "" if need.offload.on_disk else " on the host"
    return f"stage {need.stage} with {need.offload.value}{where}"


def format_gigabytes(size: int) -> str:
    """Bytes in GB: three digits, or all digits of a whole number from 1000 on."""
    amount = size / 1e9
    return f"{amount:.3g}" if amount < 999.5 else f"{amount:,.0f}"


def _gigabytes(size: int) -> str:
    return f"{format_gigabytes(size)} GB"
