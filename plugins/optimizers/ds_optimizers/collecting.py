"""The base of optimizers on kernels that look at more than one element, wherever the others are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from ds_optimizer_kit import Layout
from torch import Tensor

from ds_optimizers.base import KernelOptimizer
from ds_optimizers.moments.rows import Rows

if TYPE_CHECKING:
    from ds_state_stores import StateStore

    from ds_core.partition import StepInputs


class CollectingOptimizer(KernelOptimizer):
    """`update` handles what this rank can do alone and notes the rest, which `collect` does for all.

    `update` is called for what this rank has: another number of times on each rank, so that it may
    not communicate. `collect` is called once in every step, on every rank.
    """

    def _find_anew(self) -> None:
        super()._find_anew()
        self.layout: Layout | None = None
        # What `rows_of` has found, by the id of the parameter and the number of dimensions.
        self._rows: dict[tuple[int, int], Rows] = {}

    def bind_layout(self, layout: Layout) -> None:
        """Where the tensors of this optimizer lie in full parameters; without it they are full."""
        self.layout = layout
        self._rows.clear()

    def step_in_parts(self, store: StateStore) -> None:
        """See `ds_optimizer_kit.MatrixOptimizer.step_in_parts`; all states are of parameters."""

    def rows_of(self, param: Tensor, lead: int) -> Rows:
        """The rows of a parameter whose first `lead` dimensions number them; worked out once."""
        key = id(param), lead
        if key not in self._rows:
            layout = Layout.local([param]) if self.layout is None else self.layout
            self._rows[key] = Rows.of(layout.parts[param], lead)
        return self._rows[key]

    def collects(self, group: dict[str, Any]) -> bool:
        """Whether parameters of `group` are looked at as a whole."""
        return True

    def collect(self) -> None:
        """What needs other ranks, after `update` has seen everything of this rank. Collective."""

    def _update_all(self, sizes: Iterator[int], inputs: StepInputs) -> None:
        if self.layout is not None:
            inputs = self._complete(self.layout, inputs)
        super()._update_all(sizes, inputs)
        self.collect()

    def _complete(self, layout: Layout, inputs: StepInputs) -> StepInputs:
        """With gradients of zero where other ranks have a gradient of the same parameter.

        As in one process, where an expert that got no token has one in its stack.
        """
        params = [p for g in self.param_groups for p in g["params"]]
        grads = [p.grad for p in params] if inputs.grads is None else list(inputs.grads)
        wanted = {p for g in self.param_groups if self.collects(g) for p in g["params"]}
        having = [p for p, g in zip(params, grads, strict=True) if g is not None and p in wanted]
        self.used = layout.used(having)
        for place, (param, grad) in enumerate(zip(params, grads, strict=True)):
            if grad is None and param in self.used and param.numel():
                grads[place] = torch.zeros_like(param)
        return replace(inputs, grads=grads)


def wide(tensor: Tensor) -> Tensor:
    """`tensor` in the dtype of sums and products: itself unless it has 16 bits."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
