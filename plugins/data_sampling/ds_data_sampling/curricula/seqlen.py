"""A length of sequences that grows with the steps: given to the model, or cut from its inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ds_run_state.changes import changing
from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_core.nested import map_leaves
from ds_data_sampling.callbacks import callbacks_of
from ds_data_sampling.curricula.schedules import difficulty_at

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_data_sampling.curricula.config import LegacyCurriculum

ARGUMENT = "curriculum_seqlen"
METRIC = "seqlen"

Cut = Callable[[Any, Any], tuple[Any, Any]]


def truncate(batch: Any, length: int) -> Any:
    """`batch` with sequences of at most `length` positions: views of its tensors.

    batch: a tensor, or lists, tuples and mappings of tensors. The length of the sequences is that
    of ``input_ids``, or else of the first tensor with two or more dimensions:
    [batch, positions, ...]. In the others that many positions are cut in dimension 1, and in the
    last two of masks with three (integers or booleans) or four dimensions.
    """
    found: list[Tensor] = []
    map_leaves(
        lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) and leaf.dim() > 1 else None,
        batch,
    )
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    whole = ids if isinstance(ids, Tensor) else next(iter(found), None)
    if whole is None or whole.shape[1] <= length:
        return batch
    positions = whole.shape[1]

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() < 2:
            return leaf
        # Masks have positions twice, as queries and as keys; a float of three dimensions is no
        # mask but embeddings: [batch, positions, hidden].
        square = leaf.dim() == 4 or (leaf.dim() == 3 and not leaf.is_floating_point())
        for dim in (1, leaf.dim() - 2, leaf.dim() - 1) if square else (1,):
            if leaf.shape[dim] == positions:
                leaf = leaf.narrow(dim, 0, length)
        return leaf

    return map_leaves(cut, batch)


def seqlen_at(ctx: Context, section: LegacyCurriculum, step: int) -> int:
    """The length of the optimizer step `step`, which counts from 1."""
    function = callbacks_of(ctx).schedules.get(METRIC)
    if section.schedule_type == "custom" and function is None:
        raise UsageError(
            "the schedule of curriculum_learning is custom: give its function by "
            f"engine.set_custom_curriculum_learning_schedule({{{METRIC!r}: function}}) "
            "before the first batch"
        )
    return difficulty_at(section, step, function)


def limit_lengths(model: nn.Module, ctx: Context, section: LegacyCurriculum) -> nn.Module:
    """Give `model`, while it trains, the length of each step, or no more positions than that.

    A model whose forward has an argument ``curriculum_seqlen`` receives it. The inputs of any other
    are truncated; of a pipeline, its micro-batches.
    """

    def length() -> int:
        return seqlen_at(ctx, section, ctx.engine.global_steps + 1)

    # A pipeline: its forward is not called, and it offers a function for its micro-batches.
    if hasattr(model, "cut_batch"):
        with changing(model, ctx.undo):
            _cut_micro_batches(model, length)
        return model
    takes = ARGUMENT in inspect.signature(type(model).forward).parameters

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # None: the engine was destroyed, and the module is no longer trained by it.
        if not module.training or ctx.engine_ref() is None:
            return None
        if takes:
            return args, {**kwargs, ARGUMENT: length()}
        # Positional inputs are cut to the length of ``input_ids`` too, where that is named.
        if isinstance(kwargs.get("input_ids"), Tensor):
            named = truncate({**kwargs, "": args}, length())
            return named.pop(""), named
        return truncate((args, kwargs), length())

    # First of all hooks: those that divide sequences over ranks come after it.
    ctx.undo(model.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
    return model


def _cut_micro_batches(model: Any, length: Callable[[], int]) -> None:
    """Inputs and labels of a pipeline's micro-batches are truncated before anything else is done
    to them."""
    then: Cut | None = model.cut_batch

    def cut(inputs: Any, labels: Any) -> tuple[Any, Any]:
        if model.training:
            inputs, labels = truncate((inputs, labels), length())
        return (inputs, labels) if then is None else then(inputs, labels)

    model.cut_batch = cut
