"""Eigenvalues inside an engine: computed in the first micro-batch of a step, and followed by the
bits of weights.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ds_compression import clock
from ds_compression.eigenvalue.power_iteration import (
    Vectors,
    blocks_of,
    largest_eigenvalue,
    relative,
)
from ds_compression.layers.layer import Compression, compressed_modules
from ds_compression.schedule import Pace
from ds_core import comm
from ds_core.context import StashKey
from ds_core.errors import ConfigError, Problem, UsageError

if TYPE_CHECKING:
    from ds_compression.eigenvalue.config import EigenvalueConfig
    from ds_core.context import Context

log = logging.getLogger("ds_compression")


def follow(model: nn.Module, section: EigenvalueConfig, ctx: Context) -> nn.Module:
    """Compute the eigenvalues of the blocks of `model` as it trains, and let its compressed layers
    follow them.
    """
    if ctx.mesh.size("batch") < ctx.world_size:
        why = "needs the whole model on each rank, and a mesh axis divides it"
        raise ConfigError([Problem("eigenvalue.enabled", why, "switch it off")], ctx.config.origin)
    try:
        blocks = blocks_of(model, section.layer_name, section.layer_num)
    except ValueError as error:
        problem = Problem("eigenvalue", str(error), "name the list of layers, and count them")
        raise ConfigError([problem], ctx.config.origin) from None
    found = ctx.stash[_SENSITIVITY] = Sensitivity(model, blocks, section, ctx)
    before = torch.compiler.disable(found.before)
    after = torch.compiler.disable(found.after)
    hooks = [
        model.register_forward_pre_hook(before),
        model.register_forward_hook(after, always_call=True),
    ]
    for hook in hooks:
        ctx.undo(hook.remove)
    progress = clock.progress_of(model)
    if progress is not None:
        progress.factor = found.factor
        ctx.undo(lambda: setattr(progress, "factor", None))
    return model


class Sensitivity:
    """The eigenvalues of one engine's blocks, and when its layers lose bits."""

    def __init__(
        self, model: nn.Module, blocks: list[nn.Module], section: EigenvalueConfig, ctx: Context
    ) -> None:
        self.ctx = ctx
        self.section = section
        self.blocks = blocks
        self.values: list[float] = []
        self.new = False
        self._model = model
        self._layers = [c for _, c in compressed_modules(model)]
        self._step = -1  # the last one that was looked at
        self._running: contextlib.ExitStack | None = None
        for layer in self._layers:
            if layer.quantiser is not None:
                layer.quantiser.pace = Pace(layer.quantiser.period)

    def __deepcopy__(self, memo: Any) -> Sensitivity:
        return self

    def factor(self, name: str) -> int:
        """By how much a layer's next period is longer, from 1 to 5: MoQ's rule.

        Layers outside the blocks have 1.
        """
        for value, index in zip(relative(self.values), range(len(self.blocks)), strict=False):
            if name.startswith(f"{self.section.layer_name}.{index}."):
                return 1 + int(value * 4)
        return 1

    def _is_due(self) -> bool:
        engine = self.ctx.engine_ref()
        if engine is None or not self._model.training or not torch.is_grad_enabled():
            return False
        if engine.global_steps == self._step:
            return False  # only the first micro-batch of a step
        self._step = engine.global_steps
        if self._step % self.section.gas_boundary_resolution:
            return False
        coming = [c.quantiser for c in self._layers if c.quantiser is not None]
        return not coming or any(q.bits != q.target for q in coming)

    def before(self, model: nn.Module, args: Any) -> None:
        """Have the forward made of operations that can be derived twice, if this one is looked
        at."""
        if not self._is_due():
            return
        self._running = contextlib.ExitStack()
        # Fused attention has no second derivative.
        self._running.enter_context(sdpa_kernel(SDPBackend.MATH))
        for layer in self._layers:
            layer.twice = True
            self._running.callback(_once, layer)

    def after(self, model: nn.Module, args: Any, outputs: Any) -> None:
        """Compute the eigenvalues from the loss, which the model gives. Collective."""
        running, self._running = self._running, None
        if running is None:
            return
        with running:
            if outputs is not None:  # None after an exception
                self._compute(_loss_in(outputs))

    def _compute(self, loss: Tensor) -> None:
        params = [[p for p in block.parameters() if p.requires_grad] for block in self.blocks]
        flat = [p for each in params for p in each]
        if divided := [self.ctx.params[p].name for p in flat if self.ctx.params[p].held]:
            raise UsageError(
                f"eigenvalue: ranks have different parts of {divided[0]}; switch "
                "eigenvalue.enabled off"
            )
        # One graph for all blocks; its gradients can be derived again.
        with torch.enable_grad():
            made = torch.autograd.grad(loss.float(), flat, create_graph=True, allow_unused=True)
        grads = dict(zip(flat, made, strict=True))
        self.values = []
        for index, each in enumerate(params):
            value, iterations = largest_eigenvalue(
                [grads[p] if grads[p] is not None else torch.zeros_like(p) for p in each],
                each,
                torch.Generator().manual_seed(index),
                max_iter=self.section.max_iter,
                tol=self.section.tol,
                stability=self.section.stability,
                average=self._average,
            )
            self.values.append(value)
            if self.section.verbose and self.ctx.rank == 0:
                log.info("block %d: eigenvalue %.6g after %d iterations", index, value, iterations)
        self.new = True

    def _average(self, vectors: Vectors) -> None:
        """The Hessian of the mean loss is the mean of the ranks' Hessians."""
        ranks = self.ctx.mesh.size("dp")
        if ranks == 1:
            return
        flat = torch.cat([v.flatten() for v in vectors])
        comm.label("products of eigenvalue")
        comm.all_reduce(flat, group=self.ctx.mesh.group("dp"))
        flat /= ranks
        for vector, part in zip(vectors, flat.split([v.numel() for v in vectors]), strict=True):
            vector.copy_(part.view_as(vector))

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The eigenvalues, and each layer's pace."""
        paces = {
            c.name: c.quantiser.pace.as_list()
            for c in self._layers
            if c.quantiser and c.quantiser.pace
        }
        return {"values": list(self.values), "paces": paces}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the checkpoint would have."""
        self.values = list(state["values"])
        for layer in self._layers:
            if layer.quantiser is not None and layer.name in state["paces"]:
                layer.quantiser.pace = Pace(*state["paces"][layer.name])


_SENSITIVITY: StashKey[Sensitivity] = StashKey("eigenvalue")


def _once(layer: Compression) -> None:
    layer.twice = False


def _loss_in(outputs: Any) -> Tensor:
    """The loss that a model gives: what it returns, the first of it, or its field ``loss``."""
    candidates = [outputs, getattr(outputs, "loss", None)]
    if isinstance(outputs, (tuple, list)) and outputs:
        candidates.append(outputs[0])
    if isinstance(outputs, Mapping):
        candidates.append(outputs.get("loss"))
    for found in candidates:
        if isinstance(found, Tensor) and found.dim() == 0 and found.requires_grad:
            return found
    raise UsageError(
        "eigenvalue: the model must return its loss (a tensor, the first of a tuple, or `loss` of "
        "an output): "
        "give it the labels, or switch eigenvalue.enabled off"
    )


def metrics(ctx: Context) -> Mapping[str, float]:
    """What monitors are given."""
    found = ctx.stash.get(_SENSITIVITY)
    if found is None or not found.new:
        return {}
    found.new = False
    return {f"Train/Eigenvalues/ModelBlockParam_{i}": value for i, value in enumerate(found.values)}


def kept_state(ctx: Context) -> Mapping[str, Any]:
    """What checkpoints keep."""
    found = ctx.stash.get(_SENSITIVITY)
    return {} if found is None else {"eigenvalue": found}
