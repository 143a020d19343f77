"""The names of ranges in a trace: what is written by the run is read by ``dscore trace``
(torch-free).

A phase is ``phase: forward``. A collective is ``comm: all_reduce | gradients of 'a' | 4096 B |
ranks 0-3 | 0#17``: the operation, what it is for, the bytes of its message, the ranks of its group,
and which of the group's collectives it is. Waiting for one that runs in the background is ``wait:``
and the same. All ranks of a group give it the same number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PHASE = "phase: "
COMM = "comm: "
WAIT = "wait: "
STEP = "ProfilerStep#"
MESSAGES = {"send": "send", "isend": "send", "recv": "recv", "irecv": "recv"}


@dataclass(frozen=True, slots=True)
class Named:
    """A collective, or a message between two ranks.

    op: as called, `send` or `recv` for messages.
    ranks: of its group, as text.
    key: the same on all ranks that take part in it.
    peer: the other rank of a message; None for a collective.
    """

    op: str
    label: str
    bytes: int
    ranks: str
    key: str
    peer: int | None = None

    def __str__(self) -> str:
        peer = "" if self.peer is None else f" {self.peer}"
        label = self.label.replace(" | ", " / ").replace("\n", " ")
        return f"{self.op}{peer} | {label} | {self.bytes} B | ranks {self.ranks} | {self.key}"

    @property
    def title(self) -> str:
        """For people: ``all_reduce``, ``recv from rank 1``."""
        if self.peer is None:
            return self.op
        return f"{self.op} {'from' if self.op == 'recv' else 'to'} rank {self.peer}"


def parse_comm(name: str) -> Named | None:
    """What `str(Named)` wrote, after "comm: " or "wait: "; None if it is something else."""
    parts = name.split(" | ")
    if len(parts) != 5 or not parts[2].endswith(" B") or not parts[3].startswith("ranks "):
        return None
    op, _, peer = parts[0].partition(" ")
    try:
        size = int(parts[2][:-2])
        other = int(peer) if peer else None
    except ValueError:
        return None
    return Named(op, parts[1], size, parts[3][6:], parts[4], other)


def shown_ranks(ranks: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2,5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
