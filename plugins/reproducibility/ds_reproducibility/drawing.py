"""The model's forward in training, in which torch's random functions draw by module, step and index.

Each module that may draw has a stand-in before its forward, which tells its name; the outermost one
that runs in a thread enters a `TorchFunctionMode`, which sees the calls of torch's functions. So
functions in the user's code draw as modules do, and torch is not changed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state.changes import StandIn, changing
from ds_run_state.divided import divided
from ds_run_state.random_streams import SOURCES
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from ds_core import comm
from ds_core.comm import ALONE
from ds_core.config import Trait
from ds_core.context import StashKey
from ds_core.errors import UsageError
from ds_core.process import log_once
from ds_reproducibility.counter import Grid, Key
from ds_reproducibility.forwards import Book, Frame, Run, Spot, graph_task
from ds_reproducibility.functions import COMPOSED, FUNCTIONS, KNOWN, unchecked

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_reproducibility.config import Reproducibility

log = logging.getLogger("ds_reproducibility")

BOOK: StashKey[Book] = StashKey("dscore-reproducibility forwards")
"""Of the engine."""


def install(model: nn.Module, ctx: Context, section: Reproducibility) -> nn.Module:
    """The model, whose random functions draw by name; `ctx.undo` gives it back.

    Raises UsageError for modules whose random numbers nothing can reach.
    """
    if getattr(model, "seed_layers", False):
        raise UsageError(
            "reproducibility: PipelineModule(seed_layers=True) seeds the generators in each "
            "forward; leave seed_layers out, or set reproducibility.dropout to false"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
            raise UsageError(
                f"reproducibility: {name!r} drops inside of torch's kernel; set its dropout to 0 "
                "and put nn.Dropout between layers of one each"
            )
    if ctx.config.has(Trait.DIVIDES_DEPTH):
        _check_names(model, ctx)
    ctx.stash[BOOK] = book = Book(ctx, section)
    ctx.stash[SOURCES] = [*(ctx.stash.get(SOURCES) or ()), book]
    with changing(model, ctx.undo):
        for name, module in model.named_modules():
            if module is model or _may_draw(module):
                module.forward = Named(module, name, book, root=module is model)
    return model


def _check_names(model: nn.Module, ctx: Context) -> None:
    """UsageError for a module that is several layers of a pipeline: a stage alone would call it by
    another name. Collective over the stages.
    """
    names: dict[nn.Module, str] = {}
    twice = [
        f"{names[module]} and {name}"
        for name, module in model.named_modules(remove_duplicate=False)
        if names.setdefault(module, name) != name and _may_draw(module)
    ]
    group = ctx.mesh.group("pp") if ctx.mesh.has("pp") else ALONE
    found = [pair for stage in comm.all_gather_json(twice, group=group) for pair in stage]
    if found:
        raise UsageError(
            f"reproducibility: {found[0]} are one module, whose name a stage alone would not know; "
            "make a module for each"
        )


def follow_divided_layers(model: nn.Module, ctx: Context) -> nn.Module:
    """Notice in which modules ranks have other elements: between a divided layer and the one that
    makes the tensor whole again.
    """
    book = ctx.stash[BOOK]
    for name, module in model.named_modules():
        part = divided(module)
        if part is None:
            continue
        if getattr(module, "sequence_dim", None) is not None:
            raise UsageError(
                f"reproducibility: {name!r} divides tokens over the ranks of tp, whose dropout is "
                "not offered; set tensor_parallel.sequence_parallel or reproducibility.dropout to "
                "false"
            )
        if part.outputs is not None and not part.gathers:
            after = _Opens(book, tuple((int(a), int(b)) for a, b in part.outputs))
            ctx.undo(module.register_forward_hook(after).remove)
        elif part.inputs is not None:
            ctx.undo(module.register_forward_pre_hook(_Closes(book)).remove)
    return model


def _may_draw(module: nn.Module) -> bool:
    """False for torch's own modules without modules in them, but for those that drop."""
    own = type(module).__module__.startswith("torch.nn.modules")
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    if isinstance(module, containers):
        return False
    leaf = next(module.children(), None) is None
    return not (own and leaf) or isinstance(module, (_DropoutNd, nn.RReLU, nn.MultiheadAttention))


class _Opens:
    """Forward hook of a layer of which each rank has some outputs."""

    def __init__(self, book: Book, outputs: tuple[tuple[int, int], ...]) -> None:
        self.book = book
        self.outputs = outputs

    def __deepcopy__(self, memo: Any) -> _Opens:
        """Of a copy of the model: the same run."""
        return self

    def __call__(self, *_: Any) -> None:
        run = self.book.run
        if run is not None and run.frames:
            run.frames[-1].outputs.append(self.outputs)


class _Closes:
    """Forward pre-hook of a layer that is given each rank's inputs, and whose outputs are whole."""

    def __init__(self, book: Book) -> None:
        self.book = book

    def __deepcopy__(self, memo: Any) -> _Closes:
        """Of a copy of the model: the same run."""
        return self

    def __call__(self, *_: Any) -> None:
        run = self.book.run
        if run is not None and run.frames:
            run.frames[-1].outputs.clear()


class Named(StandIn):
    """The forward of one module, in the place of ``module.forward``.

    root: of the whole model.
    """

    def __init__(self, module: nn.Module, name: str, book: Book, *, root: bool) -> None:
        late = "forward" not in vars(module)
        super().__init__(module)
        if late:
            # Others may change the module's class after this.
            self.forward = self._by_class
        self.name = name
        self.book = book
        self.root = root

    def _by_class(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result."""
        run = self.book.run
        if run is None:
            return self._enter(args, kwargs)
        run.frames.append(Frame(self.name, self.module))
        try:
            return self.forward(*args, **kwargs)
        finally:
            run.frames.pop()

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outermost module of this thread begins."""
        book = self.book
        if not self.module.training or book.ctx.engine_ref() is None:
            return self.forward(*args, **kwargs)
        if graph_task() != -1:
            return self._run(book.resume(), args, kwargs)
        if not self.root:
            return self._run(None, args, kwargs)
        before = torch.get_rng_state()
        try:
            out = self._run(book.begin((args, kwargs), kwargs.get("chunk", 0)), args, kwargs)
            book.watch(out)
        finally:
            torch.set_rng_state(before)
        return out

    def _run(self, spot: Spot | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = Run(self.book, spot)
        run.frames.append(Frame(self.name, self.module))
        before = self.book.enter(run)
        try:
            with Drawing(run):
                return self.forward(*args, **kwargs)
        finally:
            self.book.enter(before)


class Drawing(TorchFunctionMode):
    """Inside, torch's random functions draw for the modules of `run`."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self._pipeline = run.book.pipeline

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The result of one call."""
        if function not in KNOWN:
            return function(*args, **kwargs) if kwargs else function(*args)
        kwargs = dict(kwargs or {})
        # A generator of the user's own is the user's business.
        if kwargs.pop("generator", None) is not None or kwargs.get("out") is not None:
            return function(*args, **kwargs)
        if function in COMPOSED:
            with self:
                return unchecked(function)(*args, **kwargs)
        ours = FUNCTIONS.get(function)
        if ours is None or not self._covers():
            self._tell(function)
            return function(*args, **kwargs)
        return ours(self, *args, **kwargs)

    def draw(
        self, shape: Any, device: torch.device, target: Tensor | None = None
    ) -> tuple[Key, Grid]:
        """See `ds_reproducibility.functions.Source`."""
        frame = self.run.frames[-1]
        if any(map(self.run.book.is_expert, self.run.frames)):
            raise UsageError(
                f"reproducibility: {frame.label} draws random numbers for rows that are sorted by "
                "expert, whose samples are not known; use no dropout inside of experts, or set "
                "reproducibility.dropout to false"
            )
        if self._pipeline:
            self._check_layer(frame)
        return self.run.draw(shape, device)

    def _check_layer(self, frame: Frame) -> None:
        """UsageError for what draws in a pipeline and is not part of one layer."""
        model: Any = self.run.book.ctx.module
        tied = model is not None and frame.name.startswith("tied.")
        if frame.module is model:
            raise UsageError(
                "reproducibility: a layer of the pipeline that is a function draws random numbers, "
                "and has no name; make it a module"
            )
        if tied:
            key = frame.name.split(".")[1]
            first = model.tied_stages.get(key, [model.stage_id])[0]
            if first != model.stage_id or self.run.calls(frame.name):
                raise UsageError(
                    f"reproducibility: {frame.name!r} draws random numbers where it is used again, "
                    "which a stage alone cannot count; draw outside of the tied layer"
                )

    def _covers(self) -> bool:
        """Whether it is a forward of the engine, or a part of one in backward."""
        return self.run.known or self.run.task != -1

    def _tell(self, function: Any) -> None:
        """Say once what is left to torch."""
        name = getattr(function, "__name__", str(function))
        frame = self.run.frames[-1]
        if not self.run.known:
            log_once(
                log,
                logging.WARNING,
                f"{name} in {frame.label} is not drawn by reproducibility: the module was called "
                "outside of the engine's forward",
            )
            return
        log_once(
            log,
            logging.WARNING,
            f"{name} in {frame.label} is not offered by reproducibility: its numbers depend on "
            "the layout",
        )
