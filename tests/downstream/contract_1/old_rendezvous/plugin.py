"""The declaration of old-rendezvous: how ranks find each other (torch-free)."""

from __future__ import annotations

from ds_core.entries import RendezvousEntry


def ds_rendezvous() -> RendezvousEntry | None:
    """`find` is asked only where one of `variables` is set; the highest priority is taken."""
    return RendezvousEntry(
        "old_rendezvous.job:find",
        variables=("OLD_RENDEZVOUS_RANK",),
        priority=5,
    )
