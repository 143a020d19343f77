"""Adam-mini (Zhang et al. 2024, https://arxiv.org/abs/2406.16793): one second moment per row.

A row is what makes one output of a matrix; a vector is one row. Under ZeRO a row may begin on one
rank and end on another, under tensor parallelism ranks have some columns of all: each sums the
squares of its part, and these are added over the ranks, for all tensors that are cut at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ds_optimizer_kit import ParamPart, split_alike
from ds_optimizer_kit.matrix_optimizer import stack_dims
from torch import Tensor

from ds_core.errors import UsageError
from ds_optimizers.base import StepBatch, check_common
from ds_optimizers.collecting import CollectingOptimizer, wide
from ds_optimizers.moments.compact import PerRow
from ds_optimizers.moments.rows import Rows


@dataclass(frozen=True, slots=True)
class _Noted:
    """What waits for the sums of its rows."""

    group: dict[str, Any]
    param: Tensor
    first: Tensor
    second: PerRow
    step: int
    copy: Tensor | None


class AdamMini(CollectingOptimizer):
    """AdamW whose second moment is that of the mean square of each row's gradients.

    params: groups may have ``stacked``, the number of first dimensions that number matrices (1 for
        experts that are stacked in one parameter); from the config it is found by name.

    State ``exp_avg_sq`` has one value per row, and reads as one per element (`Compact`), also in
    checkpoints, which so go to any layout.
    """

    op: ClassVar[str] = "adam"
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    counts: ClassVar[bool] = True
    scales: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        check_common(lr=lr, eps=eps, betas=betas, weight_decay=weight_decay)
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "stacked": 0})

    def _find_anew(self) -> None:
        super()._find_anew()
        # What `collect` completes in this step, and the sums of squares of its gradients.
        self._noted: list[_Noted] = []
        self._squares: dict[Tensor, Tensor] = {}

    def update(self, group: dict[str, Any], batch: StepBatch) -> None:
        """See `KernelOptimizer.update`: the first moment, and sums over this rank's part of rows."""
        for i, param in enumerate(batch.owners):
            if param.is_complex():
                raise UsageError(f"AdamMini is for real parameters, not {param.dtype}")
            if not param.numel():
                continue
            first = batch.states[0][i]
            second = self._second(param, group)
            grad = wide(batch.grads[i]).to(wide(param).dtype) * batch.scale
            first.lerp_(grad.to(first), 1 - group["betas"][0])
            self._squares[param] = self._rows_of(param, group).sums(grad.square())
            copy = None if batch.copies is None else batch.copies[i]
            self._noted.append(_Noted(group, param, first, second, batch.step, copy))

    def collect(self) -> None:
        """See `CollectingOptimizer.collect`: the second moments, and the update."""
        noted = self._noted
        sums = self._squares
        self._noted = []
        self._squares = {}
        if self.layout is not None:
            groups = {p: g for g in self.param_groups for p in g["params"]}
            counts = {
                id(part): _count(part, groups[param]["stacked"])
                for param, part in self.layout.parts.items()
            }
            sums = {**sums, **self.layout.sums(sums, length=lambda part: counts[id(part)])}
        for each in noted:
            self._apply(each, sums[each.param])

    def _apply(self, each: _Noted, squares: Tensor) -> None:
        beta1, beta2 = each.group["betas"]
        param = each.param
        rows = self._rows_of(param, each.group)
        values = each.second.kept
        mine = (squares / rows.length).to(values.device)[rows.numbers.to(values.device)]
        values.lerp_(mine.to(values.dtype), 1 - beta2)
        lr = each.group["lr"]
        deviation = (wide(values) / (1 - beta2**each.step)).sqrt_().add_(each.group["eps"])
        new = wide(param) * (1 - lr * each.group["weight_decay"])
        new.addcdiv_(
            wide(each.first), each.second.spread(deviation), value=-lr / (1 - beta1**each.step)
        )
        param.copy_(new)
        if each.copy is not None:
            each.copy.copy_(param)

    def begin(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """See `KernelOptimizer.begin`."""
        states = super().begin(param, group)
        second = PerRow.zeros(states["exp_avg_sq"], self._rows_of(param, group))
        return {**states, "exp_avg_sq": second}

    def _second(self, param: Tensor, group: Mapping[str, Any]) -> PerRow:
        """The second moment; of a checkpoint, which has it per element, it is made again."""
        second = self.state[param]["exp_avg_sq"]
        if not isinstance(second, PerRow):
            second = PerRow.of(second, self._rows_of(param, group))
            self.state[param]["exp_avg_sq"] = second
        return second

    def _rows_of(self, param: Tensor, group: Mapping[str, Any]) -> Rows:
        return self.rows_of(
            param,
            _lead(param if self.layout is None else self.layout.parts[param], group["stacked"]),
        )


def _count(part: ParamPart, stacked: int) -> int:
    return math.prod(part.shape[: _lead(part, stacked)])


def _lead(part: ParamPart | Tensor, stacked: int) -> int:
    """How many of the first dimensions number rows."""
    return stacked + (len(part.shape) - stacked >= 2)


def split_stacks(
    groups: Iterable[Mapping[str, Any]], names: Mapping[Any, str], **others: Any
) -> list[dict[str, Any]]:
    """Each group as one without and one with stacks of matrices, empty ones left out."""
    found: list[dict[str, Any]] = []
    for group in groups:
        kinds: dict[int, list[Any]] = {}
        for param in group["params"]:
            said = group.get("stacked", stack_dims(param, names.get(param, "")))
            kinds.setdefault(int(said), []).append(param)
        found.extend({**group, "params": kinds[n], "stacked": n} for n in sorted(kinds))
    return found


def mini_groups(
    groups: Iterable[Mapping[str, Any]], names: Mapping[Any, str], **params: Any
) -> list[dict[str, Any]]:
    """`split_stacks`, alike on all ranks. Collective."""
    return split_alike(
        groups, lambda some: split_stacks(some, names, **params), ("stacked",), lambda kind: kind
    )
