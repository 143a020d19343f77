"""`Counter`: what each module of a model computes, seen in torch's dispatcher, and how long it
takes.

Each operation counts at the innermost module that runs, and so does time. A module's total is the
sum over the set of modules below it (itself included), so one that is called several times counts
as often as it is called, and one that has several places in the model counts once. An operation in
autograd's backward counts as backward; where it runs in a module's forward there, it is a forward
that activation checkpointing does again.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from ds_flops_profiler.formulas import Formula, formula_of

_TORCHS_OWN = (
    "aten",
    "prim",
    "prims",
    "c10d",
    "_c10d_functional",
    "c10d_functional",
    "profiler",
    "inductor",
)


@dataclass(slots=True)
class Tally:
    """What ran: floating-point operations, multiply-accumulates among them, seconds, and calls of
    the module.
    """

    flops: int = 0
    macs: int = 0
    seconds: float = 0.0
    calls: int = 0

    def over(self, runs: int) -> Tally:
        """The mean over so many runs; operations are rounded to whole ones."""
        return Tally(
            round(self.flops / runs), round(self.macs / runs), self.seconds / runs, self.calls
        )


class Counter:
    """Counts operations and time of modules while it is attached, in ``with counter.measuring()``.

    ignore: classes of modules that are not counted apart: what they do counts at the module that
        calls them.
    """

    def __init__(
        self,
        model: nn.Module,
        ignore: Collection[type] = (),
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.ignore = tuple(ignore)
        self._synchronize = synchronize
        self._hooks: list[RemovableHandle] = []
        self._measures = False
        # Of the operations that were seen; None: they count 0, or are run as their parts.
        self.formulas: dict[Any, Formula | None] = {}
        self.parts: set[Any] = set()
        self.reset()

    def reset(self) -> None:
        """All counts are zero again."""
        # How many forwards of the model all figures are the mean of.
        self.runs = 1
        self._backward = Tally()
        self._recomputed = Tally()
        # Operations that ran, are none of torch's own, and have no formula: they count 0.
        self.unknown: set[str] = set()
        self._tallies: dict[int, Tally] = {id(module): Tally() for module in self.model.modules()}
        self._running: list[_Call] = []

    def reset_clock(self) -> None:
        """Times and calls are zero again; operations stay."""
        for tally in self._tallies.values():
            tally.seconds = 0.0
            tally.calls = 0

    # -- modules -----------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put hooks on the modules."""
        for module in self.model.modules():
            if type(module) not in self.ignore:
                self._hooks.append(module.register_forward_pre_hook(self._enter, prepend=True))
                self._hooks.append(module.register_forward_hook(self._leave, always_call=True))

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._running.clear()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if not self._measures:
            return
        self._synchronize()
        self._running.append(_Call(module, time.perf_counter()))

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not any(call.module is module for call in self._running):
            return  # it began outside of `measuring`
        self._synchronize()
        now = time.perf_counter()
        # an exception took these out of their forward
        while (call := self._running.pop()).module is not module:
            pass
        elapsed = now - call.start
        # What the caller has of its own is its time without that of the modules it called.
        if self._running:
            self._running[-1].inner += elapsed
        # A forward in the backward is done again by activation checkpointing; the module's own
        # forward has its time already.
        if not _in_backward():
            tally = self._tallies[id(module)]
            tally.seconds += elapsed - call.inner
            tally.calls += 1

    def total(self, module: nn.Module) -> Tally:
        """Of the forward of `module` and all modules below it."""
        found = Tally(calls=self._tallies[id(module)].calls)
        for part in module.modules():
            if (tally := self._tallies.get(id(part))) is not None:  # None: it came after `reset`
                found.flops += tally.flops
                found.macs += tally.macs
                found.seconds += tally.seconds
        return found.over(self.runs)

    @property
    def backward(self) -> Tally:
        """What autograd's backward computed."""
        return self._backward.over(self.runs)

    @property
    def recomputed(self) -> Tally:
        """Of `backward`, what forwards of modules computed again."""
        return self._recomputed.over(self.runs)

    # -- operations --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def measuring(self, operations: bool = True) -> Iterator[None]:
        """Run models as they can be measured, module by module: not compiled, and torch's fused
        encoder layer as parts.

        operations: count them too, which takes time for each.
        """
        # Compiled graphs and fused layers run no modules and no operations that could be counted.
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        # Without this module nothing has been compiled, and importing it takes seconds.
        compiles = "torch._dynamo" in sys.modules
        stance = torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext()
        self._measures = True
        try:
            with stance, _Mode(self) if operations else contextlib.nullcontext():
                yield
        finally:
            self._measures = False
            torch.backends.mha.set_fastpath_enabled(fused)

    def count(self, flops: int, macs: int) -> None:
        """Add to the module that runs, or to the backward."""
        if _in_backward():
            tallies = [self._backward, self._recomputed] if self._running else [self._backward]
        else:
            tallies = [self._tallies[id(self._running[-1].module)]] if self._running else []
        for tally in tallies:
            tally.flops += flops
            tally.macs += macs


@dataclass(slots=True)
class _Call:
    """A module that runs; inner: seconds of the modules that it has called."""

    module: nn.Module
    start: float
    inner: float = 0.0


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _Mode(TorchDispatchMode):
    """Sees every operation below autograd, of the forward and of the backward."""

    supports_higher_order_operators = True

    def __init__(self, counter: Counter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter
        self._formulas = counter.formulas
        self._parts = counter.parts

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in `Counter.measuring`, so torch need not guard this from its
        compiler, which is slow.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            formula = self._formulas[func]
        except KeyError:
            formula = self._formulas[func] = self._find(func)
        if formula is not None:
            out = func(*args, **kwargs)
            self._counter.count(*formula(args, kwargs, out))
            return out
        # An operation without a formula may be made of others that have one.
        if func in self._parts:
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)

    def _find(self, func: Any) -> Formula | None:
        formula = formula_of(func)
        if formula is not None:
            return formula
        if isinstance(func, torch._ops.OpOverload) and func.namespace in _TORCHS_OWN:
            if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
                self._parts.add(func)  # with torch.inference_mode() it comes in one piece
        else:
            self._counter.unknown.add(str(func))
        return formula
