"""Compression inside an engine: it follows the engine's steps, and what depends on all ranks is
agreed on.

Masks and ranges are equal on all ranks that share a layer: masks of absolute values and of learned
scores follow from the weights, ranges and the scores of snip_momentum are reduced here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from ds_access.states import locate
from ds_run_state.blocks import check_missing
from torch import Tensor, nn

from ds_compression import clock
from ds_compression.apply import apply_section
from ds_compression.clock import Progress
from ds_compression.config import CompressionConfig
from ds_compression.layers.layer import Compressed, Compression, Mask, compressed_modules, matrix
from ds_compression.layers.quantise import widened
from ds_compression.schedule import changes, kept_at
from ds_core import comm
from ds_core.context import StashKey
from ds_core.errors import ConfigError, Problem, UsageError

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.gradients import Gradients, GradientShard

MOMENTUM = 0.9
"""Of the scores of snip_momentum: what is left of them after a step.

As in Intel's Neural Compressor.
"""
RANGE_MOMENTUM = 0.95
"""Of running ranges of inputs: what is left of them after a step."""


def prepare(model: nn.Module, section: CompressionConfig, ctx: Context) -> nn.Module:
    """The model with compressed layers, which follow the engine's steps from now on.

    Raises ConfigError where layers are divided over ranks, or the model was prepared by another
    config.
    """
    if ctx.mesh.has("tp") and ctx.mesh.size("tp") > 1:
        why = (
            f"layers are divided over {ctx.mesh.size('tp')} ranks, and compression needs whole ones"
        )
        problem = Problem(
            "compression_training",
            why,
            "set tensor_parallel.autotp_size to 1, or remove the section",
        )
        raise ConfigError([problem], ctx.config.origin)
    progress = clock.progress_of(model)
    if progress is None:
        _check_reduction(section, ctx)
        apply_section(model, section)
    elif progress.section != section:
        why = "is not what init_compression was given"
        raise ConfigError(
            [Problem("compression_training", why, "give both the same config")], ctx.config.origin
        )
    progress = clock.progress_of(model)
    assert progress is not None
    check_missing(progress.missing, ctx.config.origin)
    if not section.techniques():
        return model
    ctx.stash[_SCORES] = _Scores(ctx)
    for hook in progress.hooks[1:]:
        hook.remove()  # of an engine before this one
    # A compiled model would be compiled again for each step's numbers.
    follow = torch.compiler.disable(_Follow(ctx, progress))
    progress.hooks[1:] = [model.register_forward_pre_hook(follow)]
    # Layers stay compressed when the engine ends: their masks are what was trained.
    # `redundancy_clean` ends it.
    ctx.undo(progress.hooks[1].remove)
    return model


def _check_reduction(section: CompressionConfig, ctx: Context) -> None:
    if section.layer_reduction.enabled:
        fix = (
            "call ds_compression.init_compression(model, config, teacher_model=...) before "
            "initialize"
        )
        problem = Problem("compression_training.layer_reduction", "needs a teacher", fix)
        raise ConfigError([problem], ctx.config.origin)


class _Follow:
    """A forward pre-hook: the model does what the schedule says for the engine's step."""

    def __init__(self, ctx: Context, progress: Progress) -> None:
        self._ctx = ctx
        self._progress = progress

    def __deepcopy__(self, memo: Any) -> _Follow:
        return self

    def __call__(self, model: nn.Module, args: Any) -> None:
        engine = self._ctx.engine_ref()
        if engine is not None and engine.global_steps != self._progress.step:
            clock.set_step(model, engine.global_steps)


def loaded(ctx: Context) -> None:
    """A checkpoint was loaded: look at masks and ranges again."""
    progress = clock.progress_of(ctx.module) if ctx.module is not None else None
    if progress is not None:
        progress.step = None


# -- after backward --------------------------------------------------------------------------------


def after_backward(ctx: Context, gradients: Gradients) -> None:
    """Update ranges, scores and the masks that follow from scores. Collective."""
    scores = ctx.stash.get(_SCORES)
    if scores is None or ctx.module is None:
        return
    if gradients.step == 0 or not scores.checked:
        _check_trained(ctx)
        scores.checked = True
    layers = list(_named(ctx.module))
    _update_ranges(ctx, layers)
    pruned = {
        f"{name}.weight": (m, mask)
        for name, m, c in layers
        for mask in c.masks
        if mask.pattern is not None
    }
    if pruned:
        scores.update(pruned, gradients)


def _named(model: nn.Module) -> Iterator[tuple[str, Compressed, Compression]]:
    known = dict(compressed_modules(model))
    for name, module in model.named_modules():
        if isinstance(module, Compressed):
            yield name, module, known[module]


def _check_trained(ctx: Context) -> None:
    """Raise UsageError where learned scores are not among what the optimizer updates."""
    assert ctx.module is not None
    trained = {id(p) for p in ctx.trained}
    for name, module, compression in _named(ctx.module):
        for mask in compression.masks:
            if mask.learned and id(module._parameters[mask.tensor]) not in trained:
                raise UsageError(
                    f"the optimizer has not got {name}.{mask.tensor}, by which {name} is pruned: "
                    "call "
                    "ds_compression.init_compression before the optimizer or model_parameters are "
                    "made"
                )


# -- ranges of inputs ------------------------------------------------------------------------------


def _update_ranges(ctx: Context, layers: list[tuple[str, Compressed, Compression]]) -> None:
    """The running range of each layer gets what all ranks' micro-batches of this step had."""
    groups: dict[tuple[str, ...], list[tuple[Compressed, Compression]]] = {}
    for name, module, compression in layers:
        if compression.inputs is not None and compression.inputs.static:
            axes = ctx.buffers[f"{name}.activation_range"].replicas
            groups.setdefault(axes, []).append((module, compression))
    for axes, members in sorted(groups.items()):
        # A rank whose batch did not reach the layer takes part with the empty range.
        unused = torch.full((2,), -torch.inf, device=ctx.accelerator.current_device())
        seen = torch.stack(
            [c.inputs.seen[0] if c.inputs and c.inputs.seen else unused for _, c in members]
        )
        if axes:
            comm.all_reduce(seen, op=torch.distributed.ReduceOp.MAX, group=ctx.mesh.group(*axes))
        for (module, compression), (low, high) in zip(members, seen.unbind(), strict=True):
            quantiser = compression.inputs
            assert quantiser is not None
            quantiser.seen.clear()
            new = torch.stack([-low, high])
            if not bool(new.isfinite().all()):
                continue  # no rank used the layer
            kept = module._buffers["activation_range"]
            assert kept is not None
            kept.copy_(kept.lerp(new.to(kept), 1 - RANGE_MOMENTUM) if quantiser.known else new)
            quantiser.known = bool(kept.any())


# -- snip_momentum ---------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True, eq=False)
class _Part:
    """This rank's elements of the scores of one weight: the range [start, stop), flat."""

    start: int
    stop: int
    values: Tensor


class _Scores:
    """The scores of weights that are pruned in steps: fading sums of |weight times gradient|,
    sharded like gradients.

    SNIP (Lee et al., 2019) with momentum.
    """

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._parts: dict[str, _Part] = {}
        self._loaded: dict[str, Tensor] = {}
        self.checked = False

    def update(self, pruned: Mapping[str, tuple[Compressed, Mask]], gradients: Gradients) -> None:
        """Add this step's products, and make the masks of the next step where the schedule has new
        ones. Collective.
        """
        section = self.ctx.config.section(CompressionConfig)
        assert section is not None
        shared = section.sparse_pruning.shared_parameters
        coming = gradients.step + 1  # the step that the masks are for
        # The last masks have been made.
        if coming > max(shared.end, 1):
            return
        for shard in gradients.shards:
            if shard.name in pruned:
                self._add(shard, gradients.factor)
        self._loaded.clear()  # they are in the parts now
        # there is no score before the first backward
        first = max(1, shared.schedule_offset)
        end = max(1, shared.end)
        if not changes(coming, first, end, shared.schedule_offset_stride):
            return
        # A pattern compares elements of a whole block or row, which may be spread over several
        # ranks.
        whole = self._whole(list(pruned))
        for name, (module, mask) in pruned.items():
            assert mask.pattern is not None
            score = matrix(module, whole[name])
            kept = mask.pattern.mask(score, kept_at(coming, first, end, mask.ratio))
            buffer = module._buffers[mask.tensor]
            assert buffer is not None
            buffer.copy_(kept.view(buffer.shape))
            mask.made = True

    def _add(self, shard: GradientShard, factor: float) -> None:
        held = locate(self.ctx.engine, self._param(shard.name))
        assert held is not None
        begin = held.updated_ranges[held.index][0]
        # The weight's elements that belong to this shard of the gradient.
        weight = held.read(held.updated).reshape(-1)[shard.start - begin : shard.stop - begin]
        grad = shard.tensor.reshape(-1).to(weight.device)
        product = (widened(weight) * widened(grad) * factor).abs()
        part = self._parts.get(shard.name)
        if part is None:
            part = self._parts[shard.name] = _Part(
                shard.start, shard.stop, torch.zeros_like(product)
            )
            if (loaded := self._loaded.get(shard.name)) is not None:
                part.values.copy_(loaded.reshape(-1)[shard.start : shard.stop])
        part.values.mul_(MOMENTUM).add_(product)

    def _param(self, name: str) -> nn.Parameter:
        return next(p for p, info in self.ctx.params.items() if info.name == name)

    def _whole(self, names: list[str]) -> dict[str, Tensor]:
        """The scores of the weights `names`, whole, in their shapes, fp32.

        Collective over those that share them.
        """
        ctx = self.ctx
        found = {}
        for name in names:
            param = self._param(name)
            info = ctx.params[param]
            shape = torch.Size(getattr(param, "ds_shape", param.shape))
            dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
            flat = torch.zeros(shape.numel(), device=ctx.accelerator.current_device(), dtype=dtype)
            loaded = self._loaded.get(name)
            part = self._parts.get(name)
            # Elements of other ranks are 0 here, and scores are never negative: the maximum over
            # ranks puts them together.
            if part is not None:
                flat[part.start : part.stop] = part.values.to(flat)
            elif loaded is not None:
                flat.copy_(loaded.reshape(-1))
            if info.replicas:
                comm.all_reduce(
                    flat, op=torch.distributed.ReduceOp.MAX, group=ctx.mesh.group(*info.replicas)
                )
            found[name] = flat.view(shape)
        return found

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole scores, on every rank that shares a weight. Collective."""
        assert self.ctx.module is not None
        names = [
            f"{n}.weight"
            for n, _, c in _named(self.ctx.module)
            if any(m.pattern is not None for m in c.masks)
        ]
        return {"scores": {name: score.cpu() for name, score in self._whole(names).items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the scores of a checkpoint, of any world size."""
        self._parts.clear()
        self._loaded = dict(state["scores"])


_SCORES: StashKey[_Scores] = StashKey("compression")


def kept_state(ctx: Context) -> Mapping[str, Any]:
    """The scores, where a layer is pruned in steps."""
    scores = ctx.stash.get(_SCORES)
    if scores is None or ctx.module is None:
        return {}
    snip = any(m.pattern is not None for _, c in compressed_modules(ctx.module) for m in c.masks)
    return {"scores": scores} if snip else {}
