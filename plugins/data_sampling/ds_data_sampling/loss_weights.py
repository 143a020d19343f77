"""What a micro-batch's mean loss is multiplied by, so that each sample or token of a step counts
the same.

The engine averages the losses of micro-batches with equal weights. The weight is put into the
batch, as ``loss_weight``; hooks of the model take it out again and multiply the loss by it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ds_core.engine import loss_of
from ds_core.errors import UsageError
from ds_core.undo import Undo

NAME = "loss_weight"


def weigh_losses(model: nn.Module, undo: Undo) -> nn.Module:
    """Make `model` multiply its loss by the ``loss_weight`` that forward is given.

    A model whose forward has an argument of this name is left as it is, and given the weight.
    """
    if NAME in inspect.signature(model.forward).parameters:
        return model
    weights: list[Tensor] = []

    def take(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        weights.clear()  # of a forward that failed
        if NAME not in kwargs:
            return None
        weights.append(kwargs[NAME])
        return args, {name: value for name, value in kwargs.items() if name != NAME}

    def multiply(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _weighted(output, weights.pop()) if weights else None

    undo(model.register_forward_pre_hook(take, with_kwargs=True).remove)
    undo(model.register_forward_hook(multiply).remove)
    return model


def _weighted(output: Any, weight: Tensor) -> Any:
    """`output` with its loss, found as `ds_core.engine.loss_of` finds it, times `weight`."""
    loss = loss_of(output, required=False)
    if loss is None:
        raise UsageError(
            "data_sampling.loss_weights: the model gives no loss (alone, as .loss, ['loss'] or the "
            "first item); take "
            f"{NAME} out of the batch and multiply the loss by it yourself, or give forward an "
            f"argument {NAME}"
        )
    loss = loss * weight.to(loss.device, loss.dtype)
    if isinstance(output, Tensor):
        return loss
    if isinstance(output, Mapping):
        if getattr(output, "loss", None) is None:
            return {**output, "loss": loss}
        output["loss"] = loss  # type: ignore[index]
        return output
    if getattr(output, "loss", None) is not None:
        output.loss = loss
        return output
    return type(output)((loss, *output[1:]))
