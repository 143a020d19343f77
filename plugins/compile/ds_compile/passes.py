"""Passes over the graphs that torch.compile captures, and the backend that runs them.

A pass is a function ``(graph, inputs) -> graph``: it gets the `torch.fx.GraphModule` as Dynamo
captured it (torch's own functions and methods, before autograd) and the example inputs, and returns
it, changed or not. Plugins offer by `ds_compile_passes`, under a name, the reference of a function
``ctx -> pass``; None instead of a pass says that nothing in the graph is to be changed, because the
plugin does its work around it. A pass with an attribute ``whole = True`` needs the graph of the
whole model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_core.context import StashKey
from ds_core.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from ds_core.context import Context

log = logging.getLogger("ds_compile")

GraphPass = Callable[["GraphModule", Sequence[Any]], "GraphModule"]

REGISTERED: StashKey[dict[str, GraphPass]] = StashKey("dscore-compile passes of the user's")


@dataclass(frozen=True)
class Passes:
    """Passes by name, in order.

    shown: whether graphs go to the log.
    """

    passes: Mapping[str, GraphPass]
    shown: bool

    @property
    def whole(self) -> list[str]:
        """Those that need the graph of the whole model."""
        return [name for name, change in self.passes.items() if getattr(change, "whole", False)]

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> GraphModule:
        """The graph after all passes."""
        self._show("as captured", graph)
        for name, change in self.passes.items():
            graph = change(graph, inputs)
            # After each pass, so that an error names the pass that has made it.
            graph.graph.lint()
            graph.recompile()
            self._show(f"after {name}", graph)
        return graph

    def _show(self, when: str, graph: GraphModule) -> None:
        if self.shown:
            log.info("compile: graph %s:\n%s", when, graph.print_readable(print_output=False))


def make_passes(ctx: Context, wanted: Iterable[str | GraphPass], shown: bool) -> Passes:
    """The passes `wanted`: names, or passes themselves.

    Raises UsageError for a name that nobody offers.
    """
    offered = ctx.plugins.named("ds_compile_passes", "compile_passes")
    own = ctx.stash.get(REGISTERED) or {}
    found: dict[str, GraphPass] = {}
    for one in wanted:
        if callable(one):
            found[getattr(one, "__name__", repr(one))] = one
        elif one in own:
            found[one] = own[one]
        elif one.lower() in offered:
            answer = offered[one.lower()]
            change = answer.resolve(answer.value, f"the compile pass {one!r}")(ctx)
            if change is not None:
                found[one] = change
        else:
            known = [*own, *offered]
            raise UsageError(
                f"no compile pass is called {one!r}. {did_you_mean(one, known)} known: "
                f"{', '.join(known)}"
            )
    return Passes(found, shown)


def register_compile_pass(engine: Any, name: str, change: GraphPass) -> None:
    """Give a pass of your own a name, for the ``schedule`` of ``engine.compile``."""
    if not callable(change):
        raise UsageError(
            f"register_compile_pass({name!r}, ...): a pass is a function (graph, inputs) -> graph"
        )
    stash = engine.ctx.stash
    stash[REGISTERED] = {**(stash.get(REGISTERED) or {}), name: change}


def backend_with(passes: Passes, backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """A backend for torch.compile that runs `passes`, and gives the result to `backend`."""
    inner = _backend(backend)

    def compile_graph(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        return inner(passes(graph, inputs), inputs, **options)

    return compile_graph


def _backend(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """A backend by name, as a function that takes torch.compile's ``mode`` and ``options`` as
    well."""
    import torch

    if callable(backend):
        return backend
    if backend != "inductor":
        found: Callable[..., Any] = torch._dynamo.lookup_backend(backend)
        return found

    def inductor(
        graph: GraphModule, inputs: Sequence[Any], mode: str | None = None, options: Any = None
    ) -> Any:
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        # As torch.compile does for its own default backend; what the user gives goes before the
        # mode's.
        patches = {**(list_mode_options(mode) if mode else {}), **(options or {})}
        return compile_fx(graph, inputs, config_patches=patches or None)

    return inductor
