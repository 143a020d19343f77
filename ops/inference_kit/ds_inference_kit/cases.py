"""One instruction at a time, in every format and for few rows and many: what a provider is
compared on.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ds_inference_kit import program as p
from ds_inference_kit.comparing import DTYPES, FORMATS, make_weight, random
from ds_inference_kit.step import BLOCK

# One row, few and many: kernels have a way of their own for each.
ROWS = (1, 3, 9, 40)


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison.

    Registers 0, 1, ... are filled from `inputs`; `code` follows; register `output` is compared.
    """

    # [rows, width], of registers 0, 1, ...
    inputs: tuple[Tensor, ...]
    code: tuple[p.Instruction, ...]
    # Widths of further registers.
    more: tuple[int, ...]
    output: int
    # Rows of each sequence; empty: one sequence.
    sizes: tuple[int, ...] = ()
    # Tokens of each sequence that the cache has.
    before: tuple[int, ...] = ()
    # Further fields of the step.
    step: tuple[tuple[str, Any], ...] = ()
    # Layers of the cache; 0: there is none.
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    # Its dtype; None: that of the program.
    cache: torch.dtype | None = None
    collectives: p.Collectives | None = None


Named = Iterator[tuple[str, Callable[[], Case]]]


def elementwise(dtype: torch.dtype) -> Named:
    """Embed, Normalize, Add and Rotate."""
    own = torch.float64

    def embed(by: p.By, more: dict[str, Any]) -> Case:
        table = random(12, 19).to(own)
        code = p.Embed(1, table, by, 3, 0.5), p.Embed(1, table, by, add=True)
        return Case((random(6, 19),), code, (19,), 1, (4, 2), (1, 3), tuple(more.items()))

    for by in p.By:
        types = (
            {"types": torch.tensor([1, 0, 2, 4, 5, 0], dtype=torch.int32)}
            if by is p.By.TYPES
            else {}
        )
        yield f"Embed by {by.name.lower()}", functools.partial(embed, by, types)
    yield "Embed by types that are not given", functools.partial(embed, p.By.TYPES, {})

    def normalize(norm: p.Norm, width: int, groups: int, affine: bool, out: int) -> Case:
        x = random(5, width) * 3 + 1
        weight, bias = (random(width // groups, seed=s).to(own) if affine else None for s in (1, 2))
        code = p.Normalize(0, out, weight, bias, 1e-5, norm, groups)
        return Case((x,), (code,), (width,), out)

    for norm, (width, groups), affine in itertools.product(
        p.Norm, ((37, 1), (96, 6), (576, 1)), (True, False)
    ):
        what = f"Normalize {norm.name} of {width} in {groups}, weights {affine}"
        yield what, functools.partial(normalize, norm, width, groups, affine, int(affine))

    def add(out: int, bias: bool) -> Case:
        bent = random(21, seed=3).to(own) if bias else None
        return Case((random(4, 21), random(4, 21, seed=9)), (p.Add(0, 1, out, bent),), (21,), out)

    for out, bias in itertools.product((0, 1, 2), (False, True)):
        yield f"Add into {out}, bias {bias}", functools.partial(add, out, bias)

    def rotate(rotary: p.Rotary, dim: int, dims: int) -> Case:
        angles = torch.arange(60.0)[:, None] * 50.0 ** (-torch.arange(dims / 2) / (dims / 2))
        code = p.Rotate(0, dim, angles.cos(), angles.sin(), rotary)
        return Case((random(9, 3 * dim),), (code,), (), 0, (2, 7), (11, 40))

    for rotary, (dim, dims) in itertools.product(p.Rotary, ((8, 8), (64, 64), (80, 32), (10, 6))):
        yield f"Rotate {rotary.name} {dims} of {dim}", functools.partial(rotate, rotary, dim, dims)


def products(dtype: torch.dtype) -> Named:
    """Linear and Gated, in each format and for few rows and many."""

    def linear(
        rows: int, shape: tuple[int, int], form: str, activation: p.Activation, kind: int
    ) -> Case:
        out, inner = shape
        bias = random(out, seed=5).double() if kind & 1 else None
        # Into a register of its own, plus another one, and onto itself.
        add, to = ((None, 2), (1, 2), (1, 1))[kind % 3]
        code = p.Linear(0, to, make_weight(out, inner, form), bias, activation, add)
        return Case((random(rows, inner), random(rows, out, seed=7)), (code,), (out,), to)

    def gated(
        rows: int, shape: tuple[int, int], form: str, activation: p.Activation, kind: int
    ) -> Case:
        out, inner = shape
        first, second = (random(out, seed=s).double() if kind & 1 else None for s in (5, 6))
        code = p.Gated(
            0,
            1,
            make_weight(out, inner, form),
            make_weight(out, inner, form, 1),
            first,
            second,
            activation,
        )
        return Case((random(rows, inner),), (code,), (out,), 1)

    # Activations, biases and additions take turns: each combination with each format would be
    # thousands.
    activations = itertools.cycle(p.Activation)
    shapes = ((7, 66), (50, 96), (129, 160), (64, 1536), (1, 34))
    for number, (rows, form) in enumerate(itertools.product(ROWS, FORMATS)):
        for kind, make in enumerate((linear, gated)):
            out, inner = shapes[(number + kind) % len(shapes)]
            activation = next(activations)
            what = (
                f"{make.__name__.title()} {out} x {inner} in {form}, {rows} rows, {activation.name}"
            )
            yield (
                what,
                functools.partial(make, rows, (out, inner), form, activation, number // 2 + kind),
            )

    def twice() -> Case:
        """A product reads what the one before has written, and writes what it has read."""
        there = make_weight(40, 64, "own")
        back = make_weight(64, 40, "own")
        return Case(
            (random(2, 64),),
            (p.Linear(0, 1, there), p.Linear(1, 0, back), p.Linear(0, 1, there)),
            (40,),
            1,
        )

    yield "Linear after Linear", twice


def attention() -> Named:
    """Attend: prompts, decoding and both in one step, with and without a cache."""

    def attend(
        heads: int,
        kv: int,
        dim: int,
        layer: int | None,
        kind: str,
        cache: torch.dtype | None = None,
    ) -> Case:
        sizes, before = ((5, 1, 33), (0, 0, 0)) if layer is None else ((1, 6, 1, 40), (70, 0, 0, 3))
        if kind.startswith("decode"):
            sizes = (1, 1, 1)
            before = (3, 2 * BLOCK - 1, 300)
        rows = sum(sizes)
        inputs = (
            random(rows, heads * dim),
            random(rows, kv * dim, seed=1),
            random(rows, kv * dim, seed=2),
        )
        code = p.Attend(
            0,
            1,
            2,
            3,
            heads,
            kv,
            dim,
            dim**-0.5,
            layer,
            causal=kind != "both ways",
            window=7 if "window" in kind else None,
            slopes=2.0 ** -torch.arange(1.0, heads + 1) if "slopes" in kind else None,
            groups=(0, 1, *(kv - 1 for _ in range(heads - 2))) if "groups" in kind else None,
        )
        layers = 0 if layer is None else layer + 1
        return Case(inputs, (code,), (heads * dim,), 3, sizes, before, (), layers, kv, dim, cache)

    for heads, kv, dim, layer, kind in (
        (4, 4, 8, None, "both ways"),
        (4, 2, 20, None, "causal"),
        (9, 3, 64, 0, "mixed"),
        (9, 3, 64, 1, "decode"),
        (4, 4, 80, 0, "decode, slopes"),
        (6, 2, 12, 0, "mixed, slopes, window"),
        (5, 1, 64, 0, "decode, window"),
        (4, 2, 16, 0, "mixed, window"),
        (5, 2, 32, 0, "decode, groups"),
        (5, 2, 32, 0, "mixed, groups"),
        (16, 2, 128, 1, "decode"),
        (3, 3, 7, 0, "decode"),
    ):
        what = f"Attend {heads} heads of {kv} x {dim}, layer {layer}, {kind}"
        yield what, functools.partial(attend, heads, kv, dim, layer, kind)
    for dtype in DTYPES.values():
        what = f"Attend through a cache of {dtype}"
        yield what, functools.partial(attend, 4, 2, 16, 0, "decode", dtype)


def others(dtype: torch.dtype) -> Named:
    """Experts and Keep."""

    def experts(rows: int, form: str, top_k: int, first: int, normalize: bool) -> Case:
        gates, ups = (tuple(make_weight(48, 64, form, s + e) for e in range(3)) for s in (10, 20))
        downs = tuple(make_weight(64, 48, form, 30 + e) for e in range(3))
        router = random(5, 64, seed=4).double() / 8
        code = p.Experts(0, 1, router, gates, ups, downs, top_k, normalize, first=first)
        return Case((random(rows, 64),), (code,), (64,), 1)

    for rows, form, top_k, first, normal in (
        (1, "own", 2, 0, True),
        (4, "own", 1, 2, False),
        (3, "int8", 2, 1, True),
        (2, "int4 with lows", 3, 0, False),
        (40, "own", 2, 0, True),
        (40, "int4", 2, 2, True),
    ):
        what = f"Experts {form}, {rows} rows, top {top_k}, first {first}"
        yield what, functools.partial(experts, rows, form, top_k, first, normal)

    def keep(wanted: list[int] | None, rows: int) -> Case:
        code = (
            p.Add(0, 0, 1),
            p.Keep(1, 2),
            p.Linear(2, 3, make_weight(11, 24, "own")),
            p.Add(3, 3, 3),
        )
        chosen = () if wanted is None else (("wanted", torch.tensor(wanted, dtype=torch.int64)),)
        return Case((random(rows, 24),), code, (24, 24, 11), 3, step=chosen)

    for wanted, rows in ((None, 3), ([2, 0], 4), ([7], 40), ([], 2), (list(range(39, -1, -1)), 40)):
        what = f"Keep {'all' if wanted is None else len(wanted)} of {rows} rows"
        yield what, functools.partial(keep, wanted, rows)


def collectives() -> Named:
    """Reduce and Gather, with functions that stand for other ranks."""

    def ranks(rows: int) -> Case:
        def reduce(x: Tensor) -> None:
            x.mul_(3)

        together = p.Collectives(reduce, lambda x: torch.cat([x, x + 1], 1))
        code = (
            p.Linear(0, 1, make_weight(24, 24, "own")),
            p.Reduce(1),
            p.Add(1, 0, 1),
            p.Gather(1, 2),
            p.Add(2, 2, 3),
        )
        return Case((random(rows, 24),), code, (24, 48, 48), 3, collectives=together)

    def logits(rows: int) -> Case:
        together = p.Collectives(lambda x: None, lambda x: torch.cat([x, x - 1], 1))
        code = (
            p.Keep(0, 1),
            p.Linear(1, 2, make_weight(7, 24, "own")),
            p.Gather(2, 3),
            p.Add(3, 3, 3),
        )
        last = (("wanted", torch.tensor([rows - 1, 0])),)
        return Case((random(rows, 24),), code, (24, 7, 14), 3, step=last, collectives=together)

    for rows in (3, 40):
        yield f"Reduce and Gather, {rows} rows", functools.partial(ranks, rows)
        yield f"Gather of 2 of {rows} rows", functools.partial(logits, rows)
