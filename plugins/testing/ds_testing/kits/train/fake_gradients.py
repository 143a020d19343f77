"""A plugin of the partitioner's kit: it notes what it sees of gradients, and sets them to zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_core.config import Section
from ds_core.context import StashKey

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.gradients import Gradients


@dataclass(frozen=True)
class Seen:
    """What the plugin saw of a step's gradients."""

    norm: float
    """As the core gives it."""
    root: float
    """The root of the sum of squares, added up by the plugin."""
    count: float
    """The number of elements."""
    sums: dict[str, float]
    """The sum of the elements of each parameter."""


SEEN = StashKey[Seen]("what the kit's plugin saw of gradients")


class FakeGradients(Section):
    """The section ``fake_gradients``; it has no keys."""


def ds_config() -> type[FakeGradients]:
    """The section."""
    return FakeGradients


def ds_gradients(ctx: Context, gradients: Gradients) -> None:
    """Note, and set zeros."""
    root = gradients.total(lambda t: t.square().sum()) ** 0.5 * gradients.factor
    count = gradients.total(lambda t: t.new_tensor(t.numel()))
    sums = {n: s * gradients.factor for n, s in gradients.sums(lambda t: t.sum()).items()}
    ctx.stash[SEEN] = Seen(gradients.norm, root, count, sums)
    for shard in gradients.shards:
        shard.tensor.zero_()
