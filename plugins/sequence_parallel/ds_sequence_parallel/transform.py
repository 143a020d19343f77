"""The transform: modules of the model get the group of the axis ``sp``, and a hook cuts the inputs."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ds_core.context import StashKey
from ds_core.errors import UsageError
from ds_core.nested import map_leaves
from ds_sequence_parallel.config import SequenceParallelConfig, settings
from ds_sequence_parallel.hf import ShardedModel, root_model
from ds_sequence_parallel.layout import Layout

if TYPE_CHECKING:
    from ds_core.context import Context

__all__ = ["SHARDED", "divide"]

SHARDED: StashKey[ShardedModel] = StashKey("ds-sequence-parallel transformers model")
log = logging.getLogger("ds_core")


def divide(model: nn.Module, ctx: Context) -> nn.Module:
    """Divide sequences over the axis ``sp``; the model does not change, but for hooks."""
    group, ranks, asked = ctx.mesh.group("sp"), ctx.mesh.size("sp"), settings(ctx.config)
    if ranks == 1:
        return model
    bound: list[Any] = [module for module in model.modules() if hasattr(module, "bind_sequence")]
    for module in bound:
        module.bind_sequence(group, asked.mode == "ring")
    root = root_model(model)
    if root is not None:
        ctx.stash[SHARDED] = ShardedModel(root, group, ring=_ring(root, asked, ctx), more=asked.inputs)
    elif asked.inputs:
        _cut_inputs(model, asked, ctx)
    elif not bound:
        log.warning(
            "sequence_parallel: nothing of the model is divided over the %d ranks of sp, which all do the same; use "
            "ds_sequence_parallel.DistributedAttention or RingAttention in it, and sequence_parallel.inputs",
            ranks,
        )
    return model


def _ring(model: Any, asked: SequenceParallelConfig, ctx: Context) -> bool:
    """Whether a transformers model goes round the ring: if the config says so, or has more ranks than heads."""
    if asked.mode != "auto":
        return asked.mode == "ring"
    text = getattr(model.config, "get_text_config", lambda: model.config)()
    heads = getattr(text, "num_attention_heads", None)
    if heads is None or not getattr(model, "_supports_attention_backend", False):
        return False
    tp = ctx.mesh.size("tp") if ctx.mesh.has("tp") else 1
    return bool(heads // tp < ctx.mesh.size("sp"))


def _cut_inputs(model: nn.Module, asked: SequenceParallelConfig, ctx: Context) -> None:
    """A hook that cuts the arguments of a plain module that `inputs` names; of a pipeline, inputs and labels."""
    pipeline = hasattr(model, "cut_batch")
    names = [name for name in inspect.signature(type(model).forward).parameters if name != "self"]
    names = ["inputs", "labels"] if pipeline else names
    rank, ranks, ring = ctx.mesh.index("sp"), ctx.mesh.size("sp"), asked.mode == "ring"
    unknown = [name for name in asked.inputs if name not in names]
    if unknown:
        takes = "a pipeline's micro-batch is" if pipeline else f"{type(model).__name__}.forward takes"
        raise UsageError(f"sequence_parallel.inputs names {', '.join(unknown)}, and {takes} {', '.join(names)}")

    def part(name: str, value: Any) -> Any:
        dim = asked.inputs.get(name)
        if dim is None or not isinstance(value, Tensor):
            return value
        layout = Layout(value.shape[dim], ranks, ring)
        if value.shape[dim] % (2 * ranks if ring else ranks):
            raise UsageError(
                f"sequence_parallel: {name} has {value.shape[dim]} positions, which do not divide into equal parts for "
                f"{ranks} ranks{' (two each)' if ring else ''}; pad it to a multiple of {2 * ranks if ring else ranks}"
            )
        return layout.cut(value, rank, dim).contiguous()

    if pipeline:

        def cut(inputs: Any, labels: Any) -> tuple[Any, Any]:
            return map_leaves(lambda x: part("inputs", x), inputs), map_leaves(lambda x: part("labels", x), labels)

        model.cut_batch = cut  # type: ignore[assignment]
        return

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        cut_args = tuple(part(name, value) for name, value in zip(names, args, strict=False))
        return cut_args, {name: part(name, value) for name, value in kwargs.items()}

    model.register_forward_pre_hook(before, with_kwargs=True)
