"""A step model -> model. Parameters keep their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_run_state.changes import StandIn, changing
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_core.errors import UsageError
from ds_core.undo import Undo


class Replayed(StandIn):
    """A forward that keeps no activations."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


def recompute(model: nn.Module, names: Sequence[str], undo: Undo) -> nn.Module:
    """The model, with the modules `names` run again in backward. Raises UsageError for a name that it has not.

    undo: takes what gives the model back as it was when the engine is destroyed.
    """
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            raise UsageError(f"old_transform.modules: no {name!r} in {list(modules)[1:]}")
        with changing(modules[name], undo):
            modules[name].forward = Replayed(modules[name])
    return model
