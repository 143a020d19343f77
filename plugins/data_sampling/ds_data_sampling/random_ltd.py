"""Layers that work on some of the tokens (random layer token drop, Yao et al. 2022): the others
pass them by.

Which tokens a layer keeps in a step depends on the seed, the step, the layer and the length of the
sequences alone. So all ranks agree, recomputation in backward too, and a resumed run goes on alike;
all sequences of a step keep the same places.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state.blocks import chosen_or_repeated
from ds_run_state.changes import TrainingStandIn, changing
from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_core.nested import map_leaves
from ds_data_sampling.curricula.schedules import fixed_root

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_data_sampling.random_ltd_config import RandomLTD

_KEY = "data_efficiency.data_routing.random_ltd"
_MARK = "random_ltd_class"


def convert_to_random_ltd(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Say which class the layers are that may drop tokens; without it they are the model's repeated
    blocks.

    DeepSpeed's name. The model stays as it is, its parameters keep their names; `initialize` does
    the rest.
    """
    model.__dict__[_MARK] = convert_type.__name__
    return model


def save_without_random_ltd(model: nn.Module) -> dict[str, Any]:
    """DeepSpeed's name of ``model.state_dict()``: here no layer is wrapped, so names are plain
    anyway.
    """
    return model.state_dict()


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The same values under the names that layers have without DeepSpeed's wrapper; DeepSpeed's
    name.
    """
    return {name.replace(".random_ltd_layer", ""): value for name, value in state_dict.items()}


def kept_length(section: RandomLTD, step: int) -> int:
    """How many tokens a layer keeps after `step` optimizer steps: linear, rounded down to
    ``seq_per_step``.
    """
    plan = section.random_ltd_schedule
    assert plan is not None
    numbers = plan.schedule_config
    return fixed_root(
        step, plan.min_value, plan.max_value, numbers.require_steps, numbers.seq_per_step
    )


def kept_places(seed: int, step: int, layer: int, kept: int, length: int) -> Tensor:
    """`kept` of the places 0 to `length` - 1, in order: int64 on the CPU."""
    word = hashlib.blake2b(f"random ltd {seed} {step} {layer}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(word, "big"))
    return torch.randperm(length, generator=generator)[:kept].sort().values


def drop_tokens(model: nn.Module, ctx: Context, section: RandomLTD, seed: int) -> nn.Module:
    """Let the layers that `section` names work on some of the tokens while `model` trains.

    Raises UsageError where the model has another number of layers than the section says.
    """
    name = model.__dict__.get(_MARK)
    layers = chosen_or_repeated(model, None if name is None else [name], _KEY)
    if len(layers) != section.total_layer_num:
        raise UsageError(
            f"{_KEY}.total_layer_num is {section.total_layer_num}, but {type(model).__name__} has "
            f"{len(layers)} {name or 'repeated'} layers; correct it, or name their class by "
            "convert_to_random_ltd(model, Class)"
        )
    modules = list(layers.items())
    with changing(model, ctx.undo):
        for index in section.random_ltd_layer_id or ():
            where, module = modules[index]
            module.forward = SomeTokens(module, where, index, ctx, section, seed)
    return model


class SomeTokens(TrainingStandIn):
    """The forward of one layer, in the place of ``module.forward``."""

    def __init__(
        self, module: nn.Module, name: str, index: int, ctx: Context, section: RandomLTD, seed: int
    ) -> None:
        super().__init__(module, ctx)
        self.name = name
        # This layer's number, from 0: layers keep different tokens.
        self.index = index
        self.section = section
        self.seed = seed

    def train(self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's output, with the tokens that it did not see as they came."""
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        if not isinstance(hidden, Tensor) or hidden.dim() < 3:
            raise UsageError(
                f"{_KEY}: layer {self.name!r} is not given hidden states of three dimensions"
            )
        along = 1 if self.section.hidden_state_order == "batch_seq_dim" else 0
        length = hidden.shape[along]
        kept = kept_length(self.section, step)
        if kept >= length:
            return self.forward(*args, **kwargs)
        # The layer sees the kept tokens, and masks and positions cut to them.
        places = kept_places(self.seed, step, self.index, kept, length).to(hidden.device)
        part = hidden.index_select(along, places)
        some = _Some(self.name, places, length, self.section.model_mask_name)
        if "hidden_states" in kwargs:
            out = self.forward(
                *some.of(args), **{**some.named(kwargs, "hidden_states"), "hidden_states": part}
            )
        else:
            out = self.forward(part, *some.of(args[1:]), **some.named(kwargs))
        new = out[0] if isinstance(out, tuple) else out
        if not isinstance(new, Tensor) or new.shape != part.shape:
            raise UsageError(
                f"{_KEY}: the output of layer {self.name!r} does not have the shape of its input"
            )
        # Its output goes back to their places; the other tokens pass by.
        whole = hidden.index_copy(along, places, new.to(hidden.dtype))
        return (whole, *out[1:]) if isinstance(out, tuple) else whole


class _Some:
    """What goes with hidden states, for the tokens that are kept: masks, positions and their
    embeddings.
    """

    def __init__(self, layer: str, places: Tensor, length: int, mask: str | None) -> None:
        self.layer = layer
        self.places = places
        self.length = length
        self.mask = mask

    def of(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments by place."""
        return tuple(map_leaves(self._one, value) for value in values)

    def named(self, values: Mapping[str, Any], but: str = "") -> dict[str, Any]:
        """Arguments by name, without `but`; the mask in its last two dimensions."""
        given = {name: value for name, value in values.items() if name != but}
        mask = given.pop(self.mask, None) if self.mask is not None else None
        found = {name: map_leaves(self._one, value) for name, value in given.items()}
        if isinstance(mask, Tensor):
            found[str(self.mask)] = self._cut(mask, (mask.dim() - 2, mask.dim() - 1))
        return found

    def _one(self, value: Any) -> Any:
        """(batch, tokens, ...) or (tokens,); a mask that is not named is an error, since no
        dimension says so.
        """
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 4 and value.shape[-1] == self.length:
            raise UsageError(
                f"{_KEY}: layer {self.layer!r} is given a tensor of shape {tuple(value.shape)}; if "
                "it is the attention mask, give its name as model_mask_name"
            )
        return self._cut(value, (1,) if value.dim() > 1 else (0,)) if value.dim() else value

    def _cut(self, value: Tensor, dims: tuple[int, ...]) -> Tensor:
        for dim in dims:
            if value.shape[dim] == self.length:
                value = value.index_select(dim, self.places.to(value.device))
        return value
