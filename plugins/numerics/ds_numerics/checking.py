"""Checks the steps that are due: records them, computes them again, compares, and acts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from ds_core import comm
from ds_core.errors import DSError
from ds_numerics.config import Numerics
from ds_numerics.events import Backward, Forward
from ds_numerics.recording import Recording
from ds_numerics.replay import Passes, add_reduced
from ds_numerics.replicas import agree, compare, rows_of
from ds_numerics.trace import Kind, Trace
from ds_numerics.verdict import (
    Finding,
    Label,
    Odd,
    describe,
    differing_keys,
    find,
    find_weight,
)

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.gradients import Gradients

log = logging.getLogger("ds_numerics")

SHOWN = 3  # differences spelled out; the others are counted


class NumericsError(DSError, RuntimeError):
    """A step gave other bits when it was computed again, or other bits on another rank."""


class Checker:
    """Of one engine on one rank."""

    def __init__(self, ctx: Context) -> None:
        section = ctx.config.section(Numerics)
        assert section is not None
        self.ctx = ctx
        self.action = section.action
        # What differs between the passes of a healthy run.
        self.known: set[Label] = set()
        # Whether three passes of a step have been compared, so that `known` is complete.
        self._calibrated = False
        self._said: set[str] = set()
        self._recording: Recording | None = None
        ctx.undo(self.close)
        self.begin()

    def begin(self) -> None:
        """The next step is due: watch it."""
        self.close()
        self._recording = Recording(self.ctx)

    def begin_anew(self) -> None:
        """The weights have been replaced: a step that is watched begins again."""
        if self._recording is not None:
            self.begin()

    def close(self) -> None:
        """Watch no longer."""
        if self._recording is not None:
            self._recording.close()
            self._recording = None

    # -- a step ------------------------------------------------------------------------------------

    def check(self, gradients: Gradients) -> None:
        """Compute the step again if it is due, and compare; `gradients` are its first pass's.

        Raises NumericsError, on all ranks, for what the config does not let pass. Collective.
        """
        if (recording := self._recording) is None:
            return
        try:
            self._check(recording, gradients)
        finally:
            self.close()

    def _check(self, recording: Recording, gradients: Gradients) -> None:
        first = recording.trace
        add_reduced(first, gradients.shards)
        alike = Trace()
        recording.add_weights(alike)
        if not self._refused(recording):
            changed = find_weight(self.ctx.rank, recording.weights.read(), alike.read())
            if self._replay(recording, gradients, changed):
                return
        if self.ctx.world_size > 1:
            self._compare_ranks(gradients, first, alike)

    def _compare_ranks(self, gradients: Gradients, first: Trace, alike: Trace) -> None:
        """Compare what ranks must have alike, and act on what differs.

        first: of the first pass, with the reduced gradients.
        alike: has the weights.
        """
        # Each pass computes alike with a weight that was wrong before; other ranks' are not.
        alike.add(Kind.NORM, "all gradients", torch.tensor(gradients.norm, dtype=torch.float64))
        reduced = {k: v for k, v in first.read().by_key.items() if k.kind is Kind.REDUCED}
        rows = rows_of(self.ctx, reduced | alike.read().by_key, gradients.shards)
        if texts := compare(self.ctx, rows):
            more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
            text = f"step {gradients.step}: ranks differ. {'; '.join(texts[:SHOWN])}{more}"
            self._act(text, repaired=False)

    def _refused(self, recording: Recording) -> bool:
        """Whether the step cannot be computed again on some rank, for reasons that lie in it."""
        reason = recording.refusal or self._refusal(recording)
        if not agree(self.ctx, bool(reason)):
            return False
        reasons = [told for told in comm.all_gather_json(reason) if told]
        self._say(f"a step that was due is not computed again: {reasons[0]}")
        return True

    def _refusal(self, recording: Recording) -> str:
        events = recording.events
        backwards = [e for e in events if isinstance(e, Backward)]
        if not backwards:
            return "no gradient came to the outputs of the whole model; call the engine"
        counted = self.ctx.engine.partitioner.gradient_hooks.window.backwards
        if counted not in (0, len(backwards)):
            return "gradients were dropped in it, or came from elsewhere than the model's outputs"
        kept = [k for e in events if isinstance(e, Forward) for k in e.kept]
        kept += [k for e in backwards for k in e.gradients.values()]
        if any(k.changed for k in kept):
            return "an input of the model was changed in place after its forward"
        return ""

    # -- passes ------------------------------------------------------------------------------------

    def _replay(self, recording: Recording, gradients: Gradients, changed: Finding | None) -> bool:
        """Run the step again, a third time if that is needed, and act on what differs; whether a
        bit has flipped.

        changed: a weight that has changed meanwhile.
        """
        passes = Passes(recording, gradients)
        passes.run()
        if agree(self.ctx, passes.other_operations and not self._calibrated):
            self._say("a replay runs other modules than the step: steps are not compared")
            passes.give_first()
            return False
        differs = bool(differing_keys(passes.checksums, self.known))
        # The first time always, to tell chance from what differs by design.
        if agree(self.ctx, differs or not self._calibrated):
            passes.run()
        findings = self._gather(find(self.ctx.rank, passes.checksums, self.known), changed)
        if not self._calibrated and any(f.odd is Odd.ALL for f in findings):
            self._learn(passes)
            findings = [f for f in findings if f.odd is Odd.WEIGHT]
        self._calibrated = True
        repaired = self.action == "repair" and len({f.odd for f in findings} - {Odd.WEIGHT}) == 1
        repaired &= all(f.odd in (Odd.FIRST, Odd.REPLAY) for f in findings)
        # Two replays that agree stay; else the step goes on as if nothing had been replayed.
        if repaired and findings[0].odd is Odd.FIRST:
            passes.give_last()
        else:
            passes.give_first()
        if findings:
            self._act(describe(gradients.step, findings), repaired)
        return bool(findings)

    def _gather(self, *mine: Finding | None) -> list[Finding]:
        """All ranks' findings. Collective."""
        rows = [finding.as_json() for finding in mine if finding is not None]
        if not agree(self.ctx, bool(rows)):
            return []
        return [Finding.from_json(row) for told in comm.all_gather_json(rows) for row in told]

    def _learn(self, passes: Passes) -> None:
        """The first step that was replayed gave something else each time: that is the program's
        way, and no fault.
        """
        order = {key: place for place, key in enumerate(passes.checksums[0].by_key)}
        keys = sorted(differing_keys(passes.checksums, ()), key=lambda key: order.get(key, -1))
        self.known |= {(key.kind, key.name) for key in keys}
        names = comm.all_gather_json(keys[0].what if keys else "")
        first = next(name for name in names if name)
        self._say(
            "this program does not compute the same bits twice: passes of one step differ, first in "
            f"{first}, and this ({len(self.known)} checksums here) is not compared between passes; "
            "torch.use_deterministic_algorithms may help"
        )

    # -- what follows ------------------------------------------------------------------------------

    def _act(self, text: str, repaired: bool) -> None:
        if repaired:
            log.warning("%s. The step continues with what two of three passes agree on", text)
        elif self.action == "warn":
            log.warning("%s. The step continues with what its first pass gave", text)
        else:
            raise NumericsError(f"{text}. No weight has been updated with it")

    def _say(self, text: str) -> None:
        """Log once, on rank 0."""
        if text not in self._said:
            self._said.add(text)
            if self.ctx.rank == 0:
                log.warning("numerics: %s", text)
