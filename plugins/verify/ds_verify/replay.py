"""The reference: computes a record's micro-batches again, in the order in which one process would.

The script runs up to its first forward, so whatever it does with the engine before is done here
too. Then the recorded weights are loaded, and each recorded micro-batch runs through the engine's
own forward, backward, accumulation, clipping and optimizer. The script's loss is not needed: its
gradients at the model's outputs were recorded.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state import RunState
from safetensors.torch import load_file
from torch import Tensor

from ds_core.errors import UsageError
from ds_core.nested import map_leaves, to_device
from ds_verify.config import Verify
from ds_verify.recorder import Recorder, compute_dtype
from ds_verify.records import decode, leaves

if TYPE_CHECKING:
    from ds_core.context import Context


def make_recorder(ctx: Context) -> Recorder | None:
    """What records the engine's run; None for an engine that the section does not mean."""
    section = ctx.config.section(Verify)
    # A second engine without an optimizer (a frozen teacher) runs as it always does.
    if section is None or ctx.engine.optimizer is None:
        return None
    if not ctx.engine.runner.manual:
        raise UsageError(
            "verify records engines that run the whole model in one process; this one does not: "
            f"{ctx.engine.runner.manual_reason}"
        )
    if (Path(section.folder) / f"rank{ctx.rank}").exists():
        raise UsageError(
            "verify records one engine with an optimizer, and this script makes a second one"
        )
    return Recorder(ctx, section) if section.role == "record" else Replay(ctx, section)


class Replay(Recorder):
    """Records a run that it drives itself."""

    def __init__(self, ctx: Context, section: Verify) -> None:
        super().__init__(ctx, section)
        self.source = Path(section.source)
        text = (self.source / "facts.json").read_text(encoding="utf-8")
        self.facts: dict[str, Any] = json.loads(text)

    def start(self) -> None:
        """Load, replay everything, and end the program."""
        eps = torch.finfo(compute_dtype(self.ctx)).eps if self.section.perturb else 0.0
        if self.ctx.rank == 0:
            self.write_facts()
        for step in range(int(self.facts["steps"])):
            self._load_step(step, eps)
            self._replay_step(step, eps)
        raise SystemExit(0)

    def begin_step(self) -> None:
        """Nothing is saved: nobody replays a reference."""

    def _load_step(self, step: int, eps: float) -> None:
        """Begin a step with what the subject began it with, so that no step inherits differences."""
        self.ctx.engine.load_checkpoint(
            str(self.source / "states"),
            tag=f"step{step}",
            # A weight that one of the two layouts lacks is found by the comparison.
            load_module_strict=False,
        )
        if eps:
            self._perturb_weights(eps)
        self.record_weights()
        self.writer.write(f"begin{step}")

    def _replay_step(self, step: int, eps: float) -> None:
        """One optimizer step: micro-batch by micro-batch, and in each part by part."""
        parts = int(self.facts["parts"])
        engine: Any = self.ctx.engine
        mine = range(self.ctx.mesh.index("batch"), parts, self.ctx.mesh.size("batch"))
        records = [self._read_calls(part, step) for part in mine]
        count = max(call["micro"] for call in records[0]["calls"]) + 1
        for micro in range(count):
            for part, record in zip(mine, records, strict=True):
                self.micro = micro
                self.part = part
                self.begin_micro()
                calls = [call for call in record["calls"] if call["micro"] == micro]
                self._replay_micro(calls, record["tensors"], eps)
                # A script with a schedule of its own has set the rates by hand.
                if engine.lr_scheduler is None:
                    for group, rate in zip(engine.param_groups(), record["lr"], strict=True):
                        group["lr"] = rate
                engine.step()
        if self.step != step + 1:
            raise UsageError(
                f"the recorded step {step} has {count} micro-batches on each of {parts} "
                f"data-parallel ranks, which do not make one step of the "
                f"reference's {self.ctx.batch.gas} accumulation steps"
            )

    def _replay_micro(
        self, calls: list[dict[str, Any]], tensors: dict[str, Tensor], eps: float
    ) -> None:
        """Forward of each call, then one backward of what the recorded gradients belong to."""
        engine: Any = self.ctx.engine
        device = self.ctx.accelerator.current_device()
        factor = int(self.facts["parts"]) if self.facts["summed"] else 1
        losses = []
        for call in calls:
            args, kwargs = to_device(decode(call["arguments"], tensors.__getitem__), device)
            if eps:
                args, kwargs = map_leaves(lambda leaf: _perturbed_input(leaf, eps), (args, kwargs))
            found = list(leaves(engine(*args, **kwargs)))
            for index, name in call["gradients"].items():
                # The derivative of this sum by the output is the recorded gradient.
                gradient = tensors[name].to(device) * factor
                losses.append((found[int(index)] * gradient).sum())
        if not losses:
            raise UsageError("no gradient came to the model's outputs in a recorded micro-batch")
        engine.backward(sum(losses[1:], losses[0]))

    def _read_calls(self, part: int, step: int) -> dict[str, Any]:
        stem = self.source / f"calls{part}.{step}"
        record: dict[str, Any] = json.loads(Path(f"{stem}.json").read_text(encoding="utf-8"))
        record["tensors"] = load_file(f"{stem}.safetensors")
        return record

    @torch.no_grad()
    def _perturb_weights(self, eps: float) -> None:
        """Move every weight by about one unit in its last place, up or down by its place."""
        for state in RunState(self.ctx.engine).states(None):
            if state.tensor.is_floating_point():
                name = state.name.partition("/")[2]
                _perturb(state.tensor, eps, zlib.crc32(name.encode()), state.start)


def _perturb(tensor: Tensor, eps: float, seed: int, start: int = 0) -> None:
    """Multiply each element by 1 + eps or 1 - eps, chosen by a hash of its place."""
    places = torch.arange(start, start + tensor.numel(), device=tensor.device)
    mixed = (places + seed) * 2654435761 % 4294967296
    signs = ((mixed >> 15) & 1) * 2 - 1
    tensor.mul_(signs.view(tensor.shape).to(tensor.dtype) * eps + 1)


def _perturbed_input(leaf: Any, eps: float) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.numel():
        return leaf
    changed = leaf.clone()
    _perturb(changed, max(eps, torch.finfo(leaf.dtype).eps), 0)
    return changed
