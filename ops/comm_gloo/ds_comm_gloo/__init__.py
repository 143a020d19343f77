"""Collectives over gloo on CPU tensors; a kit for other ways to carry them out on the same groups
(torch-free).

`GlooCollectives` composes them of gloo's messages, or hands them to a `Transport` where one opens.
Between hosts that have several ranks each they go in two levels (`ds_comm_gloo.two_level`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core import names_on_first_use

if TYPE_CHECKING:
    from ds_comm_gloo.hosts import host_key
    from ds_comm_gloo.provider import GlooCollectives
    from ds_comm_gloo.transports import Members, Opener, Transport

__all__ = ["GlooCollectives", "Members", "Opener", "Transport", "host_key"]

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {"hosts": "host_key", "provider": "GlooCollectives", "transports": "Members Opener Transport"},
)
