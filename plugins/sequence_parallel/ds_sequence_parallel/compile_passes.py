"""The compile pass ``autosp``, whichever of the sections gives the size (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping


def ds_compile_passes() -> Mapping[str, str]:
    """``autosp``: sequences divided in the graph that torch.compile captures."""
    return {"autosp": "ds_sequence_parallel.autosp:make_pass"}
