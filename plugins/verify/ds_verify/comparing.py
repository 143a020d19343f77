"""Compares two records tensor by tensor, in the order of computation.

[Note: tolerance] How far apart two right runs may be depends on the model: a deep one in bf16
magnifies rounding by much. So the reference runs twice, the second time with its weights and inputs
moved by one unit in the last place. A tensor's ratio is its difference between subject and
reference over its difference between the two references, in L2 norm. Small tensors can be moved too
little by chance: the difference is taken as at least the median relative one of all tensors of its
kind and step, and as at least the rounding of the tensor's own dtype.

[Note: steps] Each step of the references begins with the subject's weights and states, so what one
step leaves apart, however right, does not add up, and a difference belongs to its step.

[Note: updates] Weights are compared by how far they have moved in the step: a learning rate of 1e-4
changes them by less than a perturbed start does, so an update that is missing on one rank would hide
in the weights themselves. Where a gradient is little but rounding, optimizers that divide by its
size move an element by chance: such elements are allowed for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_verify.recording.records import KINDS, Record, Recorded
from ds_verify.recording.sampling import sample_size

LIMIT = 8.0
"""The ratio above which a tensor counts as different."""

TURNED = 0.01
"""The share of a state of whole matrices by which a unit in the last place may move it."""

SMALL = 1e-10
"""A share of an update in which no fault hides. In fp64, what optimizers of matrices make of small
singular values is magnified by chance, in one run and not in the other, but never by so much."""

START = -1
"""The phase of weights before the first step, which are compared with those of the checkpoint."""

Key = tuple[str, str, int, int]

NORM: Key = ("norm", "the global norm", 0, 0)

AFTER_SUM = ("norm", "state", "weight")
"""What a skipped step leaves as it was."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one recorded tensor of one rank is from the reference's."""

    step: int
    kind: str
    """One of `KINDS`."""
    name: str
    micro: int
    """The micro-batch, of what belongs to one."""
    part: int
    """The data-parallel index of the samples, of what belongs to a micro-batch."""
    rank: int
    order: tuple[int, int, int, int]
    """Sorts by time: step, phase, micro-batch, place."""
    ratio: float
    """The difference over what rounding explains."""
    relative: float
    """The norm of the difference over that of the reference."""
    norm: float
    """Of what the subject has."""
    reference: float
    """The norm of what it should have."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a comparison found."""

    rows: tuple[Difference, ...]
    """All tensors that were compared, in the order of computation."""
    skipped: tuple[str, ...] = ()
    """Tensors that the reference has in another shape, or not at all."""
    limit: float = LIMIT
    cause: str = ""
    """What usually causes the first difference."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """Of the subject's layout."""

    @property
    def wrong(self) -> list[Difference]:
        """The rows above the limit."""
        return [row for row in self.rows if not row.ratio <= self.limit]

    @property
    def first(self) -> Difference | None:
        """The first difference in the order of computation; None where the runs are equal."""
        return next(iter(self.wrong), None)

    @property
    def largest(self) -> float:
        """The largest ratio."""
        return max((row.ratio for row in self.rows), default=0.0)


def compare_folders(
    subject: Path, reference: Path, perturbed: Path | None = None, limit: float = LIMIT
) -> Report:
    """Compare the record of a run with that of the reference, and with a perturbed reference's.

    perturbed: None leaves the rounding of each tensor's dtype as the tolerance.

    Raises UsageError for a record that is not whole.
    """
    from ds_verify.causes import explain

    records = [Record(folder) for folder in (subject, reference)]
    if perturbed is not None:
        records.append(Record(perturbed))
    sample = int(records[0].facts["limit"])
    rows: list[Difference] = []
    skipped: dict[str, None] = {}
    cause = ""
    for step in range(records[0].steps):
        # Those of the reference are the subject's: they were loaded from its checkpoint.
        begin = [assemble(record.begin(step), sample) for record in records[1:]]
        if step == 0:
            rows = _compare_begin(records[0].begin(0), begin[0])
            cause = _cause_of_begin(rows, limit)
        found = _joined(records[0].step(step), int(records[0].facts["same_batch"]))
        others = [record.step(step) for record in records[1:]]
        wholes = [assemble(pieces, sample) for pieces in others]
        shapes = {piece.entry.key: piece.entry.shape for piece in others[0]}
        # The order of one process: ranks with parts of a model count their own tensors alone.
        orders = {piece.entry.key: piece.entry.order for piece in others[0]}
        # An output of which each rank has a part has another shape in one process.
        fitting = [p for p in found if shapes.get(p.entry.key, p.entry.shape) == p.entry.shape]
        shared = tuple(records[0].facts["shared"])
        new, missing = _compare_step(step, fitting, wholes, begin, sample, orders, shared)
        missing += [
            f"{p.entry.kind} {p.entry.name}"
            for p in found
            if shapes.get(p.entry.key, p.entry.shape) != p.entry.shape
        ]
        if _sum_overflowed(wholes[0], found, records[0].facts):
            # Right in its way: the step is skipped, and the reference's is not.
            new = [row for row in new if row.kind not in AFTER_SUM]
            missing.append(f"the update of step {step}, whose sums overflowed in fp16")
        new.sort(key=lambda row: (row.order, row.rank))
        skipped.update(dict.fromkeys(missing))
        if not cause and (wrong := [row for row in new if not row.ratio <= limit]):
            earlier = [row for row in rows if row.step < step]
            cause = explain(wrong, found, wholes[0], records[0].facts, equal=earlier)
        rows += new
    if not rows:
        from ds_core.errors import UsageError

        raise UsageError("the two records have no tensor in common, so nothing was compared")
    return Report(tuple(rows), tuple(skipped), limit, cause, records[0].facts)


def _sum_overflowed(
    reference: Mapping[Key, Tensor], found: list[Recorded], facts: Mapping[str, Any]
) -> bool:
    """Whether ranks may not sum in fp16 what the reference sums in fp32."""
    norm = next((p.values for p in found if p.entry.key == NORM), None)
    scale = reference.get(("scale", "the factor of losses", 0, 0))
    if norm is None or scale is None or bool(torch.isfinite(norm).all()):
        return False
    if not bool(torch.isfinite(reference[NORM]).all()):
        return False
    largest = max(
        (
            float(w.abs().max())
            for key, w in reference.items()
            if key[0] == "gradient" and w.numel()
        ),
        default=0.0,
    )
    most = largest * float(scale) * int(facts["gas"]) * int(facts["parts"])
    return 2 * most > torch.finfo(torch.float16).max


def _joined(found: list[Recorded], ranks: int) -> list[Recorded]:
    """With the means of micro-batches' own gradients, where several ranks work on the same samples.

    ranks: how many do, each on a part of the sequences.
    """
    if ranks == 1:
        return found
    groups: dict[tuple[object, ...], list[Recorded]] = {}
    for piece in found:
        if piece.entry.kind == "local gradient":
            places = None if piece.places is None else tuple(piece.places[:1].tolist())
            groups.setdefault((piece.entry.key, piece.entry.first, places), []).append(piece)
    means = [
        replace(pieces[0], values=torch.stack([p.values.double() for p in pieces]).mean(0))
        for pieces in groups.values()
    ]
    return [piece for piece in found if piece.entry.kind != "local gradient"] + means


def assemble(pieces: Iterable[Recorded], limit: int) -> dict[Key, Tensor]:
    """The whole sample of each recorded tensor, of the pieces of all ranks; NaN where none has it."""
    found: dict[Key, Tensor] = {}
    for piece in pieces:
        entry = piece.entry
        size = sample_size(entry.shape, limit)
        if entry.key not in found:
            if piece.places is None and piece.values.numel() == size:
                found[entry.key] = piece.values.double()
                continue
            found[entry.key] = torch.full((size,), math.nan, dtype=torch.float64)
        whole = found[entry.key]
        if whole.numel() == size:
            if piece.places is not None:
                whole[piece.places] = piece.values.double()
            else:
                piece.of(whole)[:] = piece.values.double()
    return found


@dataclass(frozen=True, slots=True)
class _Step:
    """What one step's tensors are compared with."""

    number: int
    reference: Mapping[Key, Tensor]
    """The whole samples of the reference."""
    before: Mapping[Key, Tensor]
    """The samples of weights before the step."""
    moved: Mapping[Key, float]
    """How far the perturbed reference is from the reference."""
    usual: Mapping[str, float]
    """The median of the same by kind, as a part of the norm."""
    orders: Mapping[Key, int]
    """The places of tensors in the reference's order of computation."""

    def row(self, piece: Recorded, right: Tensor) -> Difference:
        """The difference of a tensor of one rank from `right`, a whole sample."""
        entry = piece.entry
        here = piece.of(right)
        values, here = _without_overflow(piece.values.double(), here)
        start = self.before.get(entry.key) if _is_weight(entry.kind, entry.name) else None
        by_update = start is not None
        if start is not None:
            # See [Note: updates].
            change = here - piece.of(start)
            values = values - piece.of(start)
        else:
            change = here
        share = math.sqrt(max(here.numel(), 1) / max(right.numel(), 1))
        expected = max(
            self.moved.get(entry.key, 0.0) * share,
            self.usual.get(entry.kind, 0.0) * _norm(change),
            _rounding(entry.dtype, here, is_weight=by_update),
        )
        unsteady = self._unsteady(piece, change) if by_update else 0.0
        size = _norm(values - change)
        place = self.orders.get(entry.key, entry.order)
        order = (self.number, _phase(entry.kind), entry.micro, place)
        return Difference(
            step=self.number,
            kind=entry.kind,
            name=entry.name,
            micro=entry.micro,
            part=entry.part,
            rank=piece.rank,
            order=order,
            ratio=_ratio(size, max(expected, unsteady)),
            relative=_ratio(size, _norm(change)),
            norm=_norm(values),
            reference=_norm(change),
        )

    def _unsteady(self, piece: Recorded, change: Tensor) -> float:
        """How far an update may be off because of elements whose gradient is little but rounding.

        Optimizers such as Adam divide by the gradient's size, so these move as far as others do,
        and each of them by chance in one run and not in another.
        """
        key = ("gradient", piece.entry.name.removeprefix("master/"), 0, 0)
        whole = self.reference.get(key)
        if whole is None or key not in self.moved or not whole.numel():
            return 0.0
        noise = max(self.moved[key], self.usual.get("gradient", 0.0) * _norm(whole))
        noise /= math.sqrt(whole.numel())
        gradient = piece.of(whole).abs()
        share = torch.where(gradient > 0, noise / gradient, 0.0).clamp(max=2.0)
        return _norm(share * change)

    def absent(
        self, found: list[Recorded], limit: int, shared: tuple[str, ...]
    ) -> Iterator[Difference]:
        """Gradients that the reference has, and no rank of the subject, or not all of them."""
        whole = assemble(found, limit)
        norm = whole.get(NORM)
        # A step that is skipped has no reduced gradients; its norm tells whether it should have been.
        kinds = ["local gradient"]
        if norm is None or bool(torch.isfinite(norm).all()):
            kinds.append("gradient")
        for place, (key, right) in enumerate(self.reference.items()):
            kind, name, micro, part = key
            if kind not in kinds or not _norm(right):
                continue
            if kind == "local gradient" and name.startswith(shared):
                continue
            # NaN stands where no rank has an element, unless the gradient itself overflows.
            if key not in whole or bool((torch.isnan(whole[key]) & torch.isfinite(right)).any()):
                order = (self.number, _phase(kind), micro, place)
                yield Difference(
                    self.number, kind, name, micro, part, 0, order, math.inf, 1.0, 0.0, _norm(right)
                )


def _compare_step(
    number: int,
    found: list[Recorded],
    wholes: list[dict[Key, Tensor]],
    begin: list[dict[Key, Tensor]],
    limit: int,
    orders: Mapping[Key, int],
    shared: tuple[str, ...],
) -> tuple[list[Difference], list[str]]:
    """The rows of one step, and the names that could not be compared.

    wholes: of the reference, and of the perturbed one if there is one.
    begin: what their weights were before the step.
    orders: see `_Step`.
    shared: see `Recorder.shared`.
    """
    reference = wholes[0]
    moved: dict[Key, float] = {}
    for key, whole in reference.items():
        if len(wholes) > 1 and key in wholes[1] and wholes[1][key].shape == whole.shape:
            other, here = _without_overflow(wholes[1][key], whole)
            moved[key] = _norm(other - here - _since(begin[1], begin[0], key, whole))
            if math.isnan(moved[key]):
                moved[key] = math.inf  # rounding alone decides whether it overflows
    usual = _usual_relative(moved, reference, begin[0])
    # A norm can be moved by nothing by chance, but by no more than all gradients together.
    gradients = math.hypot(*(size for key, size in moved.items() if key[0] == "gradient"), 0.0)
    moved.update({key: max(moved[key], gradients) for key in moved if key[0] == "norm"})
    moved.update(_of_matrices(moved, reference))
    step = _Step(number, reference, begin[0], moved, usual, orders)
    rows = []
    missing = []
    for piece in found:
        right = reference.get(piece.entry.key)
        if right is None or piece.of(right).numel() != piece.values.numel():
            missing.append(f"{piece.entry.kind} {piece.entry.name}")
        else:
            rows.append(step.row(piece, right))
    return [*rows, *step.absent(found, limit, shared)], missing


def _of_matrices(moved: Mapping[Key, float], reference: Mapping[Key, Tensor]) -> dict[Key, float]:
    """How far states of whole matrices are moved: relatively as far as the one of their name, in any
    parameter, that is moved most.

    Bases of eigenvectors turn the more the nearer eigenvalues are to each other, by chance little
    in one matrix and by much in another. Where that is more than `TURNED`, rounding decides where
    they point, and they may point anywhere; what they do is seen in the new weights.
    """
    names: dict[str, list[Key]] = {}
    for key in moved:
        kind, state, *_ = key
        # Those of one value per element are the partitioner's: "optimizer/<state>/<parameter>".
        if kind == "state" and not state.startswith("optimizer/"):
            names.setdefault(state.rpartition("/")[0], []).append(key)
    found = {}
    for keys in names.values():
        sizes = {key: _norm(reference[key]) for key in keys}
        most = max((moved[key] / size for key, size in sizes.items() if size), default=0.0)
        most = math.inf if most > TURNED else most
        found.update({key: max(moved[key], most * size) for key, size in sizes.items() if size})
    return found


def _compare_begin(found: list[Recorded], reference: Mapping[Key, Tensor]) -> list[Difference]:
    """Each rank's weights before the first step, compared with those that its checkpoint has."""
    # Nothing was computed yet, so only rounding to another dtype may stand between them.
    step = _Step(0, reference, {}, {}, {}, {})
    rows = []
    for piece in found:
        right = reference.get(piece.entry.key)
        if right is not None and piece.of(right).numel() == piece.values.numel():
            row = step.row(piece, right)
            rows.append(replace(row, order=(0, START, 0, piece.entry.order)))
    return sorted(rows, key=lambda row: (row.order, row.rank))


def _cause_of_begin(rows: list[Difference], limit: float) -> str:
    if all(row.ratio <= limit for row in rows):
        return ""
    return (
        "before the first step this rank has another value than the one that is saved: ranks begin "
        "with different weights (not broadcast, or changed on one rank after initialize)"
    )


def _phase(kind: str) -> int:
    """Forward, backward and local gradients belong to micro-batches; the rest comes after all."""
    return max(0, KINDS.index(kind) - KINDS.index("local gradient"))


def _is_weight(kind: str, name: str) -> bool:
    return kind == "weight" or name.startswith("master/")


def _since(
    perturbed: Mapping[Key, Tensor], reference: Mapping[Key, Tensor], key: Key, like: Tensor
) -> Tensor:
    """How far apart the two references were before the step, in what is compared by updates."""
    if not _is_weight(key[0], key[1]) or key not in perturbed or key not in reference:
        return torch.zeros_like(like)
    return perturbed[key] - reference[key]


def _usual_relative(
    moved: Mapping[Key, float], reference: Mapping[Key, Tensor], begin: Mapping[Key, Tensor]
) -> dict[str, float]:
    """By kind, the median relative difference between the two references; see `SMALL`."""
    found: dict[str, list[float]] = {}
    for key, size in moved.items():
        whole = reference[key]
        if _is_weight(key[0], key[1]) and key in begin:
            whole = whole - begin[key]
        scale = _norm(whole)
        if scale > 0 and math.isfinite(size):
            found.setdefault(key[0], []).append(size / scale)
    usual = {kind: statistics.median(rows) for kind, rows in found.items()}
    if "weight" in usual:
        usual["weight"] = max(usual["weight"], SMALL)
    return usual


def _rounding(dtype: str, values: Tensor, *, is_weight: bool) -> float:
    """What rounding alone may change in L2 norm.

    A weight in 16 bits differs from a right one only where its master lies next to a boundary: in
    few elements, each by a unit in the last place.
    """
    eps = torch.finfo(getattr(torch, dtype, torch.float64)).eps if dtype in FLOATS else 0.0
    if not values.numel():
        return 0.0
    if not is_weight:
        return eps * _norm(values)
    fine = min(eps, torch.finfo(torch.float32).eps)
    return fine * _norm(values) + eps * float(values.abs().max())


FLOATS = ("float64", "float32", "bfloat16", "float16")


def _without_overflow(values: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Both with zeros where neither is finite: gradients of fp16 that overflow may do so as inf or
    as NaN.
    """
    # One pass says that all are finite, which nearly all are.
    if math.isfinite(float(values.sum())) or math.isfinite(float(right.sum())):
        return values, right
    both = ~(torch.isfinite(values) | torch.isfinite(right))
    if not bool(both.any()):
        return values, right
    return values.masked_fill(both, 0.0), right.masked_fill(both, 0.0)


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values.double())) if values.numel() else 0.0


def _ratio(size: float, expected: float) -> float:
    """`size` over `expected`; infinite where nothing was expected, or a value is not finite."""
    if math.isnan(size):
        return math.inf
    if size == 0:
        return 0.0
    return size / expected if expected > 0 else math.inf
