"""ZenFlow in one process and in plain torch: what training with it must equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Reference"]


class _Param:
    """One parameter. weight: as the model sees it. master, m, v: newest; of a column relative to
    its count.
    """

    def __init__(self, param: nn.Parameter, ratio: float, options: Mapping[str, Any]) -> None:
        self.weight = param.data
        self.options = options
        self.master = param.data.clone()
        self.m = torch.zeros_like(param)
        self.v = torch.zeros_like(param)
        columns = param.shape[-1] if param.dim() > 1 else 0
        self.count = min(columns, max(1, round(ratio * columns))) if ratio > 0 else 0
        self.whole = columns <= self.count
        self.chosen: Tensor | None = None  # per column
        self.device_steps = self.host_steps = 0
        self.sum = torch.zeros_like(param)
        self.used = False
        self.rest = self.most = 0.0

    def norms(self, grad: Tensor) -> Tensor:
        return grad.reshape(-1, grad.shape[-1]).norm(dim=0)

    def on_device(self) -> Tensor:
        """Per element."""
        if self.whole:
            return torch.ones_like(self.master, dtype=torch.bool)
        assert self.chosen is not None
        return self.chosen.expand(self.master.shape)

    def choose(self, grad: Tensor) -> None:
        order = sorted(range(grad.shape[-1]), key=lambda i: -float(self.norms(grad)[i]))
        now = torch.zeros(grad.shape[-1], dtype=torch.bool)
        now[order[: self.count]] = True
        if self.chosen is None:
            self.device_steps = self.host_steps
        before = self.chosen if self.chosen is not None else torch.zeros_like(now)
        self.carry(now & ~before, self.host_steps, self.device_steps)
        self.carry(before & ~now, self.device_steps, self.host_steps)
        self.chosen = now
        self.weight.copy_(torch.where(self.on_device(), self.master, self.weight))

    def carry(self, columns: Tensor, old: int, new: int) -> None:
        """Of columns that change sides, the moments keep what they are after the correction of
        their beginning.
        """
        if old and new:
            for moment, beta in zip((self.m, self.v), self.options["betas"], strict=True):
                moment[..., columns] *= (1 - beta**new) / (1 - beta**old)

    def adam(self, where: Tensor, grad: Tensor, step: int) -> None:
        (b1, b2), lr, eps, decay = (self.options[k] for k in ("betas", "lr", "eps", "weight_decay"))
        m = b1 * self.m + (1 - b1) * grad
        v = b2 * self.v + (1 - b2) * grad**2
        new = self.master * (1 - lr * decay)
        new = new - lr * (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + eps)
        for old, value in ((self.m, m), (self.v, v), (self.master, new)):
            old.copy_(torch.where(where, value, old))


class Reference:
    """`step` takes the clipped mean gradients of all ranks, by parameter; None: no rank had one."""

    def __init__(
        self, groups: list[dict[str, Any]], keys: Mapping[str, Any], choose_every: int = 100
    ) -> None:
        self.keys = keys
        self.choose_every = choose_every
        ratio = keys.get("topk_ratio", 0.1)
        self.params = {p: _Param(p, ratio, g) for g in groups for p in g["params"]}
        self.steps = self.since = self.warm = 0
        self.begun = self.pending = False

    @torch.no_grad()
    def step(self, grads: Mapping[nn.Parameter, Tensor | None]) -> None:
        had = {self.params[p]: g for p, g in grads.items() if g is not None}
        if self.warm < self.keys.get("full_warm_up_rounds", 0):
            self.warm += 1
            for p, g in had.items():
                p.host_steps += 1
                p.adam(torch.ones_like(g, dtype=torch.bool), g, p.host_steps)
                p.weight.copy_(p.master)
            return
        if self.steps == 0 and (not self.begun or self.since >= self.choose_every):
            for p in self.params.values():
                if not p.whole:
                    p.choose(had.get(p, torch.zeros_like(p.master)))
                elif not self.begun:
                    p.device_steps = p.host_steps
            self.begun = True
            self.since = 0
        self.steps = self.steps + 1
        self.since = self.since + 1
        for p, g in had.items():
            p.used = True
            p.device_steps += 1
            p.adam(p.on_device(), g, p.device_steps)
            p.weight.copy_(torch.where(p.on_device(), p.master, p.weight))
            p.sum += g
            if not p.whole:
                norms = p.norms(g)
                p.rest += float(norms[~p.chosen].mean())
                p.most += float(norms[p.chosen].mean()) if p.count else 0.0
        if self.ends():
            self.apply()

    def ends(self) -> bool:
        every = self.keys.get("update_interval", "auto")
        if every != "auto":
            return bool(self.steps >= every)
        due = [p.rest > p.most / self.steps for p in self.params.values() if p.used and not p.whole]
        return self.steps >= 16 or sum(due) >= self.keys.get("auto_ratio", 0.99) * len(due)

    def apply(self) -> None:
        late = self.keys.get("overlap_step", False)
        for p in self.params.values():
            if late and self.pending:
                p.weight.copy_(p.master)
            if p.used and not p.whole:
                p.host_steps += 1
                p.adam(~p.on_device(), p.sum / self.steps, p.host_steps)
            if not late:
                p.weight.copy_(p.master)
            p.sum.zero_()
            p.used = False
            p.rest = 0.0
            p.most = 0.0
        self.pending = late
        self.steps = 0
