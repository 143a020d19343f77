"""Second moments of what Muon has orthogonalised: NorMuon and AdaMuon.

NorMuon (Li et al. 2025, https://arxiv.org/abs/2510.05491) has one for each row, AdaMuon (Si et al.
2025, https://arxiv.org/abs/2507.11005) one for each element, and orthogonalises the sign of the
momentum. Both give the update of a matrix the size that Adam's has: 0.2 in the root of the mean
square.

The moments are where the elements are, one value per element (those of a row are equal), so that
checkpoints go to any layout. Sums of rows and of matrices that are cut are one all-reduce each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ds_optimizers.moments.rows import add_up

if TYPE_CHECKING:
    from ds_optimizer_kit import Layout

    from ds_optimizers.moments.rows import Rows

VARIANTS = ("muon", "normuon", "adamuon")
# The root of the mean square of Adam's updates, as both papers have it.
_SIZE = 0.2


def normalize(
    layout: Layout,
    rows_of: Callable[[Tensor, int], Rows],
    groups: Mapping[Tensor, Mapping[str, Any]],
    changes: Mapping[Tensor, Tensor],
    moments: Mapping[Tensor, Tensor],
) -> dict[Tensor, Tensor]:
    """Update `moments`; what to subtract, times the learning rate. Collective.

    rows_of: gives the rows of a parameter whose first dimensions, so many, number them.
    groups: of the parameters that are normalised, the same on all ranks.
    changes: this rank's elements of the orthogonalised matrices, flat.
    moments: of the same parameters.
    """
    # 1. The second moments: v <- beta2 v + (1 - beta2) mean of o^2.
    rows = {
        param: rows_of(param, group["stacked"] + 1)
        for param, group in groups.items()
        if group["variant"] == "normuon"
    }
    sums = add_up(layout, rows, {p: o.square() for p, o in changes.items() if p in rows})
    found = {}
    for param, change in changes.items():
        square = change.square()
        if param in rows:
            square = rows[param].spread(sums[param] / rows[param].length, change)
        moment = moments[param]
        moment.lerp_(square.view(moment.shape).to(moment), 1 - groups[param]["beta2"])
        deviation = moment.reshape(-1).to(change).sqrt().add_(groups[param]["eps"])
        found[param] = change.reshape(-1) / deviation
    # 2. The size of the whole update, of each matrix in a stack by itself.
    whole = {p: rows_of(p, group["stacked"]) for p, group in groups.items()}
    squares = add_up(layout, whole, {p: o.square() for p, o in found.items()})
    for param, change in found.items():
        each = whole[param]
        factor = _SIZE * each.length**0.5 / (squares[param].sqrt() + groups[param]["eps"])
        found[param] = change * each.spread(factor, change)
    return found
