"""The properties of a run that its memory depends on, besides the model and how it is distributed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ds_core.precision import Precision

if TYPE_CHECKING:
    from ds_core.config import RunConfig


class BuildsOptimizer(Protocol):
    """The config's optimizer: `ds_core.setup.compose.Composition.optimizer`."""

    def groups(self, groups: Any, names: Mapping[Any, str]) -> Any:
        """The parameter groups as the optimizer wants them split."""

    def build(self, target: Any) -> Any:
        """The optimizer of those groups."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run that is planned."""

    world: int
    """Data-parallel ranks."""

    precision: Precision = field(default_factory=Precision)

    states: int = 2
    """Elements that the optimizer keeps per parameter element (Adam: 2)."""

    gas: int = 1
    """Micro-batches per step."""

    casts: bool = True
    """Whether the optimizer needs gradients in its tensors' dtype; see `ds_core.partition.stepping`."""

    wide: bool = False
    """Whether the states of 16-bit tensors are fp32; else they have the dtype of what is updated."""

    narrow: int | None = None
    """Bytes of the states per element, where a state is stored in fewer bits than its values have.

    Such as those of an optimizer in 8 bits; None: as `states` and `wide` say.
    """

    @classmethod
    def of(
        cls,
        config: RunConfig,
        optimizer: BuildsOptimizer | None,
        precision: Precision,
        module: nn.Module,
        world: int,
    ) -> PlannedRun:
        """The run of a config.

        optimizer: the config's.
        module: the model, in the dtypes of training.
        """
        like = next((p for p in module.parameters() if p.requires_grad), None)
        measured = measure_states(optimizer, precision, like)
        return cls(
            world=world,
            precision=precision,
            states=measured.states,
            gas=config.core.gradient_accumulation_steps or 1,
            casts=measured.casts,
            # An engine would have the optimizer narrow its states; there is none here.
            wide=measured.wide and not config.core.bf16.bf16_optimizer_states,
            narrow=measured.narrow,
        )

    def kept(self, updated: torch.dtype) -> int:
        """Bytes of the optimizer's states per element of a tensor of dtype `updated`."""
        if self.narrow is not None:
            return self.narrow
        return self.states * (max(4, updated.itemsize) if self.wide else updated.itemsize)


class States(NamedTuple):
    """What an optimizer keeps and needs: the fields of `PlannedRun` with these names."""

    states: int
    wide: bool
    casts: bool
    narrow: int | None = None


def measure_states(
    optimizer: BuildsOptimizer | None, precision: Precision, like: nn.Parameter | None = None
) -> States:
    """Measured in a small step of a tensor as the optimizer updates it; Adam's without an optimizer.

    optimizer: the config's.
    like: a parameter of the model; what is written on it (``infshape``, ``use_muon``) is on the
        tensor too.
    """
    if optimizer is None:
        return States(2, wide=False, casts=True)
    # A square matrix, and not a small one: states of one element (counters) must round to nothing,
    # and optimizers for matrices must accept it.
    weight = nn.Parameter(
        torch.zeros(64, 64, dtype=precision.master or precision.param or torch.float32)
    )
    weight.__dict__.update(vars(like) if like is not None else {})
    weight.grad = torch.ones_like(weight)
    made = optimizer.build(optimizer.groups([{"params": [weight]}], {weight: "weight"}))
    made.step()
    kept = [v for v in made.state.get(weight, {}).values() if isinstance(v, torch.Tensor)]
    return States(
        round(sum(v.numel() for v in kept) / weight.numel()),
        wide=any(
            v.shape == weight.shape and v.dtype.itemsize > weight.dtype.itemsize for v in kept
        ),
        casts=not getattr(made, "takes_inputs", False),
        narrow=_narrow_bytes(kept, weight.numel()),
    )


def _narrow_bytes(states: list[torch.Tensor], elements: int) -> int | None:
    """Bytes per element, rounded, where some state is made of other tensors; else None."""
    if not any(map(is_traceable_wrapper_subclass, states)):
        return None
    return round(sum(map(_bytes, states)) / elements)


def _bytes(tensor: Any) -> int:
    if is_traceable_wrapper_subclass(tensor):
        return sum(_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return int(tensor.numel() * tensor.itemsize)
