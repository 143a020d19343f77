"""Kernel ``inference_program`` on CUDA: a table of launches made when a program is loaded, run from
C++.

[Note: how a step runs] Registers are kept from step to step. With few rows (decoding), everything
between two collectives is one call into C++, one launch or two per instruction. With many rows
(prompts), products are torch's, and so is the attention of sequences with many rows in the step; a
sequence with one row is always the kernels' to attend.

[Note: graphs] A step in which every sequence has one row always makes the same launches for the
same shapes: how far a sequence goes back is read on the device. With `capture` such steps are
recorded as CUDA graphs, between collectives, on copies of what a step brings, and replayed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from ds_inference_kit import program as p
from ds_inference_kit.reference import Interpreter
from ds_inference_kit.step import KVCache, Step
from ds_inference_kit.weights import Quantized
from torch import Tensor

from ds_core.errors import KernelError
from ds_ops_cuda import kernels, native
from ds_ops_cuda.inference.step import Given, bring, check_step
from ds_ops_cuda.inference.translate import FEW_FOR_EXPERTS, Table, Unit, device_of, translate
from ds_ops_cuda.native import TYPES

log = logging.getLogger("ds_ops_cuda")

# Each has memory of its own; the one that was used longest ago goes.
MOST_GRAPHS = 32
# So many blocks of threads hide each other's waits for memory.
BLOCKS_PER_PROCESSOR = 4
FEW_IN_SEQUENCE = 16
"""Rows of one sequence up to which the kernels attend, where each row reads all keys again."""


def load(program: p.Program, collectives: p.Collectives | None = None) -> p.Runnable:
    """See `ds_inference_kit.program.Load`.

    What kernels cannot hold at all is the interpreter's, as the log says.
    """
    device = device_of(program)
    if device is None or not native.serves(device) or program.dtype not in TYPES:
        where = f"weights on {device}" if device else "weights on several devices"
        log.warning("an inference program in %s with %s runs on plain torch", program.dtype, where)
        return Interpreter(program, collectives, widened)
    # Found out here, not in the first step.
    if collectives is None and any(
        isinstance(i, (p.Reduce, p.Gather)) for i in program.instructions
    ):
        raise KernelError(
            "the inference program has Reduce or Gather, and no collectives were given"
        )
    return CudaProgram(program, device, collectives)


def widened(weight: Quantized, dtype: torch.dtype) -> Tensor:
    """`ds_inference_kit.weights.dequantize` by this package's kernel."""
    rows, columns = weight.shape
    lows = None if weight.lows is None else weight.lows.float().view(-1)
    return kernels.dequantize(
        weight.q.view(-1),
        weight.scales.float().view(-1),
        lows,
        bits=weight.bits,
        group=weight.group,
        numel=rows * columns,
        dtype=dtype,
    ).view(rows, columns)


class _Views(dict[int, Tensor]):
    """Registers, as the interpreter reads them; what it sets is copied into the register."""

    def __setitem__(self, register: int, value: Tensor) -> None:
        if value is not (mine := self[register]):
            mine.copy_(value)


@dataclass(slots=True)
class _Run:
    """One step, ready to run."""

    step: Step
    cache: KVCache | None
    # The step's tensors on the device.
    given: Given
    # Their addresses, for C++.
    frame: Any
    # Registers before and behind `Keep`, which have other numbers of rows.
    views: tuple[_Views, _Views]  # before and behind Keep
    # The sequences that torch attends, as (number, rows).
    apart: list[tuple[int, slice]]
    # Tensors whose addresses are in the frame.
    held: list[Tensor]


Piece = range | Unit  # launches in C++; what torch runs


class CudaProgram:
    """A loaded program."""

    def __init__(
        self, program: p.Program, device: torch.device, collectives: p.Collectives | None
    ) -> None:
        self._program = program
        self._device = device
        self._collectives = collectives
        self._interpreter = Interpreter(program, collectives, widened)
        self._blocks = BLOCKS_PER_PROCESSOR * native.processors(device)
        self._table: Table = translate(program, device, self._blocks)
        # Memory of registers, kept from step to step: graphs and frames have its addresses.
        self._room: dict[int, Tensor] = {}
        self._scratch: Tensor | None = None
        self._capture = False
        # By shape, the last used one last.
        self._recorded: dict[tuple[Any, ...], _Recording] = {}

    def rebind(self) -> None:
        """See `ds_inference_kit.program.Runnable`."""
        self._table = translate(self._program, self._device, self._blocks)
        self._recorded.clear()

    def capture(self, on: bool = True) -> None:
        """Record steps in which every sequence has one row as CUDA graphs, one for each shape, and
        replay them.
        """
        self._capture = on
        if not on:
            self._recorded.clear()

    @torch.inference_mode()
    def __call__(self, step: Step, cache: KVCache | None = None) -> Tensor:
        """See `ds_inference_kit.program.Runnable`."""
        check_step(self._program, self._device, step, cache)
        if not (
            self._capture and step.tokens.numel() and step.starts.numel() == step.tokens.numel() + 1
        ):
            # Steps with prompts have other shapes each time, so a recording would serve once.
            return self._eager(step, cache, bring(step, self._device, self._program.dtype))
        given = bring(step, self._device, self._program.dtype)
        key = _key(given, cache)
        recording = self._recorded.pop(key, None)
        if recording is None:
            recording = self._record(step, cache, given)
            if len(self._recorded) >= MOST_GRAPHS:
                del self._recorded[next(iter(self._recorded))]
        else:
            recording.play(given)
        self._recorded[key] = recording  # the last that is dropped
        # The caller's own: the next replay overwrites the recording's output.
        return recording.output.clone()

    def _eager(self, step: Step, cache: KVCache | None, given: Given) -> Tensor:
        run = self._prepare(step, cache, given)
        self._execute_all(self._pieces(run), run)
        return self._output(run).clone()

    # -- a step ------------------------------------------------------------------------------------

    def _prepare(self, step: Step, cache: KVCache | None, given: Given) -> _Run:
        """Room in every register, and the addresses of everything."""
        rows = given.tokens.numel()
        kept = rows if given.wanted is None else given.wanted.numel()
        # Rows of prompts are attended by torch; the kernels are given the rows of all other
        # sequences.
        apart, alone = _apart(step)
        registers = [
            self._register(number, rows, kept) for number in range(len(self._program.widths))
        ]
        # Views of the right length: after `Keep` there are only the requested rows.
        before = _Views((n, r[:rows]) for n, r in enumerate(registers) if n not in self._table.kept)
        behind = _Views((n, r[:kept]) for n, r in enumerate(registers))
        frame = native.native().Frame()
        frame.type = TYPES[self._program.dtype]
        frame.rows = rows
        frame.kept = kept
        make = native.native().Register
        frame.registers = [make(r.data_ptr(), r.stride(0)) for r in registers]
        frame.tokens = given.tokens.data_ptr()
        frame.positions = given.positions.data_ptr()
        for name in ("types", "wanted", "embeds", "blocks"):
            value = getattr(given, name)
            setattr(frame, name, 0 if value is None else value.data_ptr())
        for name, line in zip(("sequence", "limit", "length", "first"), given.rows, strict=True):
            setattr(frame, name, line.data_ptr())
        if given.blocks is not None:
            frame.most = given.blocks.shape[1]
        if cache is not None and self._program.layers:
            frame.keys = cache.keys.data_ptr()
            frame.values = cache.values.data_ptr()
            frame.cache_type = TYPES[cache.keys.dtype]
            frame.cache_blocks = cache.blocks
        held = []
        if apart:
            attended = torch.tensor([*alone, 0], dtype=torch.int32).to(
                self._device, non_blocking=True
            )
            frame.attended = attended.data_ptr()
            frame.attended_rows = len(alone)
            held = [attended]
        # Partial results of attention and of experts.
        frame.scratch = self._floats(max(rows, kept)).data_ptr()
        return _Run(step, cache, given, frame, (before, behind), apart, held)

    def _register(self, number: int, rows: int, kept: int) -> Tensor:
        """Memory of one register, of its width; rows begin at multiples of 16 bytes."""
        wanted = kept if number in self._table.kept else max(rows, kept)
        width = self._program.widths[number]
        room = self._room.get(number)
        if room is None or len(room) < wanted:
            # Powers of two, so that growing prompts do not allocate in each step.
            size = max(8, 1 << (wanted - 1).bit_length()) if wanted else 8
            room = torch.empty(
                size, (width + 7) // 8 * 8, dtype=self._program.dtype, device=self._device
            )
            self._room[number] = room
        return room[:, :width]

    def _floats(self, rows: int) -> Tensor:
        wanted = self._table.scratch + self._table.scratch_per_row * min(rows, FEW_FOR_EXPERTS)
        if self._scratch is None or self._scratch.numel() < wanted:
            self._scratch = torch.empty(max(wanted, 1), dtype=torch.float32, device=self._device)
        return self._scratch

    # -- running -----------------------------------------------------------------------------------

    def _pieces(self, run: _Run) -> list[Piece]:
        """What runs, in order: ranges of launches as long as can be, and units that torch runs."""
        pieces: list[Piece] = []
        for unit in self._table.units:
            rows = run.frame.kept if unit.kept else run.frame.rows
            # No kernels, or too many rows for them: torch's products are faster there.
            if not unit.launches or rows > unit.most_rows:
                pieces.append(unit)
                continue
            if (
                pieces
                and isinstance(last := pieces[-1], range)
                and last.stop == unit.launches.start
            ):
                # Neighbours are one call into C++.
                pieces[-1] = range(last.start, unit.launches.stop)
            else:
                pieces.append(unit.launches)
            # The kernels attend their rows, then torch those of the sequences apart.
            if run.apart and _attends(unit):
                pieces.append(unit)
        return pieces

    def _execute_all(self, pieces: Iterable[Piece], run: _Run) -> None:
        for piece in pieces:
            self._execute(piece, run)

    def _execute(self, piece: Piece, run: _Run) -> None:
        if isinstance(piece, range):
            program = self._table.launches
            native.call("run_program", self._device, program, run.frame, piece.start, piece.stop)
        elif piece.launches and _attends(piece):
            self._attend_apart(piece.instructions[0], run)
        else:
            for instruction in piece.instructions:
                self._by_torch(instruction, run, run.views[piece.kept])

    def _by_torch(self, instruction: p.Instruction, run: _Run, views: _Views) -> None:
        if isinstance(instruction, p.Reduce):
            assert self._collectives is not None
            # Rows of a register have gaps (16 bytes' alignment), which a collective does not take.
            whole = views[instruction.x].contiguous()
            self._collectives.reduce(whole)
            views[instruction.x] = whole
        elif isinstance(instruction, p.Keep):
            # Read before `Keep`, written behind it: the two views have different lengths.
            source = run.views[0].get(instruction.x, views[instruction.x])
            views[instruction.out] = (
                source[: run.frame.kept] if run.given.wanted is None else source[run.given.wanted]
            )
        else:
            self._interpreter.execute(instruction, views, run.step, run.cache)

    def _attend_apart(self, instruction: p.Instruction, run: _Run) -> None:
        """The attention of each sequence with many rows, by torch, as a step of its own."""
        for number, rows in run.apart:
            # Each sequence as a step of its own, so that torch's fused attention sees no padding.
            views = _Views((n, view[rows]) for n, view in run.views[0].items())
            starts = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32)
            one = slice(number, number + 1)
            given = run.given
            blocks = None if given.blocks is None else given.blocks[one]
            step = Step(
                given.tokens[rows], given.positions[rows], starts, run.step.lengths[one], blocks
            )
            self._interpreter.execute(instruction, views, step, run.cache)

    def _output(self, run: _Run) -> Tensor:
        return run.views[self._table.kept_output][self._program.output]

    # -- graphs ------------------------------------------------------------------------------------

    def _record(self, step: Step, cache: KVCache | None, given: Given) -> _Recording:
        """Run the step once on copies of what it brings, which shall hold those of later steps, and
        record it.
        """
        given = dataclasses.replace(given, **{name: x.clone() for name, x in given.tensors()})
        # Wider than needed now, so that the same graph serves while sequences grow.
        if given.blocks is not None:
            room = _wide(given.blocks.shape[1])
            given.blocks = torch.nn.functional.pad(given.blocks, (0, room - given.blocks.shape[1]))
        step = dataclasses.replace(
            step,
            tokens=given.tokens,
            positions=given.positions,
            blocks=given.blocks,
            wanted=given.wanted,
            types=given.types,
            embeds=given.embeds,
        )
        run = self._prepare(step, cache, given)
        parts: list[Callable[[], None]] = []
        together: list[Piece] = []

        def close() -> None:
            if together:
                parts.append(
                    native.graph(
                        self._device, functools.partial(self._execute_all, tuple(together), run)
                    )
                )
                together.clear()

        pieces = self._pieces(run)
        # also makes ready what may not be made while a graph is recorded
        self._execute_all(pieces, run)
        for piece in pieces:
            # Collectives and what looks at the device's numbers stay between the graphs.
            if _recordable(piece):
                together.append(piece)
            else:
                close()
                parts.append(functools.partial(self._execute, piece, run))
        close()
        return _Recording(
            given,
            parts,
            self._output(run),
            [*self._room.values(), self._floats(0), run, self._table],
        )


@dataclass(slots=True)
class _Recording:
    """Steps of one shape, recorded."""

    # The tensors that the graphs read.
    given: Given
    # Graphs, and between them what is not recorded.
    parts: list[Callable[[], None]]
    # Where the result is.
    output: Tensor
    # Memory that the graphs work in.
    held: list[Any]

    def play(self, given: Given) -> None:
        """Run a step that brings `given`."""
        for (_, mine), (_, new) in zip(self.given.tensors(), given.tensors(), strict=True):
            # The table of blocks may be narrower; columns behind a sequence's end are not read.
            (mine[:, : new.shape[1]] if mine.dim() == 2 else mine).copy_(new, non_blocking=True)
        for part in self.parts:
            part()


def _key(given: Given, cache: KVCache | None) -> tuple[Any, ...]:
    """What steps share that one recording serves."""
    arenas = () if cache is None else (cache.keys, cache.values)
    arena = tuple((x.data_ptr(), x.shape, x.dtype) for x in arenas)
    blocks = None if given.blocks is None else _wide(given.blocks.shape[1])
    shapes = tuple((name, tuple(x.shape)) for name, x in given.tensors() if name != "blocks")
    return arena, blocks, shapes


def _apart(step: Step) -> tuple[list[tuple[int, slice]], list[int]]:
    """The sequences that torch attends, since they have many rows in this step; all rows of the
    others.
    """
    starts = step.starts.tolist()
    apart: list[tuple[int, slice]] = []
    alone: list[int] = []
    for number, (start, stop) in enumerate(itertools.pairwise(starts)):
        if stop - start > FEW_IN_SEQUENCE:
            apart.append((number, slice(start, stop)))
        else:
            alone += range(start, stop)
    return apart, alone


def _wide(blocks: int) -> int:
    """Columns of a recorded table of blocks, so that sequences can grow."""
    return (blocks + 15) // 16 * 16


def _recordable(piece: Piece) -> bool:
    """Whether it waits for nothing: no collectives, no look at the device's numbers."""
    if isinstance(piece, range):
        return True
    return not any(
        isinstance(i, (p.Reduce, p.Gather, p.Experts, p.Attend)) for i in piece.instructions
    )


def _attends(unit: Unit) -> bool:
    return len(unit.instructions) == 1 and isinstance(unit.instructions[0], p.Attend)
