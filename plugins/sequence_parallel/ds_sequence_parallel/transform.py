"""The transform: modules of the model get the group of the axis ``sp``, and a hook cuts the
inputs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ds_run_state.changes import changing
from ds_run_state.divided import POSITIONS
from torch import Tensor, nn

from ds_core.context import StashKey
from ds_core.errors import UsageError
from ds_core.nested import map_leaves
from ds_sequence_parallel.attention.layout import Layout
from ds_sequence_parallel.config import SequenceParallelConfig, settings
from ds_sequence_parallel.hf import ShardedModel, argument_names, root_model

if TYPE_CHECKING:
    from ds_core.context import Context

SHARDED: StashKey[ShardedModel] = StashKey("dscore-sequence-parallel transformers model")
log = logging.getLogger("ds_core")


def divide(model: nn.Module, ctx: Context) -> nn.Module:
    """Divide sequences over the axis ``sp``; the model does not change, but for hooks."""
    group = ctx.mesh.group("sp")
    ranks = ctx.mesh.size("sp")
    asked = settings(ctx.config)
    if ranks == 1:
        return model
    bound: list[Any] = [module for module in model.modules() if hasattr(module, "bind_sequence")]
    with changing(model, ctx.undo):
        for module in bound:
            module.bind_sequence(group, asked.mode == "ring")
    # These run before the changes above are undone, and reach copies of the model as well.
    for module in bound:
        ctx.undo(getattr(module, "unbind_sequence", _nothing))
    # A transformers model is changed by its registry; of a plain one only the inputs are cut, and
    # its own modules attend over ranks.
    root = root_model(model)
    if root is not None:
        ctx.stash[SHARDED] = sharded = ShardedModel(
            root, group, ring=_ring(root, asked, ctx), more=asked.inputs
        )
        ctx.undo(sharded.close)
        _tell_positions(ctx, sharded.ring, sharded)
    elif asked.inputs:
        _cut_inputs(model, asked, ctx)
        _tell_positions(ctx, asked.mode == "ring")
    elif not bound:
        log.warning(
            "sequence_parallel: nothing of the model is divided over the %d ranks of sp, which all "
            "do the same; use ds_sequence_parallel.DistributedAttention or RingAttention in it, and "
            "sequence_parallel.inputs",
            ranks,
        )
    return model


def _nothing() -> None:
    """For modules whose attributes are all that binding changes."""


def _ring(model: Any, asked: SequenceParallelConfig, ctx: Context) -> bool:
    """Whether a transformers model goes round the ring: if the config says so, or has more ranks
    than heads.
    """
    if asked.mode != "auto":
        return asked.mode == "ring"
    text = getattr(model.config, "get_text_config", lambda: model.config)()
    heads = getattr(text, "num_attention_heads", None)
    if heads is None or not getattr(model, "_supports_attention_backend", False):
        return False
    # Tensor parallelism has divided the heads before: a rank has heads / tp to exchange.
    tp = ctx.mesh.size("tp") if ctx.mesh.has("tp") else 1
    return bool(heads // tp < ctx.mesh.size("sp"))


def _tell_positions(ctx: Context, ring: bool, sharded: ShardedModel | None = None) -> None:
    """Say which positions this rank has. See `ds_run_state.divided.POSITIONS`."""
    rank = ctx.mesh.index("sp")
    ranks = ctx.mesh.size("sp")

    def here(count: int) -> tuple[int, Sequence[tuple[int, int]]]:
        inputs = sharded.inputs if sharded is not None else None
        # Only a transformers model may have parts of other sizes, which its forward knows.
        layout = Layout(count * ranks, ranks, ring) if inputs is None else inputs.layout
        return layout.length, [(first, end - first) for first, end in layout.pieces(rank)]

    ctx.stash[POSITIONS] = here


def _cut_inputs(model: nn.Module, asked: SequenceParallelConfig, ctx: Context) -> None:
    """A hook that cuts the arguments of a plain module that `inputs` names; of a pipeline, inputs
    and labels.
    """
    pipeline = hasattr(model, "cut_batch")
    names = ["inputs", "labels"] if pipeline else argument_names(model)
    unknown = [name for name in asked.inputs if name not in names]
    if unknown:
        takes = (
            "a pipeline's micro-batch is" if pipeline else f"{type(model).__name__}.forward takes"
        )
        raise UsageError(
            f"sequence_parallel.inputs names {', '.join(unknown)}, and {takes} {', '.join(names)}"
        )
    inputs = _Inputs(asked, names, ctx.mesh.index("sp"), ctx.mesh.size("sp"))
    ctx.undo(inputs.close)
    with changing(model, ctx.undo):
        if pipeline:
            model.cut_batch = inputs.cut_batch  # type: ignore[assignment]
        else:
            model.register_forward_pre_hook(inputs.before, with_kwargs=True)


class _Inputs:
    """Cuts the inputs of a model to this rank's part, until it is closed; `names` of its arguments
    by place.
    """

    def __init__(
        self, asked: SequenceParallelConfig, names: Sequence[str], rank: int, ranks: int
    ) -> None:
        self._dims = asked.inputs
        self._names = names
        self._ring = asked.mode == "ring"
        self._rank = rank
        self._ranks = ranks
        self._closed = False

    def __deepcopy__(self, memo: Any) -> _Inputs:
        """A copy of the model is given whole inputs, too, until the engine ends."""
        return self

    def close(self) -> None:
        """The engine ends: leave inputs whole, those of copies of the model too."""
        self._closed = True

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Forward pre-hook."""
        if self._closed:
            return None
        placed = dict(enumerate(self._names))
        cut_args = tuple(
            self._part(placed.get(place, ""), value) for place, value in enumerate(args)
        )
        return cut_args, {name: self._part(name, value) for name, value in kwargs.items()}

    def cut_batch(self, inputs: Any, labels: Any) -> tuple[Any, Any]:
        """Of a pipeline's micro-batch."""
        cut_inputs = map_leaves(lambda x: self._part("inputs", x), inputs)
        return cut_inputs, map_leaves(lambda x: self._part("labels", x), labels)

    def _part(self, name: str, value: Any) -> Any:
        dim = self._dims.get(name)
        if dim is None or not isinstance(value, Tensor):
            return value
        length = value.shape[dim]
        parts = 2 * self._ranks if self._ring else self._ranks
        if length % parts:
            raise UsageError(
                f"sequence_parallel: {name} has {length} positions, which do not divide into equal "
                f"parts for {self._ranks} ranks{' (two each)' if self._ring else ''}; pad it to a multiple "
                f"of {parts}"
            )
        return Layout(length, self._ranks, self._ring).cut(value, self._rank, dim).contiguous()
