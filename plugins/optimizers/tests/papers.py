"""The equations of the papers and documents in plain torch, one parameter and one rank after the
other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]


def adam(
    p: Tensor, g: Tensor, s: State, *, lr: float, wd: float, decoupled: bool, correct: bool = True
) -> None:
    s["t"] = t = s.get("t", 0) + 1
    if not decoupled:
        g = g + wd * p
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0) + 0.001 * g * g
    m = s["m"] / (1 - 0.9**t) if correct else s["m"]
    v = s["v"] / (1 - 0.999**t) if correct else s["v"]
    p -= lr * (m / (v.sqrt() + 1e-8) + (wd * p if decoupled else 0))


def lion(p: Tensor, g: Tensor, s: State, *, lr: float, wd: float) -> None:
    m = s.get("m", torch.zeros_like(p))
    p -= lr * (torch.sign(0.9 * m + 0.1 * g) + wd * p)
    s["m"] = 0.999 * m + 0.001 * g


def lamb(
    p: Tensor,
    g: Tensor,
    s: State,
    *,
    lr: float,
    wd: float,
    inside: bool = False,
    correct: bool = True,
) -> None:
    s["t"] = t = s.get("t", 0) + 1
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0) + 0.001 * g * g
    u = s["m"] / ((s["v"] + 1e-8).sqrt() if inside else s["v"].sqrt() + 1e-8) + wd * p
    a = float(p.norm())
    b = float(u.norm())
    c = min(max(a / b, 0.01), 10.0) if a and b else 1.0
    step = lr * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) if correct else lr
    p -= step * c * u


def adam_mini(p: Tensor, g: Tensor, s: State, *, lr: float, wd: float) -> None:
    s["t"] = t = s.get("t", 0) + 1
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    for row in range(len(g)) if g.dim() > 1 else [...]:
        mean = float((g[row] ** 2).mean())
        v = s[row] = 0.999 * s.get(row, 0) + 0.001 * mean
        p[row] *= 1 - lr * wd
        p[row] -= (
            lr * (s["m"][row] / (1 - 0.9**t)) / (math.sqrt(v) / math.sqrt(1 - 0.999**t) + 1e-8)
        )


def schedule_free(p: Tensor, g: Tensor, s: State, *, lr: float, wd: float, warmup: int) -> None:
    s["t"] = t = s.get("t", 0) + 1
    x = s.get("x", p.clone())
    z = s.get("z", p.clone())
    s["v"] = 0.999 * s.get("v", 0) + 0.001 * g * g
    size = lr * math.sqrt(1 - 0.999**t) * min(1, t / max(warmup, 1))
    s["z"] = z - size * g / (s["v"].sqrt() + 1e-8) - size * wd * p
    s["sum"] = s.get("sum", 0) + size**2
    c = size**2 / s["sum"]
    s["x"] = (1 - c) * x + c * s["z"]
    p.copy_(0.1 * s["z"] + 0.9 * s["x"])


def muon(p: Tensor, g: Tensor, s: State, *, lr: float, wd: float) -> None:
    s["b"] = torch.lerp(s.get("b", torch.zeros_like(p)), g, 0.05)
    x = torch.lerp(g, s["b"], 0.95).reshape(len(p), -1)
    rows, columns = x.shape
    x = x / (x.norm() + 1e-7)
    x = x.T if rows > columns else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    x = x.T if rows > columns else x
    p *= 1 - lr * wd
    p -= lr * x.reshape(p.shape) * math.sqrt(max(1, rows / columns))


def muon_variant(
    p: Tensor, g: Tensor, s: State, *, lr: float, wd: float, rows: bool, eps: float = 1e-10
) -> None:
    """NorMuon by rows, AdaMuon by elements."""
    s["m"] = 0.95 * s.get("m", 0) + 0.05 * g
    x = s["m"].reshape(len(p), -1)
    x = x if rows else torch.sign(x)
    x = x / (x.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    x = x.T if tall else x
    s["v"] = 0.9 * s.get("v", 0) + 0.1 * (x.square().mean(1, keepdim=True) if rows else x.square())
    x = x / (s["v"].sqrt() + eps)
    p *= 1 - lr * wd
    p -= lr * 0.2 * math.sqrt(x.numel()) / x.norm() * x.reshape(p.shape)


def muon_adam(p: Tensor, g: Tensor, s: State, *, lr: float, wd: float) -> None:
    s["t"] = t = s.get("t", 0) + 1
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.95 * s.get("v", 0) + 0.05 * g * g
    p *= 1 - lr * wd
    p -= lr * (s["m"] / (1 - 0.9**t)) / ((s["v"] / (1 - 0.95**t)).sqrt() + 1e-10)


# -- the 1-bit family, all ranks in one process ----------------------------------------------------


class Wire:
    """compressed_allreduce of api.md section 16.1, with the errors of all ranks."""

    def __init__(self) -> None:
        self.worker: dict[Any, list[Tensor]] = {}
        self.server: dict[Any, list[Tensor]] = {}

    def reset(self) -> None:
        self.worker.clear()
        self.server.clear()

    def __call__(self, key: Any, xs: Sequence[Tensor]) -> Tensor:
        ranks = len(xs)
        n = xs[0].numel()
        unit = ranks * (8 * ranks // math.gcd(ranks, 8))
        size = math.ceil(n / unit) * unit
        chunk = size // ranks
        worker = self.worker.setdefault(key, [torch.zeros(size, dtype=xs[0].dtype) for _ in xs])
        server = self.server.setdefault(key, [torch.zeros(chunk, dtype=xs[0].dtype) for _ in xs])
        sent = []
        for rank, given in enumerate(xs):
            x = torch.zeros(size, dtype=given.dtype)
            x[:n] = given.flatten()
            x += worker[rank]
            scale = x.norm() / math.sqrt(size)
            sent.append(torch.where(x >= 0, scale, -scale))
            worker[rank] = x - sent[-1]
        parts = []
        for rank in range(ranks):
            y = sum(s[rank * chunk : (rank + 1) * chunk] for s in sent) / ranks + server[rank]
            scale = y.norm() / math.sqrt(chunk)
            parts.append(torch.where(y >= 0, scale, -scale))
            server[rank] = y - parts[-1]
        return torch.cat(parts)[:n].view_as(xs[0])


class Ranks:
    """Several ranks' weights, and gradients from `grad_of(rank, weights) -> gradients`."""

    def __init__(
        self, weights: Sequence[Tensor], ranks: int, grad_of: Callable[..., list[Tensor]]
    ) -> None:
        self.p = [[w.detach().clone() for w in weights] for _ in range(ranks)]
        self.grad_of = grad_of
        self.wire = Wire()
        self.m = [[torch.zeros_like(w) for w in weights] for _ in range(ranks)]
        self.v = [torch.zeros_like(w) for w in weights]
        self.t = 0

    def grads(self, step: int) -> list[list[Tensor]]:
        return [self.grad_of(rank, step, p) for rank, p in enumerate(self.p)]

    def __iter__(self) -> Any:
        return iter(range(len(self.v)))


def average(xs: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(xs)).mean(0)


class OneBitAdam(Ranks):
    def step(self, step: int, *, lr: float, wd: float, freeze_step: int, clip: float = 0.0) -> None:
        frozen = self.t >= freeze_step
        grads = self.grads(step)
        if not frozen:
            mean = [average([g[i] for g in grads]) for i in self]
            grads = [mean for _ in grads]
        if clip:
            squares = sum(float(g.square().sum()) for row in grads for g in row) / len(grads)
            factor = min(1.0, clip / (math.sqrt(squares) + 1e-6))
            grads = [[g * factor for g in row] for row in grads]
        self.t += 1
        if self.t == 1:
            return
        for i in self:
            for rank, row in enumerate(grads):
                self.m[rank][i] = 0.9 * self.m[rank][i] + 0.1 * row[i]
            if not frozen:
                self.v[i] = 0.999 * self.v[i] + 0.001 * grads[0][i] ** 2
            else:
                both = self.wire(i, [m[i] for m in self.m])
                for m in self.m:
                    m[i] = both.clone()
            for p, m in zip(self.p, self.m, strict=True):
                p[i] -= lr * (m[i] / (self.v[i].sqrt() + 1e-8) + wd * p[i])


class ZeroOneAdam(Ranks):
    interval = 1
    counter = 0
    local = 1
    local_counter = 0
    rates = 0.0

    def bring(self, exact: bool) -> None:
        for i in self:
            d = self.v[i].sqrt() + 1e-8
            for p, a in zip(self.p, self.a, strict=True):
                p[i] -= a[i]
            sums = [a[i] * d for a in self.a]
            both = average(sums) if exact else self.wire(i, sums)
            for p, m, a in zip(self.p, self.m, self.a, strict=True):
                m[i] = -both / self.rates
                p[i] += both / d
                a[i] = torch.zeros_like(a[i])
        self.rates = 0.0

    def step(
        self, step: int, *, lr: float, wd: float, freeze: int, every: int, steps: int, most: int
    ) -> None:
        frozen = self.t > freeze
        self.a = getattr(self, "a", [[torch.zeros_like(w) for w in p] for p in self.p])
        grads = self.grads(step)
        self.t += 1
        full = not frozen and self.t % self.interval == 0
        for i in self:
            if not frozen:
                column = [g[i] for g in grads]
                mean = average(column) if full else self.wire(i, column)
                for row in grads:
                    row[i] = mean
            for rank, row in enumerate(grads):
                self.m[rank][i] = 0.9 * self.m[rank][i] + 0.1 * row[i]
            if full:
                self.v[i] = 0.999 * self.v[i] + 0.001 * grads[0][i] ** 2
            for p, m, a in zip(self.p, self.m, self.a, strict=True):
                u = m[i] / (self.v[i].sqrt() + 1e-8) + wd * p[i]
                p[i] -= lr * u
                if frozen:
                    a[i] -= lr * u
        if frozen:
            self.rates += lr
            if self.t % self.local == 0:
                self.bring(exact=False)
            self.local_counter += 1
            if self.local_counter == steps:
                self.local = min(most, 2 * self.local)
                self.local_counter = 0
        elif full:
            self.counter += 1
            if self.counter == every:
                self.counter = 0
                self.interval = 2 * self.interval
        if not frozen and self.t > freeze:
            self.wire.reset()


class OneBitLamb(Ranks):
    def step(self, step: int, *, lr: float, wd: float, freeze_step: int) -> None:
        frozen = self.t >= freeze_step
        grads = self.grads(step)
        self.t += 1
        self.c = getattr(self, "c", [0.0 for _ in self])
        if not frozen:
            for i in self:
                g = average([row[i] for row in grads])
                m = 0.9 * self.m[0][i] + 0.1 * g
                self.v[i] = 0.999 * self.v[i] + 0.001 * g * g
                p = self.p[0][i]
                u = m / (self.v[i].sqrt() + 1e-8) + wd * p
                a = float(p.norm())
                b = float(u.norm())
                c = min(max(a / b, 0.01), 10.0) if a and b else 1.0
                self.c[i] = 0.9 * self.c[i] + 0.1 * c if c != 1 else self.c[i]
                for rank in range(len(self.p)):
                    self.m[rank][i] = m.clone()
                    self.p[rank][i] = p - lr * c * u
            if self.t == freeze_step:
                self.fresh = [v.clone() for v in self.v]
                self.last = [1.0 for _ in self]
                sizes = [float(m.norm()) / math.sqrt(m.numel()) for m in self.m[0]]
                self.k = [sum(sizes) / len(sizes) / size for size in sizes]
            return
        old = [m.clone() for m in self.m[0]]
        flats = []
        for rank, row in enumerate(grads):
            scaled = [(0.9 * self.m[rank][i] + 0.1 * row[i]) * self.k[i] for i in self]
            flats.append(torch.cat([x.flatten() for x in scaled]))
        both = self.wire("all", flats).split([m.numel() for m in old])
        for i in self:
            m = both[i].view_as(old[i]) / self.k[i]
            g = (m - 0.9 * old[i]) / 0.1
            self.fresh[i] = 0.999 * self.fresh[i] + 0.001 * g * g
            d = self.v[i].sqrt() + 1e-8
            p = self.p[0][i]
            u = m / d + wd * p
            factor = float((d / (self.fresh[i].sqrt() + 1e-8)).max())
            if wd:
                rho = min(1.0, float((m / d).norm() / u.norm()))
                factor = factor * rho + 1 - rho
            factor = min(max(factor, 0.5), 4.0)
            factor = min(max(factor, self.last[i] * 0.9), self.last[i] * 1.1)
            self.last[i] = factor
            for rank in range(len(self.p)):
                self.m[rank][i] = m.clone()
                self.p[rank][i] = p - lr * self.c[i] * factor * u
