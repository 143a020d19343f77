"""The shapes that an instruction's weights must have: addresses bypass torch's own checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ds_inference_kit import program as p
from torch import Tensor

from ds_core.errors import KernelError

Widths = tuple[int, ...]
"""Of each register, in elements."""


def check_shapes(instruction: p.Instruction, program: p.Program) -> None:
    """Raise KernelError where the shapes of weights do not fit the widths of registers."""
    shapes = _SHAPES.get(type(instruction))
    if shapes is None:
        return
    wrong = [
        f"{what} is {tuple(found)}, not {tuple(wanted)}"
        for what, found, wanted in shapes(instruction, program.widths)
        if tuple(found) != tuple(wanted)
    ]
    if wrong:
        place = program.instructions.index(instruction)
        raise KernelError(
            f"inference program, instruction {place} ({type(instruction).__name__}): "
            f"{'; '.join(wrong)}"
        )


Shape = Iterable[int]
Found = Iterator[tuple[str, Shape, Shape]]
"""(what, its shape, the shape that the widths of registers ask for)."""


def _embed(i: p.Embed, w: Widths) -> Found:
    yield "table", i.table.shape[1:], (w[i.out],)


def _normalize(i: p.Normalize, w: Widths) -> Found:
    part = w[i.x] // i.groups
    yield "out", (w[i.out],), (part * i.groups,)
    yield from _vectors(part, weight=i.weight, bias=i.bias)


def _linear(i: p.Linear, w: Widths) -> Found:
    yield "weight", i.weight.shape, (w[i.out], w[i.x])
    yield from _vectors(w[i.out], bias=i.bias)
    if i.add is not None:
        yield "add", (w[i.add],), (w[i.out],)


def _gated(i: p.Gated, w: Widths) -> Found:
    yield "gate", i.gate.shape, (w[i.out], w[i.x])
    yield "up", i.up.shape, (w[i.out], w[i.x])
    yield from _vectors(w[i.out], gate_bias=i.gate_bias, up_bias=i.up_bias)


def _rotate(i: p.Rotate, w: Widths) -> Found:
    yield "sin", i.sin.shape, i.cos.shape
    yield "x", (w[i.x] % i.head_dim, 2 * i.cos.shape[1] <= i.head_dim), (0, True)


def _attend(i: p.Attend, w: Widths) -> Found:
    q = i.heads * i.head_dim
    kv = i.kv_heads * i.head_dim
    yield "q, k, v, out", (w[i.q], w[i.k], w[i.v], w[i.out]), (q, kv, kv, q)
    yield from _vectors(i.heads, slopes=i.slopes)
    if i.groups is not None:
        known = all(0 <= g < i.kv_heads for g in i.groups)
        yield "groups", (len(i.groups), known), (i.heads, True)


def _experts(i: p.Experts, w: Widths) -> Found:
    inner = i.gates[0].shape[0] if i.gates else 0
    yield "router", i.router.shape[1:], (w[i.x],)
    yield "out", (w[i.out],), (w[i.x],)
    yield from (("gates", each.shape, (inner, w[i.x])) for each in i.gates)
    yield from (("ups", each.shape, (inner, w[i.x])) for each in i.ups)
    yield from (("downs", each.shape, (w[i.out], inner)) for each in i.downs)
    enough = i.top_k <= i.router.shape[0]
    yield "experts", (len(i.ups), len(i.downs), enough), (len(i.gates), len(i.gates), True)


def _add(i: p.Add, w: Widths) -> Found:
    yield "x, y", (w[i.x], w[i.y]), (w[i.out], w[i.out])
    yield from _vectors(w[i.out], bias=i.bias)


def _columns(i: p.Columns, w: Widths) -> Found:
    part = w[i.x] // i.groups
    yield "out", (w[i.out], w[i.x]), (i.groups * i.width, part * i.groups)
    yield "columns", (i.first >= 0 and i.first + i.width <= part,), (True,)


def _keep(i: p.Keep, w: Widths) -> Found:
    yield "out", (w[i.out],), (w[i.x],)


def _vectors(width: int, **vectors: Tensor | None) -> Found:
    """One for each vector that there is."""
    yield from ((name, x.shape, (width,)) for name, x in vectors.items() if x is not None)


_SHAPES: dict[type, Callable[[Any, Widths], Found]] = {
    p.Embed: _embed,
    p.Normalize: _normalize,
    p.Linear: _linear,
    p.Gated: _gated,
    p.Rotate: _rotate,
    p.Attend: _attend,
    p.Experts: _experts,
    p.Add: _add,
    p.Columns: _columns,
    p.Keep: _keep,
}  # Reduce and Gather are by collectives, which see the registers as tensors.
