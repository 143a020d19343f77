"""A model whose forward receives theta, or whose layers are skipped from outside.

A skipped layer hands its input on. One that runs adds what it would, divided by its probability to
run, so that the expected sum is that of all layers.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state.blocks import chosen_or_repeated
from ds_run_state.changes import TrainingStandIn, changing
from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_progressive_layer_drop.schedule import keep_probability, runs, theta_at

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_progressive_layer_drop.config import ProgressiveLayerDropConfig

FLAG = "progressive_layer_drop"
THETA = "pld_theta"
_KEY = "progressive_layer_drop"


def drop_layers(model: nn.Module, ctx: Context, section: ProgressiveLayerDropConfig) -> nn.Module:
    """Let `model`, while it trains, skip layers as the section says.

    Raises UsageError for a model that has neither the arguments nor layers.
    """
    parameters = inspect.signature(type(model).forward).parameters
    if section.apply_to == "forward" or (section.apply_to == "auto" and THETA in parameters):
        with changing(model, ctx.undo):
            _pass_theta(model, ctx, section, parameters)
        return model
    layers = chosen_or_repeated(model, section.layers, f"{_KEY}.layers")
    if len(layers) < 2:
        raise UsageError(
            f"{_KEY}: {type(model).__name__} has no repeated layers; name them by {_KEY}.layers, "
            f"or let its forward take {THETA}"
        )
    known: dict[type, Any] = {}
    with changing(model, ctx.undo):
        for index, (name, module) in enumerate(layers.items()):
            module.forward = Skipped(module, name, index, len(layers), ctx, section, known)
    return model


def _pass_theta(
    model: nn.Module, ctx: Context, section: ProgressiveLayerDropConfig, parameters: Any
) -> None:
    """Give forward the documented arguments, as far as it accepts them."""
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    accepted = [name for name in (FLAG, THETA) if anything or name in parameters]
    if THETA not in accepted:
        raise UsageError(
            f'{_KEY}.apply_to is "forward", but the forward of {type(model).__name__} takes no '
            f'{THETA}; use "layers"'
        )

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # None: the engine was destroyed, and the module is no longer trained by it.
        if (engine := ctx.engine_ref()) is None:
            return None
        theta = theta_at(engine.global_steps, section.theta, section.gamma)
        given = {FLAG: module.training, THETA: theta}
        return args, {**kwargs, **{name: given[name] for name in accepted}}

    model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)


class Skipped(TrainingStandIn):
    """The forward of one layer, in the place of ``module.forward``."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        index: int,
        count: int,
        ctx: Context,
        section: ProgressiveLayerDropConfig,
        known: dict[type, Any],
    ) -> None:
        super().__init__(module, ctx)
        self.name = name
        # This layer's number among `count`, from 0.
        self.index = index
        self.count = count
        self.section = section
        # By class of layer: how many places its output's tuple has; 0 for a tensor. Shared by all.
        self.known = known

    def train(self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's output, or its input in the form of an output."""
        section = self.section
        theta = theta_at(step, section.theta, section.gamma)
        probability = keep_probability(self.index, self.count, theta)
        hidden = self._hidden(args, kwargs)
        if probability < 1 and not runs(section.seed, step, self.index, probability):
            return self._around(args, kwargs, hidden)
        out = self._run(args, kwargs, hidden)
        if probability >= 1 or not section.rescale:
            return out
        # What the layer adds is divided by how often it runs: the expected sum is that of a full
        # run.
        new = hidden + ((out[0] if isinstance(out, tuple) else out) - hidden) / probability
        return (new, *out[1:]) if isinstance(out, tuple) else new

    def _hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The hidden states among the inputs: the first tensor, or the one of that name."""
        found = kwargs.get(
            "hidden_states",
            next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None),
        )
        if not isinstance(found, Tensor):
            raise UsageError(
                f"{_KEY}: layer {self.name!r} is given no tensor; name other modules by "
                f"{_KEY}.layers"
            )
        return found

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> Any:
        """The layer's output. UsageError where the input could not stand for it."""
        out = self.forward(*args, **kwargs)
        new = out[0] if isinstance(out, tuple) else out
        if not isinstance(new, Tensor) or new.shape != hidden.shape:
            raise UsageError(
                f"{_KEY}: layer {self.name!r} cannot be skipped: its output does not have the "
                f"shape of its input, {tuple(hidden.shape)}; name other modules by {_KEY}.layers"
            )
        self.known[type(self.module)] = len(out) if isinstance(out, tuple) else 0
        return out

    def _around(self, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> Any:
        """`hidden` as an output of this class: alone, or in a tuple whose other places are None."""
        # A resumed run may begin with a layer that is skipped: it runs once, without effect on
        # gradients and random numbers, to show what its output looks like.
        if type(self.module) not in self.known:
            devices = [] if hidden.device.type == "cpu" else [hidden.device]
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                self._run(args, kwargs, hidden)
        places = self.known[type(self.module)]
        return (hidden, *[None] * (places - 1)) if places else hidden
