"""Inference programs in C++: one call for a step of few rows; for many, torch makes the products in
between.

A program is translated once into a table of ops (cpp/inference), cut where other ranks or torch
take part. Registers are fp32 whatever the program's dtype. Up to `ROWS` rows a product streams the
weights through C++, which reads each of them once; beyond, torch multiplies, in the dtype of the
program; quantised weights are widened for it one at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from ds_inference_kit import program as p
from ds_inference_kit.reference import Interpreter
from ds_inference_kit.step import KVCache, Step
from ds_inference_kit.weights import Quantized
from ds_kernel_kit import build
from torch import Tensor

from ds_core.errors import KernelError
from ds_ops_cpu.extension import INFERENCE

ROWS = 24
"""So many rows C++ multiplies itself."""

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Forms of weights, and kinds of ops, as in cpp/inference/table.h.
_INT8 = 8
_INT4 = 9
(_EMBED, _NORMALIZE, _LINEAR, _GATED, _ROTATE, _STORE, _ATTEND, _ROUTE, _EXPERTS_IN, _EXPERTS_OUT, _ADD, _COLUMNS,
 _KEEP) = range(13)  # fmt: skip


@functools.cache
def native() -> ModuleType:
    """The compiled module, built now if it never was."""
    return build.load(INFERENCE)


def load(program: p.Program, collectives: p.Collectives | None = None) -> p.Runnable:
    """See `ds_inference_kit.program.Load`."""
    return _Runnable(program, collectives)


# -- translation -----------------------------------------------------------------------------------


def _vector(x: Tensor) -> tuple[int, int]:
    if x.dim() != 1 or not x.is_contiguous() or x.dtype not in _TYPES:
        raise KernelError(
            f"inference_program: a vector of {x.dtype} and shape {tuple(x.shape)} is not "
            "contiguous floats"
        )
    return x.data_ptr(), _TYPES[x.dtype]


def _weight(w: p.Weight) -> tuple[int, int, int, int, bool, int, int, int, int]:
    """Data, scales, lows, form, columns, out, in, stride, group: see Weight in
    cpp/inference/table.h.
    """
    if isinstance(w, Quantized):
        parts = [w.q, w.scales, *(() if w.lows is None else (w.lows,))]
        if (
            not all(t.is_contiguous() for t in parts)
            or w.scales.dtype != torch.float16
            or w.bits not in (8, 4)
        ):
            raise KernelError(
                "inference_program: quantised weights must be contiguous, 8 or 4 bits, with fp16 "
                "scales"
            )
        lows = 0 if w.lows is None else w.lows.data_ptr()
        form = _INT8 if w.bits == 8 else _INT4
        return w.q.data_ptr(), w.scales.data_ptr(), lows, form, False, *w.shape, w.shape[1], w.group
    if w.dim() != 2 or w.dtype not in _TYPES or w.device.type != "cpu":
        raise KernelError(
            f"inference_program: a weight of {w.dtype} and shape {tuple(w.shape)} on {w.device}"
        )
    out, inner = w.shape
    if w.stride(1) == 1 or inner == 1:
        return w.data_ptr(), 0, 0, _TYPES[w.dtype], False, out, inner, w.stride(0), 0
    if w.stride(0) != 1:
        raise KernelError(
            f"inference_program: neither rows nor columns of a weight are contiguous: {w.stride()}"
        )
    return w.data_ptr(), 0, 0, _TYPES[w.dtype], True, out, inner, w.stride(1), 0


class _Table:
    """A program's ops: the numbers of the first and the one after the last of each instruction."""

    def __init__(self, program: p.Program) -> None:
        self.widths = list(program.widths)
        self.kept: list[Tensor] = []  # made here; ops hold their addresses
        # All registers must be known before C++ makes the program.
        more = [self._rooms(i) for i in program.instructions if isinstance(i, p.Experts)]
        self._chosen = iter(more)
        self.native = native().Program(self.widths, program.output, program.dtype == torch.bfloat16)
        # For each instruction, its first op and the one after its last.
        self.spans: list[tuple[int, int]] = []
        for instruction in program.instructions:
            numbers = [self.native.add(kind, fields) for kind, fields in self._ops(instruction)]
            # An instruction of other ranks has no op: an empty span, behind the one before.
            start = numbers[0] if numbers else (self.spans[-1][1] if self.spans else 0)
            self.spans.append((start, start + len(numbers)))

    def _rooms(self, i: p.Experts) -> tuple[int, int]:
        """Two registers more: who was chosen, and the inner values of each choice."""
        self.widths += [2 * i.top_k, i.top_k * i.gates[0].shape[0]]
        return len(self.widths) - 2, len(self.widths) - 1

    def _fp32(self, x: Tensor) -> int:
        if x.dtype != torch.float32 or not x.is_contiguous():
            x = x.float().contiguous()
            # A copy must live as long as the ops that read it.
            self.kept.append(x)
        return x.data_ptr()

    def _ops(self, i: p.Instruction) -> Iterable[tuple[int, dict[str, Any]]]:
        more: dict[str, Any]
        match i:
            case p.Embed():
                a = _weight(i.table)
                fields = {
                    "out": i.out,
                    "a": a,
                    "by": i.by.value,
                    "offset": i.offset,
                    "scale": i.scale,
                }
                yield _EMBED, {**fields, "accumulate": int(i.add)}
            case p.Normalize():
                more = {"eps": i.eps, "layer_norm": int(i.norm is p.Norm.LAYER), "groups": i.groups}
                yield _NORMALIZE, {"x": i.x, "out": i.out, **more, **_biases(i.weight, i.bias)}
            case p.Linear():
                added = -1 if i.add is None else i.add
                more = {"a": _weight(i.weight), "activation": i.activation.value, "added": added}
                yield _LINEAR, {"x": i.x, "out": i.out, **more, **_biases(i.bias, None)}
            case p.Gated():
                more = {"a": _weight(i.gate), "b": _weight(i.up), "activation": i.activation.value}
                yield _GATED, {"x": i.x, "out": i.out, **more, **_biases(i.gate_bias, i.up_bias)}
            case p.Rotate():
                tables = {
                    "cos": self._fp32(i.cos),
                    "sin": self._fp32(i.sin),
                    "positions": i.cos.shape[0],
                }
                more = {
                    "head_dim": i.head_dim,
                    "dims": 2 * i.cos.shape[1],
                    "pairs": int(i.rotary is p.Rotary.PAIRS),
                }
                yield _ROTATE, {"x": i.x, **tables, **more}
            case p.Attend():
                yield from self._attention(i)
            case p.Experts():
                yield from self._experts(i)
            case p.Add():
                yield _ADD, {"x": i.x, "y": i.y, "out": i.out, **_biases(i.bias, None)}
            case p.Columns():
                yield _COLUMNS, {"x": i.x, "out": i.out, "offset": i.first, "groups": i.groups}
            case p.Keep():
                yield _KEEP, {"x": i.x, "out": i.out}
            case p.Gather():  # never run; it tells C++ how many rows `out` has
                yield _COLUMNS, {"x": i.x, "out": i.out, "offset": 0, "groups": 1}

    def _experts(self, i: p.Experts) -> Iterable[tuple[int, dict[str, Any]]]:
        """Routing, then both halves of the experts that were chosen."""
        chosen, inner = next(self._chosen)
        common = {"top_k": i.top_k, "first": i.first}
        yield (
            _ROUTE,
            {
                "x": i.x,
                "out": chosen,
                "a": _weight(i.router),
                "normalize": int(i.normalize),
                **common,
            },
        )
        gates, ups, downs = (list(map(_weight, ws)) for ws in (i.gates, i.ups, i.downs))
        more = {"gates": gates, "ups": ups, "activation": i.activation.value}
        yield _EXPERTS_IN, {"x": i.x, "y": chosen, "out": inner, **more, **common}
        yield (
            _EXPERTS_OUT,
            {"x": inner, "y": chosen, "out": i.out, "downs": downs, **common},
        )

    def _attention(self, i: p.Attend) -> Iterable[tuple[int, dict[str, Any]]]:
        sizes = {"heads": i.heads, "kv_heads": i.kv_heads, "head_dim": i.head_dim}
        layer = -1 if i.layer is None else i.layer
        # Keys and values of prompts go into the cache before any row attends; those of single rows
        # are stored by their own task of attention.
        if i.layer is not None:
            yield _STORE, {"y": i.k, "v": i.v, "layer": layer, **sizes}
        groups = list(i.groups or (h * i.kv_heads // i.heads for h in range(i.heads)))
        more = {
            "scale": i.scale,
            "causal": int(i.causal),
            "window": i.window or 0,
            "groups_of_heads": groups,
        }
        if i.slopes is not None:
            more["slopes"] = self._fp32(i.slopes)
        yield _ATTEND, {"x": i.q, "y": i.k, "v": i.v, "out": i.out, "layer": layer, **sizes, **more}


def _memory(program: p.Program) -> Iterable[tuple[int, int]]:
    """Where the weights of products lie, in bytes."""
    for instruction in program.instructions:
        match instruction:
            case p.Linear():
                weights: tuple[p.Weight, ...] = (instruction.weight,)
            case p.Gated():
                weights = instruction.gate, instruction.up
            case p.Experts():
                weights = *instruction.gates, *instruction.ups, *instruction.downs
            case _:
                weights = ()
        for weight in weights:
            # Large pages are asked for where these lie: a step reads all of it once.
            for part in (weight.q, weight.scales) if isinstance(weight, Quantized) else (weight,):
                yield part.data_ptr(), part.nbytes


def _biases(first: Tensor | None, second: Tensor | None) -> dict[str, tuple[int, int]]:
    return {name: _vector(x) for name, x in (("bias", first), ("second", second)) if x is not None}


# -- running ---------------------------------------------------------------------------------------

_Part = tuple[int, int] | p.Instruction
"""Ops for one call, or an instruction that C++ does not run alone."""


class _Runnable:
    """See `ds_inference_kit.program.Runnable`."""

    def __init__(self, program: p.Program, collectives: p.Collectives | None) -> None:
        self._program = program
        self._collectives = collectives
        # The dtype of products that torch makes.
        self._products = torch.float32 if program.dtype == torch.float16 else program.dtype
        self._torch = Interpreter(program, None, self._widen)
        # Memory of registers and of widened weights, used again in each step.
        self._arena = torch.empty(0)
        self._wide = torch.empty(0)
        self.rebind()
        native().use_large_pages(list(_memory(program)))

    def rebind(self) -> None:
        """See `ds_inference_kit.program.Runnable`."""
        self._table = _Table(self._program)
        # Steps of few rows are cut at collectives alone; those of many also at products, which
        # torch makes.
        self._few = self._parts((p.Reduce, p.Gather))
        self._many = self._parts((p.Reduce, p.Gather, p.Linear, p.Gated, p.Experts))
        # By identity: two instructions may be equal.
        self._spans = dict(zip(map(id, self._program.instructions), self._table.spans, strict=True))

    def _parts(self, apart: tuple[type, ...]) -> list[_Part]:
        parts: list[_Part] = []
        for instruction, (first, last) in zip(
            self._program.instructions, self._table.spans, strict=True
        ):
            if isinstance(instruction, apart):
                parts.append(instruction)
            elif parts and isinstance(parts[-1], tuple):
                parts[-1] = parts[-1][0], last
            else:
                parts.append((first, last))
        return parts

    @torch.inference_mode()
    def __call__(self, step: Step, cache: KVCache | None = None) -> Tensor:
        """See `ds_inference_kit.program.Runnable`."""
        program = self._program
        ops = self._table.native
        rows = step.tokens.shape[0] if step.embeds is None else step.embeds.shape[0]
        wanted = rows if step.wanted is None else step.wanted.shape[0]
        out = torch.empty(rows, program.widths[program.output], dtype=torch.float32)
        # An fp32 result is written where it is returned; another one is narrowed at the end.
        direct = program.dtype == torch.float32
        if self._arena.numel() < (size := ops.arena(rows, not direct)):
            self._arena = torch.empty(size)
        # `kept` has the tensors whose addresses C++ is given; they must outlive the step.
        given, kept = _given(step)
        ops.begin(
            rows,
            wanted,
            given,
            _cache(program, cache),
            self._arena.data_ptr(),
            out.data_ptr() if direct else 0,
        )
        threads = torch.get_num_threads()
        ops.reserve(threads)
        narrow: dict[int, Tensor] = {}  # registers in the dtype of products, until they are written
        for part in self._few if rows <= ROWS else self._many:
            if isinstance(part, tuple):
                ops.go(*part, threads)
                narrow.clear()
            else:
                self._apart(part, narrow, out, threads)
        del kept
        rows = ops.rows(program.output)
        if direct:
            return out[:rows]
        made = torch.empty(rows, out.shape[1], dtype=program.dtype)
        ops.narrow(program.output, made.data_ptr(), _TYPES[made.dtype], threads)
        return made

    def _register(self, number: int, out: Tensor) -> Tensor:
        """A register's memory, [rows, width]."""
        ops = self._table.native
        width = self._program.widths[number]
        rows = ops.rows(number)
        at = ops.where(number)
        if at == out.data_ptr():
            return out[:rows]
        first = (at - self._arena.data_ptr()) // 4
        return self._arena[first : first + rows * width].view(rows, width)

    def _apart(
        self, i: p.Instruction, narrow: dict[int, Tensor], out: Tensor, threads: int
    ) -> None:
        """Run what takes torch or other ranks."""
        ops = self._table.native
        dtype = self._products
        x = self._register(i.x, out)  # type: ignore[union-attr]
        if isinstance(i, (p.Reduce, p.Gather)):
            assert self._collectives is not None, (
                "a program with Reduce or Gather is loaded with collectives"
            )
            if isinstance(i, p.Reduce):
                self._collectives.reduce(x)
            else:
                self._register(i.out, out).copy_(self._collectives.gather(x))
            narrow.clear()
            return
        assert isinstance(i, (p.Linear, p.Gated, p.Experts))
        # Products of one input (queries, keys and values) narrow it once.
        if i.x not in narrow:
            narrow[i.x] = x if dtype == torch.float32 else torch.empty(x.shape, dtype=dtype)
            if dtype != torch.float32:
                ops.narrow(i.x, narrow[i.x].data_ptr(), _TYPES[dtype], threads)
        x = narrow[i.x]
        if isinstance(i, p.Experts):
            registers = {i.x: x}
            self._torch.execute(i, registers, None, None)  # type: ignore[arg-type]  # which reads no step
            self._register(i.out, out).copy_(registers[i.out])
        else:
            # Bias, activation and the addition are C++'s, in one pass over what torch has
            # multiplied.
            number = self._spans[id(i)][0]
            first, second = (i.weight, None) if isinstance(i, p.Linear) else (i.gate, i.up)
            y = torch.mm(x, self._whole(first).t())
            z = None if second is None else torch.mm(x, self._whole(second).t())
            ops.complete(
                number, y.data_ptr(), 0 if z is None else z.data_ptr(), _TYPES[dtype], threads
            )
        narrow.pop(i.out, None)

    def _whole(self, weight: p.Weight) -> Tensor:
        return (
            self._widen(weight, self._products)
            if isinstance(weight, Quantized)
            else weight.to(self._products)
        )

    def _widen(self, weight: Quantized, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`, in memory that the next call uses again."""
        out, inner = weight.shape
        if self._wide.dtype != dtype or self._wide.numel() < out * inner:
            self._wide = torch.empty(out * inner, dtype=dtype)
        whole = self._wide[: out * inner].view(out, inner)
        native().widen(_weight(weight), whole.data_ptr(), _TYPES[dtype], torch.get_num_threads())
        return whole


def _given(step: Step) -> tuple[tuple[int, ...], list[Tensor]]:
    """What C++ reads of a step, and what must live until it has."""
    kept = []

    def at(x: Tensor | None, dtype: torch.dtype = torch.int32) -> int:
        if x is None:
            return 0
        if x.dtype != dtype or not x.is_contiguous():
            x = x.to(dtype).contiguous()
        kept.append(x)
        return x.data_ptr()

    blocks = step.blocks
    sizes = (
        step.starts.shape[0] - 1,
        *((0, 0) if blocks is None else (blocks.shape[1], blocks.shape[1])),
    )
    numbers = [
        at(x) for x in (step.tokens, step.positions, step.types, step.starts, step.lengths, blocks)
    ]
    return (*numbers, at(step.wanted, torch.int64), at(step.embeds, torch.float32), *sizes), kept


def _cache(program: p.Program, cache: KVCache | None) -> tuple[int, ...]:
    if cache is None or not program.layers:
        return ()
    shape = program.layers, cache.blocks, program.kv_heads, cache.keys.shape[3], program.head_dim
    for arena in (cache.keys, cache.values):
        if arena.shape != shape or not arena.is_contiguous() or arena.dtype not in _TYPES:
            raise KernelError(
                f"inference_program: the cache is {tuple(arena.shape)} {arena.dtype}, not {shape} "
                "of floats"
            )
    return cache.keys.data_ptr(), cache.values.data_ptr(), _TYPES[cache.keys.dtype], cache.blocks
