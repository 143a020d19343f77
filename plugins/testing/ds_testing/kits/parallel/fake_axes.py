"""A plugin with no feature behind it: mesh axes on which ranks really hold different parameters
(torch-free).

The conformance kits use it to put products of axes (dp x pp x ep x tp) under a partitioner. Load it
with ``"plugins": {"load": ["fake_axes=ds_testing.kits.parallel.fake_axes"]}, "fake_axes":
{"axes": {"pp": 2, "ep": 2}}``. A parameter named ``held_pp_ep...`` anywhere in its path is held on exactly those axes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from ds_core.config import Section, option
from ds_core.entries import Axis

if TYPE_CHECKING:
    from ds_core.config import RunConfig
    from ds_core.context import Context

FOLDED = ("ep", "sp")
SAME_BATCH = ("sp",)


class FakeAxes(Section):
    """The section ``fake_axes``."""

    axes: dict[str, int] = option(
        ..., "Axis name to size; ep and sp fold inside dp, others stand outside."
    )


def ds_config() -> type[FakeAxes]:
    """Section ``fake_axes``."""
    return FakeAxes


def ds_mesh_axes(config: RunConfig) -> Iterable[Axis]:
    """The axes that the section names."""
    section = config.section(FakeAxes)
    assert section is not None
    return [
        Axis(name, size, inside="dp" if name in FOLDED else None, same_batch=name in SAME_BATCH)
        for name, size in section.axes.items()
    ]


def ds_param_axes(name: str, ctx: Context) -> Collection[str]:
    """The axes in the parameter's name."""
    return [axis for axis in held_axes(name) if ctx.mesh.has(axis)]


def held_axes(name: str) -> tuple[str, ...]:
    """``"held_pp_tp.weight"`` -> ``("pp", "tp")``."""
    part = next((p for p in name.split(".") if p.startswith("held_")), "held_")
    return tuple(a for a in part.removeprefix("held_").split("_") if a)
