"""A warning about parameters that were unfrozen, and that the optimizer does not have."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ds_core.context import StashKey

if TYPE_CHECKING:
    from torch import nn

    from ds_core.context import Context

log = logging.getLogger("ds_core.engine")
EVERY = 10
"""Steps between two looks: there can be thousands of frozen parameters."""
_LEFT_OUT: StashKey[dict[nn.Parameter, str]] = StashKey(
    "parameters that the optimizer does not have"
)


def note(ctx: Context) -> None:
    """Note the frozen parameters that the optimizer does not have."""
    trained = set(ctx.trained)
    ctx.stash[_LEFT_OUT] = {
        p: i.name for p, i in ctx.params.items() if not p.requires_grad and p not in trained
    }


def look(ctx: Context) -> None:
    """Warn once of parameters that require gradients now, and were frozen when the optimizer was
    made.
    """
    names = [name for param, name in ctx.stash[_LEFT_OUT].items() if param.requires_grad]
    if not names:
        return
    ctx.stash[_LEFT_OUT] = {}
    if ctx.mesh.index("dp") == 0:
        log.warning(
            "%s (%d in all) will not be trained: frozen when initialize was called, so the "
            "optimizer does not have it. To unfreeze parameters later, freeze them after "
            "initialize, or give them to it: model_parameters=model.parameters()",
            ", ".join(repr(n) for n in names[:5]),
            len(names),
        )
