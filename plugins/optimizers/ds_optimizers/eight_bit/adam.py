"""Adam and AdamW with moments in 8 bits (Dettmers et al. 2022,
https://arxiv.org/abs/2110.02861).

A step reads some blocks after the others into fp32, updates them by the kernel of `Adam`, and stores
them again. Blocks are those of the flattened parameter: a range of ZeRO's begins
within one where it does in the whole, so that only blocks that ranks share differ from one process,
and those of slices.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ds_optimizers.adam import FusedAdam
from ds_optimizers.base import StepBatch
from ds_optimizers.eight_bit.blocks import SIZE, Blocks

if TYPE_CHECKING:
    from ds_optimizer_kit import Layout
    from ds_state_stores import StateStore


class Adam8bit(FusedAdam):
    """Adam, decoupled (AdamW) unless `adam_w_mode` is false, with moments in 8 bits.

    min_8bit_size: elements of the smallest parameter whose moments have 8 bits; others, complex ones
        and those that stages of a pipeline share have fp32.

    States ``exp_avg`` and ``exp_avg_sq`` read as fp32 (`ds_optimizers.eight_bit.blocks.Blocks`), also
    in checkpoints.
    """

    in_portions: ClassVar[bool] = False
    scales: ClassVar[bool] = True
    kept: ClassVar[tuple[str, ...]] = (*FusedAdam.kept, "min_8bit_size", "set_grad_none")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        min_8bit_size: int = 4096,
    ) -> None:
        if min_8bit_size < 0:
            raise ValueError(f"min_8bit_size {min_8bit_size} must not be negative")
        self.min_8bit_size = min_8bit_size
        super().__init__(params, lr, bias_correction, betas, eps, adam_w_mode, weight_decay)

    def _find_anew(self) -> None:
        super()._find_anew()
        self.layout: Layout | None = None

    def bind_layout(self, layout: Layout) -> None:
        """Where the tensors of this optimizer lie in full parameters; without it they are full."""
        self.layout = layout

    def step_in_parts(self, store: StateStore) -> None:
        """See `ds_optimizer_kit.MatrixOptimizer.step_in_parts`; all states are of parameters."""

    def begin(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """See `KernelOptimizer.begin`."""
        if not self._in_8_bits(param):
            return super().begin(param, group)
        return {
            name: Blocks.zeros(param.shape, param.device, name == "exp_avg", self._first(param))
            for name in self.states
        }

    def update(self, group: dict[str, Any], batch: StepBatch) -> None:
        """See `KernelOptimizer.update`."""
        narrow = [i for i, owner in enumerate(batch.owners) if self._in_8_bits(owner)]
        if len(narrow) < len(batch.owners):
            super().update(group, batch.without(narrow) if narrow else batch)
        for i in narrow:
            self._update_narrow(group, batch, i)

    def _update_narrow(self, group: dict[str, Any], batch: StepBatch, i: int) -> None:
        """The update of one parameter, some blocks at a time."""
        owner = batch.owners[i]
        moments = [self._blocks(owner, name) for name in self.states]
        copy = None if batch.copies is None else batch.copies[i]
        param, grad = (x.reshape(-1) for x in (batch.params[i], batch.grads[i]))
        wide = torch.promote_types(param.dtype, torch.float32)
        for part in moments[0].portions():
            parts = [moment.read(part).to(wide) for moment in moments]
            piece = replace(
                batch,
                owners=[owner],
                params=[param[part]],
                grads=[grad[part]],
                states=[[x] for x in parts],
                copies=None,
            )
            super().update(group, piece)
            for moment, x in zip(moments, parts, strict=True):
                moment.store(part, x)
        if not batch.params[i].is_contiguous():
            # What was updated is a copy in another order.
            batch.params[i].copy_(param.view(batch.params[i].shape))
        if copy is not None:
            copy.copy_(batch.params[i])

    def _blocks(self, owner: Tensor, name: str) -> Blocks:
        """The moment; of a checkpoint, which has it in fp32, it is made again."""
        moment = self.state[owner][name]
        if not isinstance(moment, Blocks):
            moment = Blocks.of(moment, name == "exp_avg", self._first(owner))
            self.state[owner][name] = moment
        return moment

    def _in_8_bits(self, param: Tensor) -> bool:
        part = None if self.layout is None else self.layout.parts[param]
        # Copies of a tied parameter must stay equal, and ranks that cut them elsewhere have other
        # blocks.
        if param.is_complex() or (part is not None and part.tied):
            return False
        return math.prod(param.shape if part is None else part.shape) >= self.min_8bit_size

    def _first(self, param: Tensor) -> int:
        """Where the tensor begins in a block of the flattened parameter."""
        return 0 if self.layout is None else self.layout.parts[param].mine.start % SIZE


class AdamW8bit(Adam8bit):
    """The same, always decoupled."""
