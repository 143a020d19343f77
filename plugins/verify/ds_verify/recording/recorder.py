"""Records one rank's steps: forward, backward, gradients, norm and weights, in order of computation.

The recorder sees the model through hooks of torch on modules and tensors, and the step through the
hooks of ds_core. It changes two things: before each forward it seeds the random generators by step,
micro-batch and data-parallel index, so that dropout is the same in every layout, and it ends the
program at the first forward after the last step. Its hooks go with the engine.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from ds_run_state import RunState
from ds_run_state.blocks import repeated_blocks
from ds_run_state.changes import leaves, replace_leaves
from ds_run_state.random_streams import SOURCES, RandomSource
from ds_run_state.states import StateTensor
from torch import Tensor, nn

from ds_core import comm
from ds_verify.recording.calls import Calls
from ds_verify.recording.records import Entry
from ds_verify.recording.tensors import Place, Tensors, divided, name_of

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.gradients import Gradients
    from ds_verify.config import Verify


class Driver(Protocol):
    """What happens where a recorder's run begins, and each of its steps. Collective."""

    replayed: bool
    """Whether the run will be replayed, so that its calls must be written."""

    parts: int
    """Data-parallel ranks of the run that is replayed; 0: of this run."""

    def start(self, recorder: Recorder) -> None:
        """The first forward of the script is about to begin."""

    def begin_step(self, recorder: Recorder) -> None:
        """The first forward of a step is about to begin."""


class Recorder:
    """The recorder of one engine on one rank."""

    # -- where the run stands
    step: int = 0
    """The step, counted from the first that is recorded."""
    micro: int = 0
    """The micro-batch of the step."""
    part: int
    """The data-parallel index of who sees the running micro-batch."""
    started: bool = False
    """Whether the first forward has begun."""
    done: bool = False
    """Whether all steps are recorded."""
    _begun: int = -1
    """The last step whose beginning the driver has seen."""

    # -- inside a micro-batch
    active: bool = False
    """Whether a forward of the whole model that is recorded runs."""
    order: int = 0
    """The place in the order of computation."""
    _scale: float = 1.0
    """What the last backward's loss was multiplied by."""
    _had_backward: bool = False
    """Whether gradients have come since the micro-batch began: the next forward is another's."""

    # -- random numbers
    _told: tuple[Place, int] | None = None
    """What `state` has given last."""
    _drawn: tuple[Place, int] = ((0, 0), 0)
    """By what the forward that runs, or ran last, draws: see `seed`."""
    _again: tuple[Place, int] | None = None
    """The same of a forward that another plugin runs again; None where none does. Nothing of it is
    recorded."""

    def __init__(self, ctx: Context, section: Verify, driver: Driver) -> None:
        self.ctx = ctx
        self.section = section
        self.driver = driver
        assert ctx.module is not None
        self.module: nn.Module = ctx.module
        self.part = ctx.mesh.index("batch")
        self.folder = Path(section.folder)
        self.tensors = Tensors(ctx, self.folder / f"rank{ctx.rank}", section.limit)
        self.calls = self.make_calls()
        # Stages have other parameters, and rank 0 writes the facts.
        everyone = comm.all_gather_json(self.find_shared())
        self.shared = tuple(sorted({name for names in everyone for name in names}))
        self.undo: list[Callable[[], object]] = []
        # Calls of modules in the micro-batch.
        self._times: Counter[str] = Counter()
        # The state of the generators outside of the forward.
        self._random: tuple[Any, Any] | None = None
        self._param_order = {info.name: i for i, info in enumerate(ctx.params.values())}

    def make_calls(self) -> Calls:
        """What is written for the replay; only by one of the ranks that have the same samples."""
        mesh = self.ctx.mesh
        same = [axis for axis in mesh.names if axis not in mesh.alias["batch"]]
        leads = self.driver.replayed and mesh.index(*same) == 0
        return Calls(self.folder, inputs=leads, outputs=leads)

    def find_shared(self) -> tuple[str, ...]:
        """How names of parameters begin whose gradient from one micro-batch no rank has by itself.

        An expert gets tokens of the micro-batches of several ranks at once.
        """
        batch = set(self.ctx.mesh.alias["batch"])
        return tuple(info.name for info in self.ctx.params.values() if batch & set(info.held))

    # -- hooks on the model ------------------------------------------------------------------------

    def watch(self) -> None:
        """Install all hooks on modules and parameters, until `close` or the engine's end."""
        self.ctx.undo(self.close)
        sources = self.ctx.stash.get(SOURCES) or []
        self.ctx.stash[SOURCES] = [*sources, self]
        self.undo.append(lambda: self.ctx.stash.__setitem__(SOURCES, sources))
        module = self.module
        keep = self.keep
        keep(module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True))
        keep(module.register_forward_hook(self._after, with_kwargs=True))
        self.watch_modules(watched_modules(module))
        self.watch_params()

    def keep(self, handle: Any) -> None:
        """A hook of torch goes with the recorder."""
        self.undo.append(handle.remove)

    def close(self) -> None:
        """Take all hooks back, and record nothing more."""
        self.done = True
        while self.undo:
            self.undo.pop()()

    def watch_modules(self, modules: Mapping[str, nn.Module]) -> None:
        """Record outputs of `modules`, and gradients of their inputs."""
        for name, module in modules.items():
            before = partial(self._module_inputs, name)
            self.keep(module.register_forward_pre_hook(before, with_kwargs=True))
            self.keep(module.register_forward_hook(partial(self._module_outputs, name)))

    def watch_params(self) -> None:
        """Record each micro-batch's own gradients."""
        for param in self.ctx.trained:
            name = self.ctx.params[param].name
            if param.requires_grad and not name.startswith(self.shared):
                self.keep(param.register_hook(partial(self._local_gradient, name)))

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The forward of the whole model begins."""
        if self.done:
            # Here, since no exception of an observer ends a program.
            raise SystemExit(0)
        if not module.training or not torch.is_grad_enabled() or in_backward():
            return
        if self._again is not None:
            self.draw_by(*self._again)
            return
        if not self.started:
            self.started = True
            self.driver.start(self)
        if self._had_backward:
            self.micro += 1
            self.begin_micro()
        if self._begun < self.step:
            self._begun = self.step
            self.driver.begin_step(self)
        self.active = True
        self.calls.begin(self.micro, args, kwargs)
        self.draw_by(self.place, self._times["the model"])
        self._times["the model"] += 1

    # -- random numbers; see `ds_run_state.random_streams.RandomSource` -----------------------------

    @property
    def sources(self) -> list[RandomSource]:
        """Others by which the model draws: they are told the place, and the generators are theirs."""
        return [s for s in self.ctx.stash.get(SOURCES) or () if s is not self]

    def draw_by(self, place: Place, number: int) -> None:
        """Let a forward that begins draw what its micro-batch draws in every layout.

        number: of the forward in the micro-batch.
        """
        self._drawn = place, number
        if others := self.sources:
            for source in others:
                source.stand_for(*place, self.parts)
            return
        self._random = torch.get_rng_state(), self.ctx.accelerator.get_rng_state()
        self.seed(place, number)

    def state(self) -> Any:
        """By what the running forward draws, or else the next."""
        if self.active:
            place, number = self._drawn
        else:
            place = self.micro + self._had_backward, self.part
            number = 0 if self._had_backward else self._times["the model"]
        # Another object each time: `go_on_from` knows the last one.
        self._told = (place, number)
        return self._told

    def go_on_from(self, state: Any) -> None:
        """Whoever runs forwards again tells which ones, and in the end gives the last state back."""
        self._again = None if state is self._told else state

    def stand_for(self, micro: int, index: int, parts: int) -> None:
        """Nothing: the recorder knows the place."""

    @property
    def parts(self) -> int:
        """The data-parallel ranks whose micro-batches a step has; of the subject in a reference."""
        return self.driver.parts or self.ctx.mesh.size("batch")

    def seed(self, place: Place, number: int) -> None:
        """Seed the generators by the micro-batch, and a number that tells what is drawn."""
        seed = hash((self.section.seed, self.step, *place, number)) & 0x7FFFFFFF
        torch.manual_seed(seed)
        self.ctx.accelerator.manual_seed(seed)

    def restore_random(self) -> None:
        """The script's own random numbers go on as if nothing had been seeded."""
        if self._random is not None:
            torch.set_rng_state(self._random[0])
            self.ctx.accelerator.set_rng_state(self._random[1])
            self._random = None

    @property
    def place(self) -> Place:
        """The running micro-batch."""
        return self.micro, self.part

    def begin_micro(self) -> None:
        """Nothing of the micro-batch has run."""
        self.order = 0
        self._had_backward = False
        self._times.clear()

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """The forward of the whole model is over."""
        if not self.active:
            if self._again is not None and not in_backward():
                self.restore_random()
            return None
        self.active = False
        self.restore_random()
        return self.show(output)

    def show(self, output: Any) -> Any:
        """Record what the model gives to the script; returns what the script gets."""
        gradients = self.calls.end(self.micro)
        numbers = itertools.count()

        def show(leaf: Tensor) -> Tensor:
            index = next(numbers)
            if not leaf.is_floating_point():
                return leaf
            self._activation("forward", f"the model, output {index}", leaf, self.place)
            if not leaf.requires_grad:
                return leaf
            # A copy: a loss that the model computes of its logits gives the logits a gradient too,
            # and the replay needs what comes from outside the model alone. A view would lose its
            # hook where a script multiplies its loss in place, as transformers' Trainer does.
            leaf = leaf.clone()
            leaf.register_hook(partial(self._output_gradient, gradients, index))
            return leaf

        return replace_leaves(output, show)

    def _output_gradient(self, gradients: dict[str, str] | None, index: int, grad: Tensor) -> None:
        self._had_backward = True
        if gradients is not None:
            gradients[str(index)] = self.calls.put(divided(grad.detach(), self._factor()))

    def _module_inputs(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.active:
            return
        self._times[name] += 1
        for index, leaf in enumerate(leaves((args, kwargs))):
            if leaf.is_floating_point() and leaf.requires_grad:
                label = f"{self._called(name)}, input {index}"
                leaf.register_hook(partial(self._input_gradient, label, self.place))

    def _called(self, name: str) -> str:
        """The name of a module with the number of its call, if it is not the first."""
        times = self._times[name]
        return name if times == 1 else f"{name} (call {times})"

    def _module_outputs(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        # Activation checkpointing computes modules again in backward.
        if not self.active or in_backward():
            return
        for index, leaf in enumerate(leaves(output)):
            if leaf.is_floating_point():
                label = f"{self._called(name)}, output {index}"
                self._activation("forward", label, leaf, self.place)

    def _input_gradient(self, label: str, place: Place, grad: Tensor) -> None:
        self._activation("backward", label, grad, place, self._factor())

    def _local_gradient(self, name: str, grad: Tensor) -> None:
        if not self.started or self.done or grad.is_sparse or self._again is not None:
            return
        self._had_backward = True
        self._scale = self._factor()
        place = self.place_of_gradient(name)
        self.tensors.local("local gradient", name, grad, self._next(), place, self._scale)

    def place_of_gradient(self, name: str) -> Place:
        """The micro-batch that gives a parameter its next gradient."""
        return self.place

    # -- the step ----------------------------------------------------------------------------------

    def add_gradients(self, gradients: Gradients) -> None:
        """Record the reduced gradients, unscaled."""
        if not self.started or self.done:
            return
        count = len(self._param_order)
        for shard in gradients.shards:
            piece = StateTensor(
                f"module/{shard.name}", shard.tensor, shard.shape, shard.start, shard.stop, (), True
            )
            # In the order of a backward: the last parameter first.
            order = count - self._param_order[shard.name]
            self.tensors.part("gradient", shard.name, piece, order, factor=1 / gradients.factor)

    def end_step(self, metrics: Mapping[str, float]) -> None:
        """Record the new weights and states, and write the step."""
        if not self.started or self.done:
            return
        numbers = [("norm", "the global norm", float(metrics["grad_norm"]))]
        if self.ctx.engine.scaler is not None:
            numbers.append(("scale", "the factor of losses", self._scale))
        for kind, name, number in numbers:
            value = torch.tensor([number], dtype=torch.float64)
            self.tensors.writer.add(Entry(kind, name, (1,), "float32"), value)
        self.record_weights()
        self.tensors.writer.write(f"step{self.step}")
        # What a script sets by hand; of a schedule it would be the next step's.
        self.calls.write(self.part, self.step, self.ctx.engine.get_lr())
        self.step += 1
        self.micro = 0
        self.begin_micro()
        if self.step == self.section.steps:
            self.done = True
            (self.folder / f"rank{self.ctx.rank}" / "done").touch()

    def record_weights(self) -> None:
        """Record what modules compute with, master weights, and the optimizer's states."""
        in_memory = set()
        for param, info in self.ctx.params.items():
            # Of a partitioned parameter the module has nothing between forward and backward.
            if param.numel():
                in_memory.add(f"module/{info.name}")
                self.tensors.local("weight", info.name, param, self._param_order[info.name])
        for state in RunState(self.ctx.engine).states(self.ctx.engine.optimizer):
            if state.name not in in_memory:
                kind, _, name = state.name.partition("/")
                label = ("weight", name) if kind == "module" else ("state", state.name)
                order = self._param_order.get(name.rpartition("/")[2], 0)
                self.tensors.placed(*label, state, order)

    def write_facts(self) -> None:
        """Write what a reference and the comparison need to know of the layout."""
        ctx = self.ctx
        if ctx.rank != 0:
            return
        facts = {
            "world": ctx.world_size,
            "mesh": ctx.mesh.describe(),
            "parts": ctx.mesh.size("batch"),
            "micro": ctx.batch.micro,
            "gas": ctx.batch.gas,
            "steps": self.section.steps,
            "limit": self.section.limit,
            "keys": sorted(ctx.config.raw),
            "summed": ctx.config.core.gradient_allreduce_op == "sum",
            "clip": ctx.config.core.gradient_clipping,
            "compute": name_of(compute_dtype(ctx)),
            "same_batch": ctx.mesh.size("dp") // ctx.mesh.size("batch"),
            "shared": list(self.shared),
        }
        path = self.folder / "facts.json"
        path.write_text(json.dumps(facts, indent=1), encoding="utf-8")

    # -- what is written ---------------------------------------------------------------------------

    def _factor(self) -> float:
        """What the running backward's loss was multiplied by."""
        engine = self.ctx.engine
        driven = engine.partitioner.gradient_hooks.origin.name == "ENGINE"
        return engine.loss_factor() if driven else engine.loss_scale

    def _next(self) -> int:
        self.order += 1
        return self.order

    def _activation(
        self, kind: str, name: str, tensor: Tensor, place: Place, factor: float = 1.0
    ) -> None:
        self.tensors.activation(kind, name, tensor, place, self._next(), factor)


def watched_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks, and outside of them the modules without modules of their own."""
    blocks = repeated_blocks(model)
    inside = {m for block in blocks.values() for m in block.modules()}
    found = {
        name: m
        for name, m in model.named_modules()
        if name and m not in inside and next(m.children(), None) is None
    }
    return found | blocks


def compute_dtype(ctx: Context) -> torch.dtype:
    """The dtype of most of the model's arithmetic."""
    precision = ctx.precision
    if precision.autocast is not None:
        return precision.autocast
    found = {p.dtype for p in ctx.params if p.is_floating_point()}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)
