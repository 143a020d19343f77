"""An inference program as a table of CUDA launches, and which instructions torch runs instead.

[Note: who runs an instruction] Each instruction (or a few that go together: products of one input;
rotary embeddings with the cache) becomes a `Unit`: launches of this package's kernels, or nothing
where they cannot take it; then torch runs it, by the kit's interpreter. Products are for few rows:
above `Unit.most_rows` torch's own are faster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from ds_inference_kit import program as p
from ds_inference_kit.weights import Quantized
from torch import Tensor

from ds_ops_cuda import native
from ds_ops_cuda.inference.shapes import check_shapes
from ds_ops_cuda.native import TYPES

ANY = 1 << 62
FEW = 8
FEW_QUANTIZED = 32
FEW_FOR_EXPERTS = 16
"""Rows up to which a product reads its weights once (or, quantised, few times) in our kernels."""
PER_TASK = 4
"""Query heads that one block of attention takes, where they read the same keys."""

_NONE = (0, 0)


@dataclass(frozen=True, slots=True)
class Unit:
    """Instructions that run together."""

    instructions: tuple[p.Instruction, ...]
    # Places in the table; empty: torch runs them.
    launches: range
    # Up to how many rows the launches are used.
    most_rows: int
    # Whether they are behind `Keep`.
    kept: bool


@dataclass(slots=True)
class Table:
    """A translated program."""

    # The native program.
    launches: Any
    units: list[Unit]
    # Registers that are written behind `Keep` only.
    kept: frozenset[int]
    # Whether the program's output is written behind it.
    kept_output: bool
    # Tensors that launches read.
    held: list[Tensor]
    # fp32 elements that launches need, whatever the rows.
    scratch: int = 0
    # And for each row.
    scratch_per_row: int = 0


def device_of(program: p.Program) -> torch.device | None:
    """The one device of all weights, or None."""
    found = {t.device for i in program.instructions for t in _tensors(i)}
    return found.pop() if len(found) == 1 else None


def _tensors(instruction: p.Instruction) -> Iterable[Tensor]:
    for field in dataclasses.fields(instruction):
        value = getattr(instruction, field.name)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Quantized):
                yield from (t for t in (each.q, each.scales, each.lows) if t is not None)
            elif isinstance(each, Tensor):
                yield each


def translate(program: p.Program, device: torch.device, blocks: int) -> Table:
    """The table of `program`, whose weights are on `device`.

    blocks: that the device should have at work at once.
    """
    return _Translation(program, device, blocks).table


class _Translation:
    """Walks over a program once."""

    def __init__(self, program: p.Program, device: torch.device, blocks: int) -> None:
        self._program = program
        self._device = device
        self._blocks = blocks
        self._native = native.native()
        self._launches = self._native.Program(blocks)
        self._kept = False
        before: set[int] = set()
        after: set[int] = set()
        self.table = Table(self._launches, [], frozenset(), False, [])
        # the one whose keys and values the launches before have written
        self._written: p.Attend | None = None
        code = program.instructions
        # A walk: at each place the instructions that run together, checked, then turned into
        # launches.
        at = 0
        while at < len(code):
            together = _together(code, at)
            at += len(together)
            # Addresses are all that kernels see.
            for i in together:
                check_shapes(i, program)
            self._kept = self._kept or isinstance(together[0], p.Keep)
            self._unit(together, code[at] if at < len(code) else None)
            for i in together:
                (after if self._kept else before).update(_written(i))
        self.table.kept = frozenset(after - before)
        self.table.kept_output = program.output in after

    def _unit(self, together: tuple[p.Instruction, ...], follows: p.Instruction | None) -> None:
        """Add launches for instructions that run together, as far as there are any."""
        first = together[0]
        if (
            isinstance(first, p.Attend)
            and first.layer is not None
            and self._can_attend(first)
            and self._written is not first
        ):
            # No rotation came before it that would have written its keys and values into the cache
            # on the way.
            self._launches.place([], *_cache_place(first))
            self._close((), ANY)
        if isinstance(first, p.Linear):
            most = self._products(together)
        elif isinstance(first, p.Rotate):
            most = self._turn(together, follows)
        else:
            most = _ADDERS[type(first)](self, first) if type(first) in _ADDERS else None
        self._close(together, most or 0)

    def _close(self, together: tuple[p.Instruction, ...], most: int) -> None:
        """What was launched since the last unit is one."""
        start = self.table.units[-1].launches.stop if self.table.units else 0
        self.table.units.append(Unit(together, range(start, len(self._launches)), most, self._kept))

    # -- what kernels can take ---------------------------------------------------------------------

    def _vector(self, x: Tensor | None) -> tuple[int, int] | None:
        """Address and type; None where kernels cannot read it."""
        if x is None:
            return _NONE
        return (x.data_ptr(), TYPES[x.dtype]) if x.dtype in TYPES and x.is_contiguous() else None

    def _matrix(self, weight: p.Weight, *more: p.Weight) -> tuple[Any, int, bool] | None:
        """As a native matrix, its kind, and whether columns are contiguous; None where kernels
        cannot take it.

        more: further weights of the same form, which stand at the same place of other experts.
        """
        parts = _parts(weight)
        # One launch reads the weights of all experts by a table of addresses, so all must have one
        # form.
        if parts is None or any(_parts(w) is None or _form(w) != _form(weight) for w in more):
            return None
        kind, columns = parts
        out, inner = weight.shape
        group = weight.group if isinstance(weight, Quantized) else 0
        scales = lows = 0
        data = weight.q if isinstance(weight, Quantized) else weight
        if isinstance(weight, Quantized):
            scales = weight.scales.data_ptr()
            lows = 0 if weight.lows is None else weight.lows.data_ptr()
        return (
            self._native.Matrix(data.data_ptr(), scales, lows, kind, out, inner, group, columns),
            kind,
            columns,
        )

    # -- adders: launches for one instruction, and up to how many rows; None: torch runs it --------

    def _embed(self, i: p.Embed) -> int | None:
        table = self._vector(i.table)
        if table is None:
            return None
        entries, width = i.table.shape
        self._launches.embed(
            i.out, width, table, entries, i.by.value, i.offset, float(i.scale), i.add
        )
        return ANY

    def _normalize(self, i: p.Normalize) -> int | None:
        weight = self._vector(i.weight)
        bias = self._vector(i.bias)
        if weight is None or bias is None:
            return None
        width = self._program.widths[i.x]
        layer = i.norm is p.Norm.LAYER
        self._launches.normalize(
            i.x, i.out, width, i.groups, weight, bias, i.eps, layer, self._kept
        )
        return ANY

    def _products(self, together: tuple[p.Instruction, ...]) -> int | None:
        parts = []
        kinds = set()
        for i in together:
            assert isinstance(i, p.Linear)
            matrix = self._matrix(i.weight)
            bias = self._vector(i.bias)
            if matrix is None or bias is None:
                return None
            parts.append(self._native.Part(matrix[0], bias, i.out))
            kinds.add(matrix[1:])
        first = together[0]
        assert isinstance(first, p.Linear) and len(kinds) == 1
        added = -1 if first.add is None else first.add
        self._launches.products(first.x, parts, False, first.activation.value, added, self._kept)
        return _few(first.weight)

    def _gated(self, i: p.Gated) -> int | None:
        gate = self._matrix(i.gate)
        up = self._matrix(i.up)
        gate_bias = self._vector(i.gate_bias)
        up_bias = self._vector(i.up_bias)
        # Both products are made in one launch: gate and up must be of one form.
        if (
            gate is None
            or up is None
            or gate[1:] != up[1:]
            or gate[2]
            or gate_bias is None
            or up_bias is None
        ):
            return None
        parts = [
            self._native.Part(gate[0], gate_bias, i.out),
            self._native.Part(up[0], up_bias, i.out),
        ]
        self._launches.products(i.x, parts, True, i.activation.value, -1, self._kept)
        return _few(i.gate)

    def _turn(
        self, together: tuple[p.Instruction, ...], follows: p.Instruction | None
    ) -> int | None:
        """Rotations; and where an Attend follows that kernels take, its keys and values go into the
        cache.
        """
        turns = []
        for i in together:
            assert isinstance(i, p.Rotate)
            if self._kept or any(
                t.dtype is not torch.float32 or not t.is_contiguous() for t in (i.cos, i.sin)
            ):
                return None
            heads = self._program.widths[i.x] // i.head_dim
            positions, pairs = i.cos.shape
            halves = i.rotary is p.Rotary.HALF
            where = (i.cos.data_ptr(), i.sin.data_ptr())
            turns.append(
                self._native.Turn(i.x, heads, i.head_dim, pairs, *where, positions, halves)
            )
        # Keys that were just rotated are still in registers: writing them into the cache in the
        # same launch saves reading them again.
        written = (
            isinstance(follows, p.Attend)
            and follows.layer is not None
            and self._can_attend(follows)
        )
        self._written = follows if written and isinstance(follows, p.Attend) else None
        self._launches.place(turns, *_cache_place(self._written))
        return ANY

    def _can_attend(self, i: p.Attend) -> bool:
        slopes = i.slopes is None or (i.slopes.dtype is torch.float32 and i.slopes.is_contiguous())
        # Kernels read eight elements at a time, and keep a head in registers.
        return i.head_dim % 8 == 0 and i.head_dim <= 256 and slopes and not self._kept

    def _attend(self, i: p.Attend) -> int | None:
        """Its launches; those that write the cache are in the unit before."""
        if not self._can_attend(i):
            return None
        per_task, table = _tasks(i)
        heads_of = torch.tensor(table, dtype=torch.int32, device=self._device)
        self.table.held.append(heads_of)
        tasks = len(table) // (per_task + 1)
        layer = -1 if i.layer is None else i.layer
        slopes = 0 if i.slopes is None else i.slopes.data_ptr()
        self._launches.attend(
            i.q,
            i.k,
            i.v,
            i.out,
            i.heads,
            i.kv_heads,
            i.head_dim,
            i.scale,
            layer,
            i.causal,
            i.window or 0,
            slopes,
            heads_of.data_ptr(),
            tasks,
            per_task,
        )
        # Long contexts are divided over blocks: each leaves a partial sum, its maximum and its
        # weight.
        self.table.scratch = max(self.table.scratch, self._blocks * per_task * (i.head_dim + 2))
        return ANY

    def _experts(self, i: p.Experts) -> int | None:
        router = self._matrix(i.router)
        groups = [self._matrix(ws[0], *ws[1:]) if ws else None for ws in (i.gates, i.ups, i.downs)]
        gate, up, down = groups
        if router is None or gate is None or up is None or down is None or router[2]:
            return None
        if not gate[1:] == up[1:] == down[1:] or gate[2]:
            return None
        addresses = [[_addresses(w) for w in ws] for ws in (i.gates, i.ups, i.downs)]
        # On the device: which experts are chosen is known there alone.
        where = torch.tensor(addresses, dtype=torch.int64, device=self._device)
        self.table.held.append(where)
        self._launches.experts(
            i.x,
            i.out,
            router[0],
            gate[0],
            up[0],
            down[0],
            where.data_ptr(),
            len(i.gates),
            i.first,
            i.top_k,
            i.normalize,
            i.activation.value,
            self._kept,
        )
        inner = i.gates[0].shape[0]
        self.table.scratch = max(self.table.scratch, 4)
        per_row = i.router.shape[0] + (2 + inner) * i.top_k
        self.table.scratch_per_row = max(self.table.scratch_per_row, per_row)
        return FEW_FOR_EXPERTS

    def _add(self, i: p.Add) -> int | None:
        bias = self._vector(i.bias)
        if bias is None:
            return None
        self._launches.add(i.x, i.y, i.out, self._program.widths[i.out], bias, self._kept)
        return ANY

    def _columns(self, i: p.Columns) -> int:
        part = self._program.widths[i.x] // i.groups
        self._launches.columns(i.x, i.out, i.width, i.first, i.groups, part, self._kept)
        return ANY

    def _keep(self, i: p.Keep) -> int | None:
        if i.x == i.out:  # rows would be written that others are still to read
            return None
        self._launches.keep(i.x, i.out, self._program.widths[i.x])
        return ANY


_ADDERS: dict[type, Any] = {
    p.Embed: _Translation._embed, p.Normalize: _Translation._normalize, p.Gated: _Translation._gated,
    p.Attend: _Translation._attend, p.Experts: _Translation._experts, p.Add: _Translation._add,
    p.Columns: _Translation._columns, p.Keep: _Translation._keep,
}  # fmt: skip


# -- what instructions are -------------------------------------------------------------------------


def _together(code: tuple[p.Instruction, ...], at: int) -> tuple[p.Instruction, ...]:
    """The instruction at `at`, and those after it that run with it: products of the same x;
    rotations.
    """
    first = code[at]
    if isinstance(first, p.Linear) and first.add is None and _parts(first.weight) is not None:
        return tuple(_run(code[at : at + 3], _joins))
    if isinstance(first, p.Rotate):
        return tuple(
            _run(code[at : at + 2], lambda before, i: isinstance(i, p.Rotate) and i.x != first.x)
        )
    return (first,)


def _run(code: tuple[p.Instruction, ...], joins: Any) -> Iterable[p.Instruction]:
    """The first, and those that follow as long as ``joins(those before, it)``."""
    found = [code[0]]
    for i in code[1:]:
        if not joins(found, i):
            break
        found.append(i)
    return found


def _joins(before: list[p.Instruction], i: p.Instruction) -> bool:
    """Whether the product `i` can run with those before, of the same x."""
    first = before[0]
    if not isinstance(first, p.Linear) or not isinstance(i, p.Linear):
        return False
    alike = i.x == first.x and i.add is None and i.activation is first.activation
    # A register that two of them write would have either result.
    apart = i.out not in {each.out for each in before if isinstance(each, p.Linear)}
    parts = _parts(i.weight)
    return alike and apart and parts is not None and parts == _parts(first.weight) and not parts[1]


def _parts(weight: p.Weight) -> tuple[int, bool] | None:
    """Kind of a matrix, and whether its columns are contiguous; None where kernels cannot read
    it."""
    inner = weight.shape[1]
    if isinstance(weight, Quantized):
        parts = [t for t in (weight.q, weight.scales, weight.lows) if t is not None]
        plain = all(t.is_contiguous() for t in parts) and all(
            t.dtype is torch.float16 for t in parts[1:]
        )
        # Loads of 16 bytes need that alignment.
        eights = inner % 8 == 0 and weight.group % 8 == 0 and weight.q.data_ptr() % weight.bits == 0
        return (weight.bits, False) if plain and eights else None
    if weight.dtype not in TYPES:
        return None
    kind = TYPES[weight.dtype]
    if weight.is_contiguous() and inner % 8 == 0 and weight.data_ptr() % 16 == 0:
        return kind, False
    return (kind, True) if weight.t().is_contiguous() else None


def _form(weight: p.Weight) -> tuple[Any, ...]:
    own = (weight.group, weight.lows is None) if isinstance(weight, Quantized) else ()
    return _parts(weight), weight.shape, *own


def _addresses(weight: p.Weight) -> list[int]:
    if not isinstance(weight, Quantized):
        return [weight.data_ptr(), 0, 0]
    return [
        weight.q.data_ptr(),
        weight.scales.data_ptr(),
        0 if weight.lows is None else weight.lows.data_ptr(),
    ]


def _few(weight: p.Weight) -> int:
    return FEW_QUANTIZED if isinstance(weight, Quantized) else FEW


def _cache_place(attend: p.Attend | None) -> tuple[int, int, int, int, int]:
    """Keys, values, heads, dims and layer of what goes into the cache."""
    if attend is None or attend.layer is None:
        return 0, 0, 0, 0, -1
    return attend.k, attend.v, attend.kv_heads, attend.head_dim, attend.layer


def _tasks(i: p.Attend) -> tuple[int, list[int]]:
    """Heads of a task (1 or `PER_TASK`); and query heads of each task, -1 where it has fewer, then
    their key heads.
    """
    key_heads = i.groups or [h * i.kv_heads // i.heads for h in range(i.heads)]
    of_key = [[h for h in range(i.heads) if key_heads[h] == k] for k in range(i.kv_heads)]
    # Query heads of one key head read the same keys, which are then loaded once for all of them.
    per_task = 1 if all(len(heads) <= 1 for heads in of_key) else PER_TASK
    heads_of: list[int] = []
    keys: list[int] = []
    for key, heads in enumerate(of_key):
        for first in range(0, len(heads), per_task):
            some = heads[first : first + per_task]
            heads_of += some + [-1] * (per_task - len(some))
            keys.append(key)
    return per_task, heads_of + keys


def _written(i: p.Instruction) -> tuple[int, ...]:
    return (i.x,) if isinstance(i, (p.Rotate, p.Reduce)) else (i.out,)
