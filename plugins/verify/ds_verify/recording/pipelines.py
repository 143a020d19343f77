"""Records a stage of a pipeline: its micro-batches are under way at the same time.

A chunk's micro-batches come in order, whatever the schedule, and so do the gradients of each
parameter: the n-th is that of the n-th micro-batch. Layers are known by their number in the whole
model. A batch begins in the runner, which all ranks enter together.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ds_core.engine import Runner
from ds_core.errors import UsageError
from ds_verify.recording.calls import Calls
from ds_verify.recording.recorder import Driver, Recorder, in_backward
from ds_verify.recording.tensors import Place

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.engine import RunningEngine
    from ds_verify.config import Verify


class WatchedRunner(Runner):
    """A runner that says when a batch begins."""

    def __init__(self, inner: Runner, begin: Callable[[], None]) -> None:
        self.inner = inner
        self.manual = inner.manual
        self.manual_reason = inner.manual_reason
        self.makes_loss = inner.makes_loss
        self._begin = begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def train(self, engine: RunningEngine, batches: Iterator[Any], count: int) -> Tensor:
        """See `Runner.train`."""
        self._begin()
        return self.inner.train(engine, batches, count)

    def evaluate(
        self,
        engine: RunningEngine,
        batches: Iterator[Any],
        count: int,
        *,
        return_logits: bool,
        compute_loss: bool = True,
    ) -> tuple[Tensor | None, Any]:
        """See `Runner.evaluate`."""
        return self.inner.evaluate(
            engine, batches, count, return_logits=return_logits, compute_loss=compute_loss
        )


class PipelineRecorder(Recorder):
    """The recorder of one stage, or of a whole model that is written as a pipeline."""

    def __init__(self, ctx: Context, section: Verify, driver: Driver) -> None:
        super().__init__(ctx, section, driver)
        self.places: list[Place] = [(micro, self.part) for micro in range(ctx.batch.gas)]
        """The micro-batches of a step, in the order in which they come."""
        self._chunk = 0
        # How often a chunk, a parameter's gradient, or a layer's second computation has come.
        self._come: Counter[tuple[str, str]] = Counter()

    def make_calls(self) -> Calls:
        """The first stage has the inputs, and the last the outputs."""
        mesh = self.ctx.mesh
        others = [a for a in mesh.names if a not in (*mesh.alias["batch"], "pp")]
        leads = self.driver.replayed and mesh.index(*others) == 0
        stage = mesh.coord["pp"]
        last = mesh.size("pp") - 1
        return Calls(self.folder, inputs=leads and stage == 0, outputs=leads and stage == last)

    def find_shared(self) -> tuple[str, ...]:
        """Several stages use a tied weight."""
        module: Any = self.module
        tied = ("tied.",) if module.num_stages > 1 else ()
        return (*super().find_shared(), *tied)

    def watch(self) -> None:
        """Install all hooks, and see the batches of the runner."""
        module: Any = self.module
        if self.ctx.mesh.has("sp") and self.ctx.mesh.size("sp") > 1:
            raise UsageError(
                "verify does not compare pipelines (section pipeline) whose ranks have parts of "
                "sequences (sequence_parallel.size): each has a part of the last stage's output, "
                "of which the loss is outside; verify each of the two alone"
            )
        engine = self.ctx.engine
        runner = engine.runner
        engine.runner = WatchedRunner(runner, self.begin_batch)
        self.undo.append(lambda: setattr(engine, "runner", runner))
        # What a layer draws must not depend on how often its stage was called before.
        seeded, module.seed_layers = module.seed_layers, False
        self.undo.append(lambda: setattr(module, "seed_layers", seeded))
        for name, layer in (*module.layers.items(), *module.tied.items()):
            self.keep(layer.register_forward_pre_hook(partial(self._seed_layer, name)))
        super().watch()

    def watch_modules(self, modules: object) -> None:
        """Layers, whose names tell their place in the whole model; tied ones are in several."""
        layers: Any = self.module.layers
        super().watch_modules({f"layers.{name}": layer for name, layer in layers.items()})

    def begin_batch(self) -> None:
        """All ranks begin a batch."""
        if self.done:
            raise SystemExit(0)
        if not self.started:
            self.started = True
            self.driver.start(self)
        self.begin_micro()
        self._come.clear()
        self.driver.begin_step(self)

    def _nth(self, kind: str, name: str) -> Place:
        number = self._come[kind, name]
        self._come[kind, name] += 1
        return self.places[number % len(self.places)]

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The forward of a chunk begins."""
        if not self.started or self.done or not module.training or in_backward():
            return
        self._chunk = kwargs.get("chunk", 0)
        self.micro, self.part = self._nth("chunk", str(self._chunk))
        self._times.clear()
        self.active = True
        if self._chunk == 0:
            self.calls.begin(self.micro, args, {})
        self.draw_by(self.place, 0)

    def show(self, output: Any) -> Any:
        """What the last chunk gives is the model's output."""
        module: Any = self.module
        if module.is_last_stage() and self._chunk == module.chunks - 1:
            return super().show(output)
        return None

    def _seed_layer(self, name: str, layer: nn.Module, args: Any) -> None:
        if self.sources:
            return  # they know the layer by its name
        if in_backward():
            # Computed again, where `checkpoint` keeps the generators of the outside.
            self.seed(self._nth("again", name), zlib.crc32(name.encode()))
        elif self.active:
            self.seed(self.place, zlib.crc32(name.encode()))

    def place_of_gradient(self, name: str) -> Place:
        """Each parameter gets its gradients in the order of the micro-batches."""
        return self._nth("gradient", name)
