"""Records one rank's steps: forward, backward, gradients, norm and weights, in order of computation.

The recorder sees the model through hooks of torch on modules and tensors, and the step through the
hooks of ds_core. It changes two things: before each forward it seeds the random generators by step,
micro-batch and data-parallel index, so that dropout is the same in every layout, and it ends the
program at the first forward after the last step.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state import RunState
from ds_run_state.blocks import repeated_blocks
from ds_run_state.slices import SLICES, unslice
from ds_run_state.states import StateTensor
from safetensors.torch import save_file
from torch import Tensor, nn

from ds_verify.records import Entry, StepWriter, encode, leaves, replace_leaves
from ds_verify.sampling import sample_box, sample_range

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.gradients import Gradients
    from ds_verify.config import Verify

Sampled = tuple[Tensor, int, Tensor | None, tuple[int, ...]]
"""Values, the place of the first in the sample or -1, their places, the full shape."""


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
    _saved: int = -1
    """The last step whose beginning was kept."""
    done: bool = False
    """Whether all steps are recorded."""

    # -- inside a micro-batch
    active: bool = False
    """Whether a forward of the whole model that is recorded runs."""
    _order: int = 0
    _had_backward: bool = False
    """Whether gradients have come since the micro-batch began: the next forward is another's."""

    def __init__(self, ctx: Context, section: Verify) -> None:
        self.ctx = ctx
        self.section = section
        assert ctx.module is not None
        self.module: nn.Module = ctx.module
        self.part = ctx.mesh.index("batch")
        self.folder = Path(section.folder)
        self.writer = StepWriter(self.folder / f"rank{ctx.rank}")
        # What is written for the replay; only by one of the ranks that have the same samples.
        same = [a for a in ctx.mesh.names if a not in ctx.mesh.alias["batch"]]
        self._leads = ctx.mesh.index(*same) == 0
        self._calls: list[dict[str, Any]] = []
        self._call_tensors: dict[str, Tensor] = {}
        self._times: Counter[str] = Counter()
        self._random: tuple[Any, Any] | None = None
        self._param_order = {info.name: i for i, info in enumerate(ctx.params.values())}
        self._lr: list[float] = []
        self._watch()

    # -- hooks on the model ------------------------------------------------------------------------

    def _watch(self) -> None:
        """Install all hooks on modules and parameters."""
        self.module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        self.module.register_forward_hook(self._after, with_kwargs=True)
        for name, module in watched_modules(self.module).items():
            module.register_forward_pre_hook(partial(self._module_inputs, name), with_kwargs=True)
            module.register_forward_hook(partial(self._module_outputs, name))
        for param in self.ctx.trained:
            if param.requires_grad:
                param.register_hook(partial(self._local_gradient, self.ctx.params[param].name))

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The forward of the whole model begins."""
        if self.done:
            # Here, since no exception of an observer ends a program.
            raise SystemExit(0)
        if not module.training or not torch.is_grad_enabled() or in_backward():
            return
        if not self.started:
            self.started = True
            self.start()
        self.begin_call(args, kwargs)

    def begin_call(self, args: Any, kwargs: Any) -> None:
        """Record the inputs, and seed the generators."""
        if self._had_backward:
            self.next_micro()
        if self._saved < self.step:
            self._saved = self.step
            self.begin_step()
        self.active = True
        if self._leads:
            self._record_call(args, kwargs)
        accelerator = self.ctx.accelerator
        self._random = torch.get_rng_state(), accelerator.get_rng_state()
        calls = self._times["the model"]
        self._times["the model"] += 1
        seed = hash((self.section.seed, self.step, self.micro, self.part, calls)) & 0x7FFFFFFF
        torch.manual_seed(seed)
        accelerator.manual_seed(seed)

    def next_micro(self) -> None:
        """Another micro-batch of the step begins."""
        self.micro += 1
        self.begin_micro()

    def begin_micro(self) -> None:
        """Nothing of the micro-batch has run."""
        self._order = 0
        self._had_backward = False
        self._times.clear()

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """The forward of the whole model is over."""
        if not self.active:
            return None
        self.active = False
        assert self._random is not None
        # The script's own random numbers go on as if nothing had been seeded.
        torch.set_rng_state(self._random[0])
        self.ctx.accelerator.set_rng_state(self._random[1])
        call = self._calls[-1] if self._leads and self._calls else None
        numbers = itertools.count()

        def show(leaf: Tensor) -> Tensor:
            """What the script gets of an output."""
            index = next(numbers)
            if not leaf.is_floating_point():
                return leaf
            self._record("forward", f"the model, output {index}", leaf)
            if not leaf.requires_grad:
                return leaf
            # An alias: a loss that the model computes of its logits gives the logits a gradient
            # too, and the replay needs what comes from outside the model alone.
            leaf = leaf.view_as(leaf)
            leaf.register_hook(partial(self._output_gradient, call, index))
            return leaf

        return replace_leaves(output, show)

    def _output_gradient(self, call: dict[str, Any] | None, index: int, grad: Tensor) -> None:
        self._had_backward = True
        factor = self._factor()
        if call is not None:
            call["gradients"][str(index)] = self._put(_divided(grad.detach(), factor))

    def _module_inputs(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.active:
            return
        name = self._called(name)
        for index, leaf in enumerate(leaves((args, kwargs))):
            if leaf.is_floating_point() and leaf.requires_grad:
                label = f"{name}, input {index}"
                leaf.register_hook(partial(self._record_gradient, label, self.micro))

    def _called(self, name: str) -> str:
        """The name of a module with the number of its call, if it is not the first."""
        self._times[name] += 1
        return name if self._times[name] == 1 else f"{name} (call {self._times[name]})"

    def _module_outputs(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        # Activation checkpointing computes modules again in backward.
        if not self.active or in_backward():
            return
        if (times := self._times[name]) > 1:
            name = f"{name} (call {times})"
        for index, leaf in enumerate(leaves(output)):
            if leaf.is_floating_point():
                self._record("forward", f"{name}, output {index}", leaf)

    def _record_gradient(self, label: str, micro: int, grad: Tensor) -> None:
        self._record("backward", label, grad, divide=True)

    def _local_gradient(self, name: str, grad: Tensor) -> None:
        if not self.started or self.done or grad.is_sparse:
            return
        self._had_backward = True
        self._record_param("local gradient", name, grad, micro=True, divide=True)

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
            self._record_piece("gradient", shard.name, piece, order, gradients.factor)
        self._lr = self.ctx.engine.get_lr()

    def end_step(self, metrics: Mapping[str, float]) -> None:
        """Record the new weights and states, and write the step."""
        if not self.started or self.done:
            return
        norm = torch.tensor([float(metrics["grad_norm"])], dtype=torch.float64)
        self.writer.add(Entry("norm", "the global norm", (1,), "float32"), norm)
        self.record_weights()
        self.writer.write(f"step{self.step}")
        if self._leads:
            self._write_calls()
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
                self._record_param("weight", info.name, param)
        for state in RunState(self.ctx.engine).states(self.ctx.engine.optimizer):
            if state.name not in in_memory:
                kind, _, name = state.name.partition("/")
                label = ("weight", name) if kind == "module" else ("state", state.name)
                order = self._param_order.get(name.rpartition("/")[2], 0)
                self._add(*label, self._sampled(state), state.values().dtype, order)

    def start(self) -> None:
        """The first forward begins. Collective."""
        if self.ctx.rank == 0:
            self.write_facts()
        self.record_weights()
        self.writer.write("begin0")

    def begin_step(self) -> None:
        """Save what the reference begins the step with. Collective."""
        engine = self.ctx.engine
        engine.save_checkpoint(str(self.folder / "states"), tag=f"step{self.step}")
        engine.wait_for_checkpoint()

    def write_facts(self) -> None:
        """Write what a reference and the comparison need to know of the layout."""
        ctx = self.ctx
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
            "compute": _name_of(compute_dtype(ctx)),
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
        self._order += 1
        return self._order

    def _record(self, kind: str, name: str, tensor: Tensor, *, divide: bool = False) -> None:
        """An activation or its gradient: what this rank has counts as all of it."""
        values, first = sample_range(tensor, 0, tensor.numel(), self.section.limit)
        if divide:
            values = _divided(values, self._factor())
        shape = tuple(tensor.shape)
        dtype = _name_of(tensor.dtype)
        entry = Entry(kind, name, shape, dtype, first, self.micro, self.part, self._next())
        self.writer.add(entry, values)

    def _record_param(
        self, kind: str, name: str, tensor: Tensor, *, micro: bool = False, divide: bool = False
    ) -> None:
        """A tensor of the local shape of a parameter."""
        shape = tuple(tensor.shape)
        piece = StateTensor(f"module/{name}", tensor, shape, 0, tensor.numel(), (), True)
        order = self._next() if micro else self._param_order[name]
        factor = 1 / self._factor() if divide else 1.0
        self._record_piece(kind, name, piece, order, factor, micro=micro)

    def _record_piece(
        self,
        kind: str,
        name: str,
        piece: StateTensor,
        order: int,
        factor: float,
        *,
        micro: bool = False,
    ) -> None:
        """A part of a parameter or its gradient, times `factor`; slices are placed in the full one."""
        for found in unslice([piece], self.ctx.stash.get(SLICES), self.ctx.mesh):
            sampled = self._sampled(found, factor)
            self._add(kind, name, sampled, piece.tensor.dtype, order, micro=micro)

    def _sampled(self, piece: StateTensor, factor: float = 1.0) -> Sampled:
        values = piece.values()
        limit = self.section.limit
        if piece.box is None:
            found, first = sample_range(values, piece.start, math.prod(piece.shape), limit)
            return _divided(found, 1 / factor), first, None, piece.shape
        found, places = sample_box(values, piece.start, piece.box, piece.shape, limit)
        return _divided(found, 1 / factor), -1, places, piece.shape

    def _add(
        self,
        kind: str,
        name: str,
        sampled: Sampled,
        dtype: torch.dtype,
        order: int,
        *,
        micro: bool = False,
    ) -> None:
        values, first, places, shape = sampled
        where = (self.micro, self.part) if micro else (0, 0)
        entry = Entry(kind, name, shape, _name_of(dtype), first, *where, order)
        self.writer.add(entry, values, places)

    def _record_call(self, args: Any, kwargs: Any) -> None:
        call = {
            "micro": self.micro,
            "window": self.ctx.engine.micro_steps,
            "arguments": encode((list(args), kwargs), self._put, "the model's inputs"),
            "gradients": {},
        }
        self._calls.append(call)

    def _put(self, tensor: Tensor) -> str:
        name = str(len(self._call_tensors))
        self._call_tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        return name

    def _write_calls(self) -> None:
        stem = self.folder / f"calls{self.part}.{self.step}"
        save_file(self._call_tensors, f"{stem}.safetensors")
        text = json.dumps({"lr": self._lr, "calls": self._calls})
        Path(f"{stem}.json").write_text(text, encoding="utf-8")
        self._calls = []
        self._call_tensors = {}


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


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _divided(values: Tensor, factor: float) -> Tensor:
    """`values` by `factor`, in fp32 at least where that could round."""
    if factor == 1.0:
        return values.clone() if values.device.type != "cpu" else values
    wide = values.float() if values.dtype.itemsize < 4 else values
    return wide / factor
