"""The reference: computes a record's micro-batches again, in the order in which one process would.

The script runs up to its first forward, so whatever it does with the engine before is done here
too. Then each step begins with the recorded weights and states, and each recorded micro-batch runs
through the engine's own forward, backward, accumulation, clipping and optimizer. The script's loss
is not needed: its gradients at the model's outputs were recorded.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state import RunState
from ds_run_state.changes import leaves
from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_core.nested import map_leaves, to_device
from ds_verify.recording.calls import Call, read_calls
from ds_verify.recording.recorder import Recorder, compute_dtype

if TYPE_CHECKING:
    from ds_verify.config import Verify


_CYCLE = 524_287
"""A prime."""


class Save:
    """Keeps what the reference begins each step with."""

    replayed = True
    parts = 0

    def start(self, recorder: Recorder) -> None:
        """The facts, and the weights with which ranks begin."""
        recorder.write_facts()
        recorder.record_weights()
        recorder.tensors.writer.write("begin0")

    def begin_step(self, recorder: Recorder) -> None:
        """A checkpoint. Collective."""
        engine = recorder.ctx.engine
        engine.save_checkpoint(str(recorder.folder / "states"), tag=f"step{recorder.step}")
        engine.wait_for_checkpoint()


class Replay:
    """Computes the steps of a record again where the script would begin its first."""

    replayed = False

    def __init__(self, section: Verify) -> None:
        self.source = Path(section.source)
        text = (self.source / "facts.json").read_text(encoding="utf-8")
        self.facts: dict[str, Any] = json.loads(text)
        self.parts = int(self.facts["parts"])
        self.perturb = section.perturb
        # What a script calls in place of the module's forward, in the call that is about to begin.
        self.forward: Any = None

    def begin_step(self, recorder: Recorder) -> None:
        """Nothing: `start` runs all steps."""

    def start(self, recorder: Recorder) -> None:
        """Replay everything, and end the program."""
        # Lightning calls training_step so: its stand-in takes itself back when it is called.
        self.forward = vars(recorder.module).get("forward")
        # The script's forward has begun, and its autocast with it: steps are outside of that.
        with torch.autocast(recorder.ctx.accelerator.device_type, enabled=False):
            self.run(recorder)
        raise SystemExit(0)

    def run(self, recorder: Recorder) -> None:
        """Replay everything. Collective."""
        recorder.write_facts()
        eps = torch.finfo(compute_dtype(recorder.ctx)).eps if self.perturb else 0.0
        for step in range(int(self.facts["steps"])):
            self._load_step(recorder, step, eps)
            batch = self._read_step(recorder, step, eps)
            if recorder.ctx.engine.runner.manual:
                self._run_calls(recorder, batch)
            else:
                run_batch(recorder, batch)
            if recorder.step != step + 1:
                raise UsageError(
                    f"the recorded step {step} has {len(batch)} micro-batches for this process, "
                    f"which do not make one step of its {recorder.ctx.batch.gas} accumulation steps"
                )

    def _load_step(self, recorder: Recorder, step: int, eps: float) -> None:
        """Begin a step with what the subject began it with, so that no step inherits differences."""
        recorder.ctx.engine.load_checkpoint(
            str(self.source / "states"),
            tag=f"step{step}",
            # A weight that one of the two layouts lacks is found by the comparison.
            load_module_strict=False,
        )
        # So each micro-batch's loss has the factor that it had, and overflows where it did.
        if (scaler := recorder.ctx.engine.scaler) is not None:
            scaler.scale *= int(self.facts["parts"]) / recorder.ctx.mesh.size("batch")
        if eps:
            perturb_weights(recorder, eps)
        recorder.record_weights()
        recorder.tensors.writer.write(f"begin{step}")

    def _read_step(
        self, recorder: Recorder, step: int, eps: float
    ) -> dict[tuple[int, int], list[Call]]:
        """The calls of each micro-batch of this process, in their order: by number, then by part."""
        mesh = recorder.ctx.mesh
        engine = recorder.ctx.engine
        # Processes of a layout share the data-parallel ranks of the subject.
        mine = range(mesh.index("batch"), int(self.facts["parts"]), mesh.size("batch"))
        found: dict[tuple[int, int], list[Call]] = {}
        rates: list[float] = []
        for part in mine:
            calls, own_rates = read_calls(self.source, part, step)
            rates = rates or own_rates  # all ranks should have the same
            for call in calls:
                found.setdefault((call.micro, part), []).append(self._prepared(call, eps))
        # A script with a schedule of its own has set the rates by hand.
        if engine.lr_scheduler is None:
            for group, rate in zip(engine.param_groups(), rates, strict=True):
                group["lr"] = rate
        return dict(sorted(found.items()))

    def _prepared(self, call: Call, eps: float) -> Call:
        """The call as this process makes it."""
        args, kwargs = call.args, call.kwargs
        if eps:
            args, kwargs = map_leaves(lambda leaf: _perturbed_input(leaf, eps), (args, kwargs))
        # The mean over the data-parallel ranks is this process's own mean over micro-batches.
        factor = int(self.facts["parts"]) if self.facts["summed"] else 1
        gradients = {place: gradient * factor for place, gradient in call.gradients.items()}
        return Call(call.micro, args, kwargs, gradients)

    def _run_calls(self, recorder: Recorder, batch: Mapping[tuple[int, int], list[Call]]) -> None:
        """One step: forward of each call, one backward for each micro-batch."""
        engine: Any = recorder.ctx.engine
        device = recorder.ctx.accelerator.current_device()
        for (micro, part), calls in batch.items():
            recorder.micro = micro
            recorder.part = part
            recorder.begin_micro()
            losses = []
            for call in calls:
                args, kwargs = to_device((call.args, call.kwargs), device)
                # A forward inside of another one would get the 16-bit weights of the one before.
                torch.clear_autocast_cache()
                if self.forward is not None:
                    recorder.module.forward = self.forward
                losses += weighted(engine(*args, **kwargs), to_device(call.gradients, device))
            if not losses:
                raise UsageError("no gradient came to the model's outputs in a micro-batch")
            engine.backward(sum(losses[1:], losses[0]))
            engine.step()


def weighted(output: Any, gradients: Mapping[int, Tensor]) -> list[Tensor]:
    """Losses whose sum has the recorded `gradients` by the tensors of `output`."""
    found = list(leaves(output))
    for place, gradient in gradients.items():
        if found[place].shape != gradient.shape:
            raise UsageError(
                f"output {place} of the model is {tuple(found[place].shape)} in the reference and "
                f"was {tuple(gradient.shape)}: where each rank has a part of an output, verify "
                "needs a loss inside the model"
            )
    return [(found[place] * gradient).sum() for place, gradient in gradients.items()]


def _weighted_sum(output: Any, gradients: Mapping[int, Tensor]) -> Any:
    return sum(weighted(output, gradients))


class _Weighted(nn.Module):
    """`_weighted_sum` as a module."""

    def forward(self, output: Any, gradients: Mapping[int, Tensor]) -> Any:
        """See `weighted`."""
        return _weighted_sum(output, gradients)


def run_batch(recorder: Recorder, batch: Mapping[tuple[int, int], list[Call]]) -> None:
    """One step of a model that is written as a pipeline."""
    engine: Any = recorder.ctx.engine
    module: Any = recorder.module
    rows = [(call.args[0], call.gradients) for calls in batch.values() for call in calls]
    recorder.places = list(batch)  # type: ignore[attr-defined]
    # What was recorded has been through these; the gradients stand in the place of labels.
    kept = module.batch_fn, module.loss_fn
    module.batch_fn = None
    # As in `_run_calls`: this batch is inside of the script's.
    torch.clear_autocast_cache()
    if module.is_last_stage():
        # In the place of a module torch takes nothing else.
        of_module = isinstance(module.loss_fn, nn.Module)
        module.loss_fn = _Weighted() if of_module else _weighted_sum
    try:
        engine.train_batch(iter(rows))
    finally:
        module.batch_fn, module.loss_fn = kept


@torch.no_grad()
def perturb_weights(recorder: Recorder, eps: float) -> None:
    """Move every weight by about one unit in its last place, up or down by its place."""
    for state in RunState(recorder.ctx.engine).states(None):
        if state.tensor.is_floating_point():
            name = state.name.partition("/")[2]
            _perturb(state.tensor, eps, zlib.crc32(name.encode()), state.start)


def _perturb(tensor: Tensor, eps: float, seed: int, start: int = 0) -> None:
    """Multiply each element by 1 + eps or 1 - eps, chosen by its place."""
    factors = _factors(eps, tensor.dtype, tensor.device)
    begin = (start + seed) % _CYCLE
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
    # Up to the next beginning of the cycle, then all of it again and again.
    for part in flat[: _CYCLE - begin], *flat[_CYCLE - begin :].split(_CYCLE):
        part.mul_(factors[begin : begin + part.numel()])
        begin = 0
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))


@functools.lru_cache(maxsize=4)
def _factors(eps: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 + eps and 1 - eps by a hash of the place, in a cycle that no size of a layer divides."""
    places = torch.arange(_CYCLE)
    mixed = places * 2654435761 % 4294967296
    signs = ((mixed >> 15) & 1) * 2 - 1
    return signs.to(device, dtype) * eps + 1


def _perturbed_input(leaf: Any, eps: float) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.numel():
        return leaf
    changed = leaf.clone()
    _perturb(changed, max(eps, torch.finfo(leaf.dtype).eps), 0)
    return changed
