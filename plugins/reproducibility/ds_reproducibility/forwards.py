"""Forwards of a model and the random numbers that they have drawn: which forward, which module,
which call.

[Note: recomputation] Activation checkpointing runs a part of a forward again in backward, when
later forwards may have begun. All kinds of it put back the state of torch's generator. So the
generator is seeded anew after each draw, with a number that stands for "this forward, so many
draws": the second run finds its place by the seed that it is given back. What else draws from the
CPU's generator in a forward draws by step and samples too; after the forward the generator goes on
as if nothing had been seeded.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from ds_run_state.divided import POSITIONS
from ds_run_state.random_streams import STREAMS
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from ds_core.config import Trait
from ds_core.errors import UsageError
from ds_core.nested import map_leaves
from ds_reproducibility.counter import Grid, Key, number_of
from ds_reproducibility.placement import HEADS, Place, Positions, Ranges, Samples

if TYPE_CHECKING:
    from types import FrameType

    from ds_core.context import Context
    from ds_reproducibility.config import Reproducibility

_GRIDS = 64
"""Grids that are kept; a model has few shapes."""


@dataclass(eq=False)
class Forward:
    """One forward of the model in training.

    samples: of its micro-batch. ``call`` tells several forwards of one micro-batch apart.
    """

    step: int
    samples: Samples
    call: int
    chunk: int
    """Of a pipeline's stage."""
    positions: Positions | None
    graph: bool
    """Whether a backward may come back to it."""
    drawn: list[str] = field(default_factory=list)
    """The modules that have drawn, in order."""


class Spot(NamedTuple):
    """A point of a forward: so many draws were made."""

    forward: Forward
    drawn: int


class Frame:
    """A module whose forward runs.

    outputs: of the divided layers that were called in it, until one makes the tensor whole again.
    """

    __slots__ = ("_grad", "_hooks", "module", "name", "outputs")

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.outputs: list[Ranges] = []
        # What a checkpoint that begins inside of it changes.
        self._grad = torch.is_grad_enabled()
        self._hooks = _saving()

    @property
    def label(self) -> str:
        """Its name for messages."""
        return repr(self.name) if self.name else f"the model's own {type(self.module).__name__}"

    def check(self) -> None:
        """UsageError where the module's own code draws inside of a checkpoint that it began.

        The second run begins inside of it, where nothing tells the module.
        """
        hooks = _saving()
        begun = hooks is not self._hooks and not _offloads(hooks)
        # The re-entrant kind runs without gradients, as other code may.
        if begun or (self._grad and not torch.is_grad_enabled() and _reentrant()):
            raise UsageError(
                f"reproducibility: {self.label} draws random numbers in a function that it gives to "
                "a checkpoint, which runs it again without the module; give it a module, or draw "
                "outside"
            )


class Run:
    """A forward that runs in one thread, the first time or again in backward.

    spot: where it begins; None: outside of the forwards that are known.
    """

    def __init__(self, book: Book, spot: Spot | None) -> None:
        self.book = book
        self.task = graph_task()
        self.frames: list[Frame] = []
        self._spot = spot
        # How often each module has drawn before.
        self._calls = Counter(spot.forward.drawn[: spot.drawn] if spot is not None else ())

    @property
    def known(self) -> bool:
        """Whether it is a forward of the engine."""
        return self._spot is not None

    def calls(self, name: str) -> int:
        """How often the module of that name has drawn in this forward."""
        return self._calls[name]

    def draw(self, shape: Any, device: torch.device) -> tuple[Key, Grid]:
        """The key and the elements of random numbers of that shape, for the running module.

        Raises UsageError where they cannot be placed.
        """
        if self._spot is None:
            raise UsageError(_LOST)
        forward = self._spot.forward
        frame = self.frames[-1]
        frame.check()
        key = Key.of(
            self.book.section.seed, forward.step, forward.call, frame.name, self._calls[frame.name]
        )
        grid = self.book.grid(self._place(forward), tuple(shape), device)
        # The place is told by the generator from now on.
        self._calls[frame.name] += 1
        self._spot = self.book.after(self._spot, frame.name)
        return key, grid

    def _place(self, forward: Forward) -> Place:
        """Where the running module's tensors are."""
        outputs = next((f.outputs for f in reversed(self.frames) if f.outputs), [])
        heads: tuple[int, ...] = ()
        if forward.positions is not None:
            heads = tuple(_heads(self.frames))
        return Place(forward.samples, forward.positions, tuple(outputs), heads)


class Book:
    """The forwards of one engine, and where each thread is in them."""

    def __init__(self, ctx: Context, section: Reproducibility) -> None:
        self.ctx = ctx
        self.section = section
        self._here = threading.local()

        # -- Forwards of this step.

        self._step = -1
        # By the seed that the generator has there.
        self._spots: dict[int, Spot] = {}
        # The engine's micro_steps when the step began.
        self._base = 0
        # Forwards and backwards since `micro_steps` changed, by chunk of a pipeline.
        self._seen: dict[tuple[int, int], list[int]] = {}
        self._had_backward = False
        # How far the engine's micro_steps are ahead of the forward that is run again.
        self._ahead = 0
        # Which micro-batch of which data-parallel rank, of how many, the next forward is said to be.
        self._said: tuple[int, int, int] | None = None

        self._grids: dict[Any, Grid] = {}
        # By name: whether the module is an expert.
        self._experts: dict[str, bool] = {}

    @property
    def pipeline(self) -> bool:
        """Whether the model is a stage of a pipeline."""
        return self.ctx.config.has(Trait.DIVIDES_DEPTH)

    def is_expert(self, frame: Frame) -> bool:
        """Whether all parameters of the module are marked as those of experts."""
        if frame.name not in self._experts:
            marks = [getattr(p, "allreduce", True) for p in frame.module.parameters()]
            self._experts[frame.name] = bool(marks) and not any(marks)
        return self._experts[frame.name]

    @property
    def run(self) -> Run | None:
        """The forward that runs in this thread."""
        run: Run | None = getattr(self._here, "run", None)
        # What runs in a backward inside of a forward is part of another one.
        return run if run is not None and run.task == graph_task() else None

    def enter(self, run: Run | None) -> Run | None:
        """Make `run` that of this thread; gives the one before."""
        before: Run | None = getattr(self._here, "run", None)
        self._here.run = run
        return before

    # -- places ------------------------------------------------------------------------------------

    def begin(self, inputs: Any, chunk: int) -> Spot:
        """A new forward begins, with these inputs."""
        engine = self.ctx.engine
        if engine.global_steps != self._step:
            self.forget()
            self._step = engine.global_steps
            self._base = engine.micro_steps
        micro, call = self._number(engine.micro_steps - self._ahead - self._base, chunk)
        shape = next((leaf.shape for leaf in _leaves(inputs) if leaf.dim()), None)
        samples = self._samples(*(self._said or self._own(micro)), shape)
        self._said = None
        forward = Forward(
            *(self._step, samples, call, chunk, self._positions(shape)), torch.is_grad_enabled()
        )
        spot = Spot(forward, 0)
        _seed(self._remember(spot))
        return spot

    def state(self) -> Any:
        """See `ds_run_state.random_streams.RandomSource`."""
        engine = self.ctx.engine
        micro_steps = engine.micro_steps - self._ahead
        if engine.global_steps != self._step:
            # The next forward begins a step.
            return engine.global_steps, micro_steps, micro_steps, {}, False
        seen = {place: list(counts) for place, counts in self._seen.items()}
        return self._step, self._base, micro_steps, seen, self._had_backward

    def go_on_from(self, state: Any) -> None:
        """See `ds_run_state.random_streams.RandomSource`."""
        self._step, self._base, micro_steps, seen, self._had_backward = state
        self._ahead = self.ctx.engine.micro_steps - micro_steps
        self._seen = {place: list(counts) for place, counts in seen.items()}

    def stand_for(self, micro: int, index: int, parts: int) -> None:
        """See `ds_run_state.random_streams.RandomSource`."""
        self._said = micro, index, parts

    def forget(self) -> None:
        """Forget all forwards: their step is over, or the counters are a checkpoint's."""
        self._step = -1
        self._spots.clear()
        self._seen.clear()
        self._had_backward = False
        self._ahead = 0

    def after(self, spot: Spot, name: str) -> Spot:
        """The next place, after a draw of the module `name`."""
        drawn = spot.forward.drawn
        if spot.drawn == len(drawn):
            drawn.append(name)
        elif drawn[spot.drawn] != name:
            raise UsageError(
                f"reproducibility: computed again in backward, {name!r} draws random numbers where "
                f"{drawn[spot.drawn]!r} did the first time"
            )
        found = Spot(spot.forward, spot.drawn + 1)
        _seed(self._remember(found))
        return found

    def resume(self) -> Spot | None:
        """The place that the generator tells; None where it tells none."""
        return self._spots.get(_seed_now())

    def grid(self, place: Place, shape: tuple[int, ...], device: torch.device) -> Grid:
        """The elements of a tensor at `place`."""
        wanted = (place, shape, device)
        found = self._grids.pop(wanted, None)
        if found is None:
            found = place.grid(shape, device)
            if len(self._grids) == _GRIDS:
                # The one that was not used for the longest time.
                self._grids.pop(next(iter(self._grids)))
        self._grids[wanted] = found
        return found

    def watch(self, outputs: Any) -> None:
        """Notice when the backward of these outputs begins: the next forward is of another
        micro-batch.
        """

        def notice(grad: Tensor) -> None:
            self._had_backward = True

        # Of an object that is no container, such as a dataclass, the loss.
        for leaf in _leaves((outputs, getattr(outputs, "loss", None))):
            if leaf.requires_grad:
                leaf.register_hook(notice)

    def _remember(self, spot: Spot) -> int:
        of = spot.forward
        seed = number_of(
            *(self.section.seed, of.step, of.samples.first, of.call, of.chunk, spot.drawn)
        )
        if of.graph:
            self._spots[seed] = spot
        return seed

    def _number(self, ended: int, chunk: int) -> tuple[int, int]:
        """The number of the micro-batch in its window, and of the forward in the micro-batch.

        ended: micro-batches that `step` has counted.
        """
        seen = self._seen.setdefault((ended, chunk), [0, -1])
        engine = self.ctx.engine
        if not engine.runner.manual:
            # A pipeline runs each chunk once for each micro-batch, in order.
            seen[0] += 1
            return seen[0] - 1, 0
        # `train_batch` runs all micro-batches before the counter moves; each has its backward.
        if self._had_backward and not ended:
            seen[0] += 1
            seen[1] = -1
        self._had_backward = False
        seen[1] += 1
        return ended + seen[0], seen[1]

    def _own(self, micro: int) -> tuple[int, int, int]:
        return micro, self.ctx.mesh.index("batch"), self.ctx.mesh.size("batch")

    def _samples(self, micro: int, index: int, parts: int, shape: torch.Size | None) -> Samples:
        dim = self.section.batch_dim
        count = self.ctx.batch.micro
        if shape is not None and len(shape) > dim:
            count = shape[dim]
        if self.section.samples == "blocks":
            return Samples(count, (micro * parts + index) * count, 1, dim)
        return Samples(count, micro * count * parts + index, parts, dim)

    def _positions(self, shape: torch.Size | None) -> Positions | None:
        told = self.ctx.stash.get(POSITIONS)
        if told is None:
            return None
        dim = 1 - self.section.batch_dim
        if shape is None or len(shape) < 2:
            raise UsageError(
                "reproducibility: with divided sequences the model's first input must be a tensor "
                "with a dimension of samples and one of positions"
            )
        length, ranges = told(shape[dim])
        mesh = self.ctx.mesh
        return Positions(length, tuple(ranges), mesh.index("sp"), mesh.size("sp"))


_LOST = (
    "reproducibility: a part of the model is computed again in backward, and the state of torch's "
    "random generator is not that of its first run, so the same dropout cannot be drawn; leave "
    "preserve_rng_state of torch.utils.checkpoint on, and seed no generator in the model's forward"
)


def graph_task() -> int:
    """The backward that runs in this thread; -1: none."""
    return torch._C._current_graph_task_id()


def _saving() -> Any:
    """What is called for tensors that autograd saves; None: nothing."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks is not None else None


def _offloads(hook: Any) -> bool:
    """Whether it keeps tensors elsewhere, and computes nothing again."""
    return hook is None or getattr(hook, "__qualname__", "").startswith("save_on_cpu")


def _reentrant() -> bool:
    """Whether the calling code runs in `torch.utils.checkpoint` of the re-entrant kind, inside of
    the running module.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_run":
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back
    return False


def _seed(seed: int) -> None:
    """Seed the CPU's generator, that which is used outside of named streams."""
    inside = STREAMS.inside
    STREAMS.switch(None)
    torch.default_generator.manual_seed(seed)
    STREAMS.switch(inside)


def _seed_now() -> int:
    inside = STREAMS.inside
    STREAMS.switch(None)
    seed = torch.default_generator.initial_seed()
    STREAMS.switch(inside)
    return seed


def _leaves(value: Any) -> list[Tensor]:
    found: list[Any] = []
    map_leaves(found.append, value)
    return [leaf for leaf in found if isinstance(leaf, Tensor)]


def _heads(frames: list[Frame]) -> Iterator[int]:
    """The numbers of heads that the innermost module with any names."""
    for frame in reversed(frames):
        found = [
            value
            for source in (frame.module, getattr(frame.module, "config", None))
            for name in HEADS
            if isinstance(value := getattr(source, name, None), int)
        ]
        if found:
            yield from found
            return
