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
    """A prompt with what was added to it."""

    # The request that it answers.
    group: Group
    # The prompt, then what was added.
    tokens: list[int]
    # Which answer of its request.
    index: int = 0
    # Where new tokens are appended; None: a beam, whose answers are made at the end.
    result: Result | None = None
    # Draws the numbers of this sequence alone, so that it does not depend on others.
    random: Random | None = None
    # Looks for stop strings; None: there are none.
    stops: StopStrings | None = None
    # How many of `tokens` the cache has, in `blocks`.
    cached: int = 0
    # In the order of tokens: token p is in ``blocks[p // BLOCK]``.
    blocks: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Group:
    """The sequences of one request: at first one with the prompt, then `rows` that share its
    blocks.
    """

    # What the caller has of the request.
    handle: Handle
    params: SamplingParams
    # Tokens of the prompt.
    prompt: int
    # The most tokens that are added to a sequence.
    new: int
    # Sequences that decode at the same time, when the prompt is computed.
    rows: int
    # Tokens that end a sequence.
    stop_ids: frozenset[int]
    # The seed of its random draws.
    seed: int
    sequences: list[Sequence] = field(default_factory=list)
    # Whether all of `sequences` have rows; otherwise the first computes the prompt for all.
    split: bool = False
    # The state of a beam search; None: there is none.
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
    # A sequence whose blocks were given back has more than one token to compute.
    group = sequence.group
    have = len(sequence.tokens)
    return group.split and have - sequence.cached == 1 and have > group.prompt


@dataclass(slots=True, eq=False)
class Plan:
    """One step."""

    # Sequences with their numbers of rows, in the order of the step's rows.
    parts: list[tuple[Sequence, int]]
    # Sequences whose next token is chosen from this step's logits, in the order of the logits.
    chosen: list[Sequence]
    # The tensors.
    step: Step
    # Each sequence has one row and is chosen, so that the plan can be repeated in place.
    decoding: bool
    # Blocks to copy before the step, (from, to), in order.
    copies: list[tuple[int, int]]


class Scheduler:
    """Plans steps over `blocks`.

    max_rows: of a step.
    max_sequences: that decode at the same time.
    device: where the rows of a step are.
    """

    def __init__(
        self, blocks: Blocks, max_rows: int, max_sequences: int, device: torch.device | str
    ) -> None:
        self.blocks = blocks
        self.max_rows = max_rows
        self.max_sequences = max_sequences
        # Requests without blocks, the oldest first; running ones in the order in which they came.
        self.waiting: deque[Group] = deque()
        self.running: list[Group] = []
        self.preemptions = 0
        self._device = device
        # A decoding plan that can be repeated, as long as nothing has changed.
        self._last: Plan | None = None
        self._copies: list[tuple[int, int]] = []

    def add(self, group: Group) -> None:
        """Queue `group`."""
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
        """The next step; None: there is nothing to do.

        tokens: what the sequences of the last got, in order.
        """
        self._copies = []
        if self._last is not None and tokens is not None and not self._admissible():
            # Nothing but one token for each sequence has changed: the tensors of the last step are
            # used again, which costs a fraction of building them.
            again = self._again(self._last, tokens)
            if again is not None:
                return again
        parts = self._parts()
        self._last = None
        if not parts:
            return None
        plan = self._build(parts)
        # A step with parts of prompts has other rows each time.
        if plan.decoding:
            self._last = plan
        return plan

    def done(self, plan: Plan) -> None:
        """The rows of `plan` are in the cache."""
        for sequence, rows in plan.parts:
            sequence.cached += rows
        if not plan.decoding:
            for group in dict.fromkeys(sequence.group for sequence, _ in plan.parts):
                # `tokens` is longer than the prompt: the request gave its blocks back after it had
                # been split.
                first = group.sequences[0]
                if not group.split and first.cached == group.prompt < len(first.tokens):
                    self._split_again(group)

    def _split_again(self, group: Group) -> None:
        """The prompt was computed again: the other sequences take its blocks and go on with their
        own tokens.
        """
        first = group.sequences[0]
        for sequence in group.sequences[1:]:
            # As at the first time, the whole blocks of the prompt are shared; a block that is
            # written is copied then (`_reserve`).
            sequence.blocks = self.blocks.share(first.blocks)
            sequence.cached = first.cached
        group.split = True

    # Choosing rows.

    def _parts(self) -> list[tuple[Sequence, int]]:
        # Running sequences come first and always have their row: an answer that a user reads must
        # not stop because other requests arrive.
        decoding = sum(_decodes(s) for group in self.running for s in group.active)
        left = self.max_rows - decoding
        if decoding:
            # Long prompts would make the step, and so the next token of all others, late.
            left = min(left, max(1, self.max_rows // _SHARE))
        parts: list[tuple[Sequence, int]] = []
        place = 0
        while place < len(self.running):  # the oldest first; those behind may leave meanwhile
            left = self._add(self.running[place], parts, left)
            place += 1
        while left > 0 and self._admissible():
            # Strictly in order: a small request behind a large one waits, so that the large one is
            # not starved.
            group = self.waiting.popleft()
            first = group.sequences[0]
            # One sequence has nothing to share. One that is alone and already has tokens lost its
            # blocks while it was the only one left of its group.
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
        # Beams choose together: while one has older tokens to compute, none computes its last one.
        behind = (
            group.split
            and group.beams is not None
            and any(len(s.tokens) - s.cached > 1 for s in active)
        )
        for sequence in active:
            # Before the split the first sequence computes the prompt alone, even where it has
            # tokens already: the others take the prompt's blocks from it.
            end = len(sequence.tokens) - behind if group.split else group.prompt
            rows = end - sequence.cached
            if not _decodes(sequence):  # a prompt, or what has to be computed again
                rows = min(rows, left)
                left -= rows
            if rows == 0:
                continue
            if not self._reserve(sequence, rows):
                return left  # `group` itself waits again
            # Into `parts` only when all of the group has blocks: a group that has to wait again
            # takes no part.
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
        # What it had before it lost its blocks counts too: it must get so far again, and one token
        # further.
        longest = max(len(s.tokens) for s in group.sequences)
        need = most_blocks(group.prompt, longest - group.prompt + 1, len(group.sequences))
        # One block stays for each running sequence, which may need it for its next token: else what
        # is admitted would be put back at once.
        return not self.running or need + taken <= self.blocks.free

    def _reserve(self, sequence: Sequence, rows: int) -> bool:
        """Blocks of its own for the next `rows` rows of `sequence`; False: its group waits again,
        there are none.
        """
        # The block that the next row goes to is partly written; where others share it, it is copied
        # first.
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
            # The latest request has the least work to lose, and the oldest always continues.
            last = self.running.pop()
            for sequence in last.sequences:
                self.drop(sequence)
            # It begins again with the prompt, and keeps the tokens that it had.
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
            # The next token begins a new block. Columns are left over for it in the table
            # (`_build`).
            if sequence.cached % BLOCK == 0:
                column = len(sequence.blocks)
                block = self.blocks.take() if column < width else None
                if block is None:
                    return None  # what was taken stays with its sequence
                sequence.blocks.append(block)
                step.blocks[row, column] = block
        step.tokens.copy_(tokens)
        # In place, on the device: no tensor is built or copied from the host.
        step.positions.add_(1)
        step.lengths.add_(1)
        # The copies were for the step before; decoding writes blocks that are not shared.
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
            # Only the last token that a sequence has says its next one; rows of a part of a prompt
            # fill the cache.
            if end == len(sequence.tokens):
                chosen.append(sequence)
                last.append(len(tokens) - 1)
        # Two columns more, so that a repeated plan has room for the blocks of the next tokens.
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
            # All rows are requested: None saves an index. A step whose rows choose nothing still
            # needs one row.
            if decoding
            else torch.tensor(last or [len(tokens) - 1], dtype=torch.int64, device=device),
        )
        return Plan(parts, chosen, step, decoding, self._copies)
