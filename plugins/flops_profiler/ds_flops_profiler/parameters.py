"""How many parameters a module has: whole, on this rank, and over all ranks.

ZeRO stage 3 takes a parameter's values away and leaves ``ds_numel`` (of the whole) and
``ds_tensor`` (this rank's).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from ds_core.context import Context


def _numel(param: nn.Parameter) -> int:
    return int(getattr(param, "ds_numel", None) or param.numel())


def _stored(param: nn.Parameter) -> int:
    part: Any = getattr(param, "ds_tensor", None)
    return int(param.numel() if part is None else part.numel())


def whole(module: nn.Module) -> int:
    """Parameters of `module` on this rank, sharded ones as if they were whole; shared ones count
    once.
    """
    return sum(_numel(p) for p in module.parameters())


def stored_here(module: nn.Module) -> int:
    """Elements that this rank keeps."""
    return sum(_stored(p) for p in module.parameters())


def shared_of_all(ctx: Context) -> int:
    """This rank's summand of the model's parameters times the number of ranks; all ranks' summands
    are to be added.
    """
    return sum(
        _numel(p) * ctx.mesh.size(*info.held) for p, info in ctx.params.items() if info.counted
    )
