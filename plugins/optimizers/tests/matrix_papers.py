"""Optimizers with states of whole matrices as their papers and authors' code have them, one matrix
after the other.

``last`` in a state is this step's update without learning rate and weight decay.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]


def apply(p: Tensor, change: Tensor, *, lr: float, wd: float) -> None:
    p *= 1 - lr * wd
    p -= lr * change.reshape(p.shape)


def soap(p: Tensor, g: Tensor, s: State, *, lr: float, wd: float, every: int, longest: int) -> None:
    """Moments are kept turned, as in the authors' code: whenever a basis changes, the first one is
    turned back and anew.
    """
    g = g.reshape(len(p), -1)
    squares = [g @ g.T, g.T @ g]
    turned = [size <= longest for size in g.shape]
    if not s:
        s["factors"] = [0.05 * square for square in squares]
        s["q"] = [
            eigenvectors(f) if t else torch.eye(len(f)).to(f)
            for f, t in zip(s["factors"], turned, strict=True)
        ]
        s.update(t=0, m=torch.zeros_like(g), v=torch.zeros_like(g))
        apply(p, torch.zeros_like(g), lr=lr, wd=wd)
        return
    s["t"] += 1
    left, right = s["q"]
    inside = left.T @ g @ right
    s["m"] = 0.95 * s["m"] + 0.05 * inside
    s["v"] = 0.95 * s["v"] + 0.05 * inside**2
    correction = math.sqrt(1 - 0.95 ** s["t"]) / (1 - 0.95 ** s["t"])
    change = correction * left @ (s["m"] / (s["v"].sqrt() + 1e-8)) @ right.T
    apply(p, change, lr=lr, wd=wd)
    s["factors"] = [0.95 * f + 0.05 * n for f, n in zip(s["factors"], squares, strict=True)]
    if s["t"] % every:
        return
    m = left @ s["m"] @ right.T
    for side in (0, 1):
        if not turned[side]:
            continue
        f = s["factors"][side] + 1e-4 * s["factors"][side].trace() / g.shape[side] * torch.eye(
            g.shape[side]
        ).to(g)
        q = s["q"][side]
        order = torch.argsort((q.T @ f @ q).diagonal(), descending=True)
        s["v"] = s["v"][order] if side == 0 else s["v"][:, order]
        s["q"][side] = torch.linalg.qr(f @ q[:, order])[0]
    s["m"] = s["q"][0].T @ m @ s["q"][1]


def eigenvectors(f: Tensor) -> Tensor:
    """Of large eigenvalues first; those without any are chosen by a small shift."""
    size = len(f)
    shift = 1e-4 * f.trace() / size * torch.linspace(1, 0, size).to(f)
    return torch.linalg.eigh(f + torch.diag(shift))[1].flip(1)


def adam(
    p: Tensor, g: Tensor, s: State, *, lr: float, wd: float, beta1: float, beta2: float
) -> None:
    """AdamW, of groups without matrices."""
    s["t"] = t = s.get("t", 0) + 1
    s["m"] = beta1 * s.get("m", 0) + (1 - beta1) * g
    s["v"] = beta2 * s.get("v", 0) + (1 - beta2) * g * g
    change = (s["m"] / (1 - beta1**t)) / ((s["v"] / (1 - beta2**t)).sqrt() + 1e-8)
    apply(p, change, lr=lr, wd=wd)


def shampoo(
    p: Tensor, g: Tensor, s: State, *, lr: float, wd: float, every: int, graft: str, longest: int
) -> None:
    g = g.reshape(len(p), -1)
    s["t"] = t = s.get("t", 0) + 1
    squares = [g @ g.T, g.T @ g]
    s["factors"] = [
        0.999 * f + 0.001 * n for f, n in zip(s.get("factors", [0, 0]), squares, strict=True)
    ]
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0) + 0.001 * g * g
    used = [size <= longest for size in g.shape]
    if (t - 1) % every == 0:
        power = -1 / (2 * sum(used))
        s["roots"] = [
            root(f / (1 - 0.999**t), power) if u else torch.eye(len(f)).to(f)
            for f, u in zip(s["factors"], used, strict=True)
        ]
    m = s["m"] / (1 - 0.9**t)
    change = s["roots"][0] @ m @ s["roots"][1]
    adam_like = m / ((s["v"] / (1 - 0.999**t)).sqrt() + 1e-8)
    size = {"none": change, "sgd": m, "adam": adam_like}[graft].norm()
    apply(p, change * size / change.norm(), lr=lr, wd=wd)


def root(f: Tensor, power: float) -> Tensor:
    """By an SVD, which of a symmetric matrix without negative eigenvalues is an eigenbasis."""
    u, values, _ = torch.linalg.svd(f)
    return u @ torch.diag((values + 1e-6) ** power) @ u.T


def dion(p: Tensor, g: Tensor, s: State, *, lr: float, wd: float, fraction: float) -> None:
    g = g.reshape(len(p), -1)
    rows, columns = g.shape
    rank = math.ceil(fraction * min(rows, columns))
    if not s:
        start = torch.Generator().manual_seed(0)
        s["q"] = torch.randn(columns, rank, generator=start, dtype=torch.float64).to(g)
        s["m"] = torch.zeros_like(g)
    b = s["m"] + g
    left = torch.linalg.qr(b @ s["q"])[0]
    r = b.T @ left
    s["m"] = b - (1 - 0.95) * left @ r.T
    for column in range(rank):
        s["q"][:, column] = r[:, column] / (r[:, column].norm() + 1e-8)
    apply(p, math.sqrt(rows / columns) * left @ s["q"].T, lr=lr, wd=wd)


def galore(p: Tensor, g: Tensor, s: State, *, lr: float, wd: float, rank: int, every: int) -> None:
    g = g.reshape(len(p), -1)
    s["t"] = t = s.get("t", 0) + 1
    right = g.shape[0] >= g.shape[1]
    if (t - 1) % every == 0:
        u, _, vh = torch.linalg.svd(g, full_matrices=False)
        basis = (vh.T if right else u)[:, :rank]
        for column in range(basis.shape[1]):
            if max(basis[:, column], key=abs) < 0:
                basis[:, column] *= -1
        s["p"] = basis
    low = g @ s["p"] if right else s["p"].T @ g
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * low
    s["v"] = 0.999 * s.get("v", 0) + 0.001 * low * low
    n = (s["m"] / (1 - 0.9**t)) / ((s["v"] / (1 - 0.999**t)).sqrt() + 1e-8)
    apply(p, 0.25 * (n @ s["p"].T if right else s["p"] @ n), lr=lr, wd=wd)
