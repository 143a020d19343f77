"""SGD with momentum, with torch's parameters."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ds_optimizers.base import KernelOptimizer, StepBatch, check_common


class SGD(KernelOptimizer):
    """torch's SGD; state ``momentum_buffer``, with momentum only, which begins as the first
    gradient.
    """

    op: ClassVar[str] = "sgd"
    in_portions: ClassVar[bool] = True
    scales: ClassVar[bool] = True
    states: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    kept: ClassVar[tuple[str, ...]] = (*KernelOptimizer.kept, "_fresh")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        check_common(lr=lr, weight_decay=weight_decay)
        if momentum < 0:
            raise ValueError(f"momentum {momentum} must not be negative")
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError(
                f"nesterov needs momentum and no dampening; they are {momentum} and {dampening}"
            )
        # Parameters whose buffer was made in this step: it begins as the gradient, without
        # dampening.
        self._fresh: set[Tensor] = set()
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening}
        super().__init__(params, {**defaults, "weight_decay": weight_decay, "nesterov": nesterov})

    def states_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """See `KernelOptimizer.states_of`."""
        return self.states if group["momentum"] else ()

    def begin(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """See `KernelOptimizer.begin`."""
        self._fresh.add(param)
        return super().begin(param, group)

    def update(self, group: dict[str, Any], batch: StepBatch) -> None:
        """See `KernelOptimizer.update`."""
        run = self.kernel(batch.params[0])
        options = {k: group[k] for k in ("lr", "momentum", "dampening", "weight_decay", "nesterov")}
        options["scale"] = batch.scale
        if not group["momentum"]:
            run(batch.params, batch.grads, None, first=False, **options, copies=batch.copies)
            return
        lists = [
            batch.params,
            batch.grads,
            batch.states[0],
            *([] if batch.copies is None else [batch.copies]),
        ]
        rows = list(zip(batch.owners, *lists, strict=True))
        # The kernel has one flag for all tensors of a call, so new buffers and old ones are two
        # calls.
        for first in (True, False):
            chosen = [row[1:] for row in rows if (row[0] in self._fresh) is first]
            if chosen:
                columns = list(map(list, zip(*chosen, strict=True)))
                copies = columns.pop() if batch.copies is not None else None
                run(*columns, first=first, **options, copies=copies)
        self._fresh.difference_update(batch.owners)
