"""1-bit LAMB of a whole model in one process, which emulates what the ranks of a layout send each
other.

Plain equations over full tensors, but for the exchange: of that it is said, by `told`, what each
rank has, who averages with whom, and who has the other parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_core import comm


@dataclass
class Rank:
    """What one rank has."""

    parts: dict[str, Tensor]
    """Indices of its elements in the flattened full tensor, in the optimizer's order."""
    held: dict[str, tuple[str, ...]]
    """Axes along which others have other parts, or other parameters."""
    tied: list[str]
    counted: list[str]
    along: list[tuple[tuple[str, ...], list[int]]]
    """The ranks along these axes."""
    replicas: dict[str, list[int]]
    """The ranks that average with it."""
    data: dict[str, list[int]]
    """Whose samples are in its own gradient."""

    def flats(self) -> dict[tuple[Any, ...], list[str]]:
        """What is exchanged as one tensor."""
        found: dict[tuple[Any, ...], list[str]] = {}
        for name in self.parts:
            if len(self.replicas[name]) > 1:
                group = tuple(self.replicas[name])
                alone = name if name in self.tied else ""
                found.setdefault((group, self.held[name], alone), []).append(name)
        return found


def told(engine: Any) -> Rank:
    """What this rank has, from its engine."""
    mesh = engine.ctx.mesh
    infos = {info.name: info for info in engine.ctx.params.values()}
    parts = engine.optimizer.layout.parts
    order = [parts[p] for g in engine.optimizer.param_groups for p in g["params"]]
    dp = set(mesh.expand(("dp",)))
    rank = Rank({}, {}, [], [], [], {}, {})
    for part in order:
        info = infos[part.name]
        every = torch.arange(math.prod(part.shape)).view(part.shape)
        rank.parts[part.name] = part.mine.slice.take(every).reshape(-1)
        rank.held[part.name] = mesh.expand(info.held)
        rank.replicas[part.name] = mesh.ranks(*info.replicas)
        rank.data[part.name] = mesh.ranks(*(a for a in mesh.expand(info.held) if a in dp))
        if part.tied:
            rank.tied.append(part.name)
        if info.counted:
            rank.counted.append(part.name)
    everyone = comm.all_gather_json(sorted(set(rank.held.values())))
    along = {tuple(axes) for row in everyone for axes in row}
    rank.along = [(axes, mesh.ranks(*axes)) for axes in sorted(along)]
    return rank


class OneBitLamb:
    """The weights of the whole model, and what each rank remembers."""

    def __init__(self, weights: dict[str, Tensor], ranks: Sequence[Rank], freeze: int) -> None:
        self.p = {n: w.detach().clone() for n, w in weights.items()}
        self.ranks = ranks
        self.freeze = freeze
        self.m = {n: torch.zeros_like(w) for n, w in self.p.items()}
        self.v = {n: torch.zeros_like(w) for n, w in self.p.items()}
        self.c = dict.fromkeys(self.p, 0.0)
        self.t = 0
        self.lost: dict[Any, Tensor] = {}

    def step(self, grads: Sequence[dict[str, Tensor]], lr: float, wd: float) -> None:
        """grads: of each rank's samples, of the whole model."""
        self.t += 1
        if self.t <= self.freeze:
            for name in self.p:
                mean = torch.stack([g[name] for g in grads]).mean(0)
                self.warm(name, mean, lr, wd)
            if self.t == self.freeze:
                self.fresh = {n: v.clone() for n, v in self.v.items()}
                self.last = dict.fromkeys(self.p, 1.0)
                sizes = {n: float(m.norm()) / math.sqrt(m.numel()) for n, m in self.m.items()}
                mean_size = sum(sizes.values()) / len(sizes)
                self.k = {n: mean_size / size for n, size in sizes.items()}
            return
        old = {n: m.clone() for n, m in self.m.items()}
        own = []
        for rank in self.ranks:
            own.append({})
            for name, at in rank.parts.items():
                grad = torch.stack([grads[r][name] for r in rank.data[name]]).mean(0)
                momentum = 0.9 * old[name] + 0.1 * grad
                own[-1][name] = momentum.view(-1)[at] * self.k[name]
        self.exchange(own)
        for rank, found in zip(self.ranks, own, strict=True):
            for name, values in found.items():
                self.m[name].view(-1)[rank.parts[name]] = values / self.k[name]
        for rank, found in zip(self.ranks, own, strict=True):
            for name, values in found.items():
                # All copies of an element are equal, to the bit.
                assert torch.equal(
                    self.m[name].view(-1)[rank.parts[name]], values / self.k[name]
                ), name
        for name in self.p:
            self.frozen(name, old[name], lr, wd)

    def warm(self, name: str, g: Tensor, lr: float, wd: float) -> None:
        self.m[name] = 0.9 * self.m[name] + 0.1 * g
        self.v[name] = 0.999 * self.v[name] + 0.001 * g * g
        u = self.m[name] / (self.v[name].sqrt() + 1e-8) + wd * self.p[name]
        a = float(self.p[name].norm())
        b = float(u.norm())
        c = min(max(a / b, 0.01), 10.0) if a and b else 1.0
        self.c[name] = 0.9 * self.c[name] + 0.1 * c if c != 1 else self.c[name]
        self.p[name] -= lr * c * u

    def frozen(self, name: str, old: Tensor, lr: float, wd: float) -> None:
        self.m[name] *= self.v[name] > 0
        g = (self.m[name] - 0.9 * old) / 0.1
        self.fresh[name] = 0.999 * self.fresh[name] + 0.001 * g * g
        d = self.v[name].sqrt() + 1e-8
        u = self.m[name] / d + wd * self.p[name]
        factor = float((d / (self.fresh[name].sqrt() + 1e-8)).max())
        if wd:
            rho = min(1.0, float((self.m[name] / d).norm() / u.norm()))
            factor = factor * rho + 1 - rho
        factor = min(max(factor, 0.5), 4.0)
        self.last[name] = min(max(factor, self.last[name] * 0.9), self.last[name] * 1.1)
        self.p[name] -= lr * (self.c[name] or 1.0) * self.last[name] * u

    # -- the exchange ------------------------------------------------------------------------------

    def exchange(self, own: list[dict[str, Tensor]]) -> None:
        """Replace each rank's parts by their compressed averages."""
        # 1. To servers: signs of what each rank has, and of what was lost the last time.
        sent: dict[tuple[int, Any], Tensor] = {}
        for r, rank in enumerate(self.ranks):
            for key, names in rank.flats().items():
                flat = torch.cat([own[r][n] for n in names])
                size = _padded(flat.numel(), len(key[0]))
                flat = torch.nn.functional.pad(flat, (0, size - flat.numel()))
                sent[r, key] = flat + self.lost.get(("worker", r, key), 0)
        received = self.signs("worker", sent)
        # 2. Each server averages its chunk, and sends signs of that.
        chunks: dict[tuple[int, Any], Tensor] = {}
        for r, rank in enumerate(self.ranks):
            for key in rank.flats():
                group = key[0]
                rows = [received[other, key].chunk(len(group)) for other in group]
                mean = torch.stack([row[group.index(r)] for row in rows]).mean(0)
                chunks[r, key] = mean + self.lost.get(("server", r, key), 0)
        answers = self.signs("server", chunks)
        for r, rank in enumerate(self.ranks):
            for key, names in rank.flats().items():
                whole = torch.cat([answers[other, key] for other in key[0]])
                for name in names:
                    count = own[r][name].numel()
                    own[r][name] = whole[:count]
                    whole = whole[count:]

    def signs(self, kind: str, values: dict[tuple[int, Any], Tensor]) -> dict[Any, Tensor]:
        """Each rank has one scale for all that it sees of the model."""
        found = {}
        for (r, key), x in values.items():
            square = 0.0
            count = 0
            for axes, others in self.ranks[r].along:
                for other in others:
                    for (at, one), y in values.items():
                        names = self.ranks[at].flats().get(one, [])
                        if at == other and one[1] == axes and names[0] in self.ranks[at].counted:
                            square += float(y.square().sum())
                            count += y.numel()
            scale = math.sqrt(square / count)
            found[r, key] = torch.where(x >= 0, scale, -scale).to(x)
            self.lost[kind, r, key] = x - found[r, key]
        return found


def _padded(numel: int, ranks: int) -> int:
    unit = ranks * (8 * ranks // math.gcd(ranks, 8))
    return math.ceil(numel / unit) * unit
