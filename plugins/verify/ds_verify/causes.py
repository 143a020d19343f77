"""What usually causes a difference, by arithmetic on the recorded tensors.

A reduced gradient is a sum of what the micro-batches of all data-parallel ranks contribute, each
with one weight. The contributions are recorded in the reference, so the weights with which they
stand in a wrong gradient follow by least squares: twice each is a wrong divisor, zero for other
ranks is a missing reduction, zero for one micro-batch is a dropped one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ds_verify.comparing import Difference, Key
    from ds_verify.recording.records import Recorded

EXACT = 1e-2
"""The relative residual below which contributions explain a gradient."""


def explain(
    wrong: Sequence[Difference],
    found: Sequence[Recorded],
    reference: Mapping[Key, Tensor],
    facts: Mapping[str, Any],
    equal: Sequence[Difference],
) -> str:
    """A sentence on the first of `wrong`, the differences of one step in the order of computation.

    found: what the subject recorded in the step.
    reference: the whole samples of the step.
    equal: the rows of the steps before.
    """
    first = wrong[0]
    key = (first.kind, first.name, first.micro, first.part)
    piece = next((p for p in found if p.rank == first.rank and p.entry.key == key), None)
    if piece is None:
        return "no rank has it, or not all of it: it was never computed, or dropped"
    values = piece.values.double()
    right = piece.of(reference[piece.entry.key])
    if not bool(torch.isfinite(values).all()):
        return "it has values that are not finite, and the reference has none"
    peers = {row.rank for row in wrong if row.kind == first.kind and row.name == first.name}
    if first.kind == "gradient":
        return _of_gradient(first, piece, values, right, reference, facts)
    if first.kind == "norm":
        return _of_norm(values, right)
    if first.kind in ("weight", "state"):
        return _of_update(first, peers, int(facts["world"]))
    if first.kind == "forward":
        seen = {row.name for row in equal if row.kind == "weight"}
        stale = (
            "weights were equal after the step before: the module may compute with others "
            "(a stale or wrong gather), or its arithmetic is another in this layout"
        )
        return stale if seen else "the module computes something else in this layout"
    if first.kind == "local gradient":
        return _of_local(values, right)
    return "the backward of this module, or of what follows it, differs in this layout"


def _multiple(values: Tensor, right: Tensor) -> float | None:
    """The number that `values` is a multiple of `right` by; None where it is none."""
    square = float(right @ right)
    if not square:
        return None
    factor = float(values @ right) / square
    residual = float((values - factor * right).norm()) / max(float(values.norm()), 1e-300)
    return factor if residual < EXACT or not float(values.norm()) else None


def _of_gradient(
    first: Difference,
    piece: Recorded,
    values: Tensor,
    right: Tensor,
    reference: Mapping[Key, Tensor],
    facts: Mapping[str, Any],
) -> str:
    if not float(values.norm()):
        return "it is zero: the gradient was dropped"
    factor = _multiple(values, right)
    if factor is not None and abs(factor - 1) > EXACT:
        return f"it is {factor:.4g} times the reference: {_divisor(factor, facts)}"
    rows = {
        key[2:]: piece.of(whole)
        for key, whole in reference.items()
        if key[:2] == ("local gradient", first.name)
    }
    weights = _weights(values, list(rows.values()))
    # Near 1 each, they are right to rounding, and the difference is something else.
    if weights is not None and any(abs(weight - 1) > 5 * EXACT for weight in weights):
        return _of_weights(dict(zip(rows, weights, strict=True)))
    relative = float((values - right).norm() / right.norm()) if float(right.norm()) else math.inf
    for dtype, eps in (("bfloat16", 2.0**-8), ("float16", 2.0**-11)):
        if eps / 10 < relative < eps * 2:
            return (
                f"it is right to {relative:.1g}, which is the rounding of {dtype}: it was "
                "accumulated or sent in a lower precision than in the reference"
            )
    apart = (values - right).abs() > EXACT * right.abs().max()
    if 0 < int(apart.sum()) <= 0.75 * apart.numel():
        lo, hi = (int(apart.nonzero()[i]) for i in (0, -1))
        return (
            f"{int(apart.sum())} of {apart.numel()} of its elements differ, between places {lo} "
            f"and {hi} of what rank {first.rank} has"
        )
    return "it is no sum of the gradients of the micro-batches"


def _divisor(factor: float, facts: Mapping[str, Any]) -> str:
    known = {"data-parallel ranks": int(facts["parts"]), "accumulation steps": int(facts["gas"])}
    known["world size"] = int(facts["world"])
    for name, size in known.items():
        if size > 1 and (abs(factor / size - 1) < EXACT or abs(factor * size - 1) < EXACT):
            return f"{size} is the number of {name}, so it is divided wrongly (sum or mean)"
    return "it is divided or scaled wrongly"


def _weights(values: Tensor, contributions: Sequence[Tensor]) -> list[float] | None:
    """The weight of each contribution in `values`, where 1 is right; None where they do not explain
    it.
    """
    count = len(contributions)
    if not count or values.numel() < 2 * count:
        return None
    matrix = torch.stack(list(contributions), 1) / count
    solved = torch.linalg.lstsq(matrix, values, driver="gelsd").solution
    residual = float((matrix @ solved - values).norm()) / max(float(values.norm()), 1e-300)
    return [float(w) for w in solved] if residual < EXACT else None


def _of_weights(weights: Mapping[tuple[int, int], float]) -> str:
    """What the weights by (micro-batch, data-parallel index) tell."""
    zero = {place for place, weight in weights.items() if abs(weight) < 0.05}
    micros = {m for m, _ in weights}
    parts = {p for _, p in weights}
    for micro in sorted(micros):
        if zero == {(micro, p) for p in parts}:
            return f"micro-batch {micro} of the step is missing in it"
    left = {p for _, p in weights.keys() - zero}
    if zero and zero == {(m, p) for m in micros for p in parts - left}:
        ranks = ", ".join(str(p) for p in sorted(left))
        return (
            f"it has the samples of data-parallel rank {ranks} alone: a reduction over the "
            "data-parallel ranks is missing"
        )
    shown = ", ".join(
        f"{weight:.2g} (micro-batch {m}, data-parallel rank {p})"
        for (m, p), weight in weights.items()
    )
    return f"the micro-batches stand in it with these weights, of which each should be 1: {shown}"


def _of_norm(values: Tensor, right: Tensor) -> str:
    ratio = float(values[0] / right[0]) if float(right[0]) else math.inf
    less = (
        "less: elements of other ranks are missing in it"
        if ratio < 1
        else "more: some elements count several times"
    )
    return (
        f"all gradients are equal, and the norm is {ratio:.4g} times the reference's, {less}. With "
        "clipping every weight is updated wrongly"
    )


def _of_update(first: Difference, ranks: set[int], world: int) -> str:
    everywhere = len(ranks) == world
    where = "on every rank" if everywhere else f"on rank {', '.join(map(str, sorted(ranks)))} alone"
    if not first.norm:
        return (
            f"it has not changed in this step {where}, though its gradient is right: its update "
            "was dropped, or not given to this rank"
        )
    if first.kind == "weight" and not everywhere:
        return (
            f"its gradient is right, and the new weight is wrong {where}: copies of it drift apart "
            "(not gathered or broadcast after the step)"
        )
    return (
        f"its gradient is right and its update is wrong {where}: the optimizer sees a part of the "
        "tensor, another clipping factor, other states or another learning rate"
    )


def _of_local(values: Tensor, right: Tensor) -> str:
    if not float(values.norm()):
        return "the gradient of this micro-batch does not arrive at the parameter"
    factor = _multiple(values, right)
    if factor is not None and abs(factor - 1) > EXACT:
        return f"the micro-batch's own gradient is {factor:.4g} times the reference's"
    return (
        "the micro-batch's own gradient is wrong before any reduction: a use of the parameter is "
        "missing or counted twice, or its module's backward differs"
    )
