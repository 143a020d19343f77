"""Which rows a step has: of running sequences one each, and parts of prompts, as far as cache and
rows go.

Requests are served in the order in which they came. A running sequence always gets its row. What is
left of a step goes to prompts, in parts. When the cache has no block left, the request that came
last gives its blocks back and waits again, first in the queue; its tokens are computed again later.
So the oldest request always advances, and as no request is accepted that would not fit into the
whole cache, every one ends. Nothing depends on time or on chance: ranks that see the same requests
and logits plan the same steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import torch
from ds_inference_kit.step import BLOCK, Step
from torch import Tensor

from ds_inference.generate.blocks import Blocks, blocks_for
from ds_inference.generate.requests import Handle, Result, SamplingParams
from ds_inference.generate.stopping import StopStrings

if TYPE_CHECKING:
    from ds_inference.generate.beams import Beams

_SHARE = 4
"""While sequences decode, prompts take one in so many of a step's rows, so that a step does not
last much longer.
"""


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt with what was added to it. cached: how many of its tokens the cache has, in
    `blocks`.

    index: which answer of its request. result: where its tokens go (None: of beams).
    """

    group: Group
    tokens: list[int]
    index: int = 0
    result: Result | None = None
    random: Random | None = None
    stops: StopStrings | None = None
    cached: int = 0
    blocks: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Group:
    """The sequences of one request: at first one with the prompt, then `rows`, which share its
    blocks.

    prompt: tokens of the prompt. new: the most that are added. stop_ids: tokens that end a
    sequence. split: whether all of `sequences` have rows; otherwise the first computes the prompt
    for all. seed: of its draws. beams: the state of a beam search.
    """

    handle: Handle
    params: SamplingParams
    prompt: int
    new: int
    rows: int
    stop_ids: frozenset[int]
    seed: int
    sequences: list[Sequence] = field(default_factory=list)
    split: bool = False
    beams: Beams | None = None

    @property
    def active(self) -> list[Sequence]:
        """The sequences that take part in steps now."""
        return self.sequences if self.split else self.sequences[:1]


def most_blocks(prompt: int, new: int, rows: int) -> int:
    """Blocks that `rows` sequences hold at the end: of the prompt's whole blocks one for all, of
    the rest one each.
    """
    shared = prompt // BLOCK
    each = blocks_for(prompt + new - 1)
    return shared + rows * (each - shared)


def _decodes(sequence: Sequence) -> bool:
    """Whether only the token that was chosen last is to be computed."""
    group = sequence.group
    have = len(sequence.tokens)
    return group.split and have - sequence.cached == 1 and have > group.prompt


@dataclass(slots=True, eq=False)
class Plan:
    """One step. parts: sequences with their numbers of rows, in order. chosen: those whose next
    token its logits say.

    decoding: each has one row and each is chosen. copies: blocks to copy before the step, (from,
    to), in order.
    """

    parts: list[tuple[Sequence, int]]
    chosen: list[Sequence]
    step: Step
    decoding: bool
    copies: list[tuple[int, int]]


class Scheduler:
    """Plans steps of at most `max_rows` rows for at most `max_sequences` sequences over
    `blocks`."""

    def __init__(
        self, blocks: Blocks, max_rows: int, max_sequences: int, device: torch.device | str
    ) -> None:
        self.blocks = blocks
        self.max_rows = max_rows
        self.max_sequences = max_sequences
        self.waiting: deque[Group] = deque()
        self.running: list[Group] = []
        self.preemptions = 0
        self._device = device
        self._last: Plan | None = None
        self._copies: list[tuple[int, int]] = []

    def add(self, group: Group) -> None:
        """Let `group` wait."""
        self.waiting.append(group)

    def remove(self, group: Group) -> None:
        """Forget `group` and give its blocks back, wherever it is."""
        if group in self.running:
            self.running.remove(group)
            self.changed()
        else:
            self.waiting.remove(group)
        for sequence in group.sequences:
            self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Give the blocks of `sequence` back."""
        self.blocks.give_back(sequence.blocks)
        sequence.blocks = []
        sequence.cached = 0

    def fork(self, sequence: Sequence, index: int, tokens: int) -> Sequence:
        """A copy of `sequence` with its first `tokens` tokens, sharing the blocks of those that are
        cached.
        """
        cached = min(tokens, sequence.cached)
        shared = self.blocks.share(sequence.blocks[: blocks_for(cached)])
        return Sequence(
            sequence.group, sequence.tokens[:tokens], index, cached=cached, blocks=shared
        )

    def changed(self) -> None:
        """The next step has other sequences than the last one."""
        self._last = None

    def sequences(self) -> int:
        """How many places of `max_sequences` are taken."""
        return sum(group.rows for group in self.running)

    def plan(self, tokens: Tensor | None) -> Plan | None:
        """The next step; None: there is nothing to do. tokens: what the sequences of the last got,
        in order.
        """
        self._copies = []
        if self._last is not None and tokens is not None and not self._admissible():
            again = self._again(self._last, tokens)
            if again is not None:
                return again
        parts = self._parts()
        self._last = None
        if not parts:
            return None
        plan = self._build(parts)
        if plan.decoding:
            self._last = plan
        return plan

    def done(self, plan: Plan) -> None:
        """The rows of `plan` are in the cache."""
        for sequence, rows in plan.parts:
            sequence.cached += rows
        if not plan.decoding:
            for group in dict.fromkeys(sequence.group for sequence, _ in plan.parts):
                first = group.sequences[0]
                if not group.split and first.cached == group.prompt < len(first.tokens):
                    self._split_again(group)

    def _split_again(self, group: Group) -> None:
        """The prompt was computed again: the other sequences take its blocks and go on with their
        own tokens.
        """
        first = group.sequences[0]
        for sequence in group.sequences[1:]:
            sequence.blocks = self.blocks.share(first.blocks)
            sequence.cached = first.cached
        group.split = True

    # Choosing rows.

    def _parts(self) -> list[tuple[Sequence, int]]:
        decoding = sum(_decodes(s) for group in self.running for s in group.active)
        left = self.max_rows - decoding
        if decoding:
            left = min(left, max(1, self.max_rows // _SHARE))
        parts: list[tuple[Sequence, int]] = []
        place = 0
        while place < len(self.running):  # the oldest first; those behind may leave meanwhile
            left = self._add(self.running[place], parts, left)
            place += 1
        while left > 0 and self._admissible():
            group = self.waiting.popleft()
            first = group.sequences[0]
            group.split = group.rows == 1 or (
                len(group.sequences) == 1 and len(first.tokens) > group.prompt
            )
            self.running.append(group)
            left = self._add(group, parts, left)
        return parts

    def _add(self, group: Group, parts: list[tuple[Sequence, int]], left: int) -> int:
        """Add rows of `group` to `parts`; how many rows are left for prompts."""
        mine: list[tuple[Sequence, int]] = []
        active = group.active
        # Beams choose together, so none goes to its end before all can.
        behind = (
            group.split
            and group.beams is not None
            and any(len(s.tokens) - s.cached > 1 for s in active)
        )
        for sequence in active:
            end = len(sequence.tokens) - behind if group.split else group.prompt
            rows = end - sequence.cached
            if not _decodes(sequence):  # a prompt, or what has to be computed again
                rows = min(rows, left)
                left -= rows
            if rows == 0:
                continue
            if not self._reserve(sequence, rows):
                return left  # `group` itself waits again
            mine.append((sequence, rows))
        parts += mine
        return left

    def _admissible(self) -> bool:
        """Whether the first that waits may start: with places, and blocks for what it has, and one
        for each other.
        """
        if not self.waiting:
            return False
        group = self.waiting[0]
        taken = self.sequences()
        if taken + group.rows > self.max_sequences:
            return False
        longest = max(len(s.tokens) for s in group.sequences)
        need = most_blocks(group.prompt, longest - group.prompt + 1, len(group.sequences))
        return not self.running or need + taken <= self.blocks.free

    def _reserve(self, sequence: Sequence, rows: int) -> bool:
        """Blocks of its own for the next `rows` rows of `sequence`; False: its group waits again,
        there are none.
        """
        first = sequence.cached // BLOCK
        if first < len(sequence.blocks) and self.blocks.shared(sequence.blocks[first]):
            block = self._take(sequence.group)
            if block is None:
                return False
            self._copies.append((sequence.blocks[first], block))
            self.blocks.give_back([sequence.blocks[first]])
            sequence.blocks[first] = block
        while len(sequence.blocks) * BLOCK < sequence.cached + rows:
            block = self._take(sequence.group)
            if block is None:
                return False
            sequence.blocks.append(block)
        return True

    def _take(self, group: Group) -> int | None:
        """A block for `group`, from the pool or from whoever came last; None: that was `group`."""
        while (block := self.blocks.take()) is None:
            last = self.running.pop()
            for sequence in last.sequences:
                self.drop(sequence)
            last.split = False
            self.waiting.appendleft(last)
            self.preemptions += 1
            if last is group:
                return None
        return block

    # Tensors.

    def _again(self, plan: Plan, tokens: Tensor) -> Plan | None:
        """`plan` with one more token for each sequence, in the same tensors; None: it needs other
        ones.
        """
        step = plan.step
        assert step.blocks is not None
        width = step.blocks.shape[1]
        for row, (sequence, _) in enumerate(plan.parts):
            if sequence.cached % BLOCK == 0:
                column = len(sequence.blocks)
                block = self.blocks.take() if column < width else None
                if block is None:
                    return None  # what was taken stays with its sequence
                sequence.blocks.append(block)
                step.blocks[row, column] = block
        step.tokens.copy_(tokens)
        step.positions.add_(1)
        step.lengths.add_(1)
        plan.copies = []
        return plan

    def _build(self, parts: list[tuple[Sequence, int]]) -> Plan:
        tokens: list[int] = []
        positions: list[int] = []
        starts = [0]
        lengths = []
        last = []
        chosen = []
        for sequence, rows in parts:
            at = sequence.cached
            end = sequence.cached + rows
            tokens += sequence.tokens[at:end]
            positions += range(at, end)
            starts.append(len(tokens))
            lengths.append(end)
            if end == len(sequence.tokens):
                chosen.append(sequence)
                last.append(len(tokens) - 1)
        width = max(len(s.blocks) for s, _ in parts) + 2
        table = [s.blocks + [0] * (width - len(s.blocks)) for s, _ in parts]
        decoding = len(tokens) == len(chosen)
        ints = torch.int32
        device = self._device
        step = Step(
            torch.tensor(tokens, dtype=ints, device=device),
            torch.tensor(positions, dtype=ints, device=device),
            torch.tensor(starts, dtype=ints),
            torch.tensor(lengths, dtype=ints),
            torch.tensor(table, dtype=ints, device=device),
            None
            if decoding
            else torch.tensor(last or [len(tokens) - 1], dtype=torch.int64, device=device),
        )
        return Plan(parts, chosen, step, decoding, self._copies)
