"""``engine.compile``: which modules are compiled, how, and when their passes change.

[Note: outside of the graph] A compiled module keeps its hooks outside: they gather weights, cut
inputs and follow phases, and torch.compile would end a graph at each of them. So the module's call
runs its hooks as ever, and only its `forward` is compiled. Where weights are sharded, the
partitioner gathers all of a compiled module's at its begin.

[Note: blocks] Where ranks share gradients, blocks are compiled and not the whole model: one
compiled backward of the whole model gives all gradients at its end, so no reduction could run
beside it. A block is compiled once for all of its kind, which also takes less time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state.blocks import GathersWhole, chosen, repeated_blocks
from torch import nn

from ds_compile.config import CompileConfig
from ds_compile.passes import GraphPass, Passes, backend_with, make_passes
from ds_core.context import StashKey
from ds_core.errors import UsageError
from ds_core.process import log_once

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.engine import Engine

log = logging.getLogger("ds_compile")

Backend = str | Callable[..., Any]
Schedule = Iterable[tuple[int, Iterable["str | GraphPass"]]]

COMPILED: StashKey[Compiled] = StashKey("dscore-compile what is compiled")


class CompiledCall:
    """Stands in the place where torch keeps a module's compiled call, see [Note: outside of the
    graph].
    """

    def __init__(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        self._module = module
        self._forward = torch.compile(module.forward, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled forward, called in the place of the module's own."""
        # torch calls this in the place of the module's call, so the hooks are ours to run; inside,
        # `forward` is the compiled one. What stood there, such as another plugin's stand-in, comes
        # back.
        own = self._module.__dict__
        outer = own.get("forward")
        own["forward"] = self._forward
        try:
            return self._module._call_impl(*args, **kwargs)
        finally:
            if outer is None:
                del own["forward"]
            else:
                own["forward"] = outer


@dataclass
class Compiled:
    """What `compile_model` has compiled: modules by name, and with which arguments; steps that
    change the passes.
    """

    modules: Mapping[str, nn.Module]
    backend: Backend
    options: Mapping[str, Any]
    schedule: dict[int, Passes] = field(default_factory=dict)

    def use(self, passes: Passes) -> None:
        """Compile the modules anew, when they run next."""
        if passes.whole and list(self.modules) != [""]:
            raise UsageError(
                f"the passes {', '.join(passes.whole)} need the graph of the whole model; remove "
                "compile.modules, and "
                "put them into the first entry of the schedule"
            )
        options = {**self.options, "backend": self.backend}
        if passes.passes or passes.shown:
            options["backend"] = backend_with(passes, self.backend)
        if passes.whole:
            options["fullgraph"] = True
        for module in self.modules.values():
            # The compiled forward must be made of the module's own, not of a compiled call.
            module._compiled_call_impl = None
            module._compiled_call_impl = CompiledCall(module, options)


def compile_model(
    engine: Engine,
    backend: Backend = "inductor",
    compile_kwargs: Mapping[str, Any] | None = None,
    schedule: Schedule | None = None,
    compiled_autograd_enabled: bool = False,
) -> None:
    """Compile the model with torch.compile, in place; `engine.compile` calls it.

    backend, compile_kwargs: what torch.compile takes.
    schedule: ``(step, passes)`` pairs, from which step on which passes run, by name or as
        functions; None: those of ``compile.passes`` from the start.

    Every rank calls it.
    """
    if compiled_autograd_enabled:
        raise UsageError(
            "compile(compiled_autograd_enabled=True) is not supported: gradients are taken over "
            "and reduced by hooks "
            "while backward runs, which a compiled backward would run at its end; leave it out"
        )
    ctx = engine.ctx
    section = engine.config.section(CompileConfig) or CompileConfig()
    if schedule is not None and not section.deepcompile:
        raise UsageError(
            'compile(schedule=...) needs "compile": {"deepcompile": true} in the config'
        )
    # The entry of step 0 is what is compiled now; later ones wait in `after_step`.
    steps = {int(step): tuple(passes) for step, passes in schedule} if schedule is not None else {}
    wanted = steps.pop(0, section.passes or ())
    passes = make_passes(ctx, wanted, shown := section.debug_log and ctx.rank == 0)
    later = {step: make_passes(ctx, names, shown) for step, names in steps.items()}
    options = dict(compile_kwargs or {})
    partitioner = engine.partitioner
    gathers = partitioner.releases_weights and isinstance(partitioner, GathersWhole)
    if gathers:
        _refuse_graphs_of_the_device(options)
    modules = _modules(ctx, engine.module, section, bool(passes.whole), gathers)
    # Inside a compiled graph no hook could gather the weights of a module.
    if gathers and isinstance(partitioner, GathersWhole):
        for module in modules.values():
            partitioner.gather_whole(module)
    compiled = ctx.stash[COMPILED] = Compiled(modules, backend, options, later)
    compiled.use(passes)
    # torch keeps compiled code with functions, for the process: a later engine of the same classes,
    # divided in another way, was once given code of this one.
    ctx.undo(torch.compiler.reset)
    names = [name or type(engine.module).__name__ for name in modules]
    shown_names = ", ".join(names[:3]) + (f" ... {names[-1]}" if len(names) > 3 else "")
    log_once(
        log, logging.INFO, f"compile: {len(modules)} modules, each as one graph: {shown_names}"
    )


def _modules(
    ctx: Context, model: nn.Module, section: CompileConfig, whole: bool, gathers: bool
) -> Mapping[str, nn.Module]:
    """What is compiled, by name; see [Note: blocks]."""
    if section.modules is not None:
        return chosen(model, section.modules, "compile.modules")
    blocks = repeated_blocks(model) if not whole and (gathers or ctx.mesh.size("dp") > 1) else {}
    if not blocks and gathers:
        log_once(
            log,
            logging.WARNING,
            "compile: all weights are gathered while the model runs, since it is compiled as a "
            "whole" + ("" if whole else "; name its large modules in compile.modules"),
        )
    return blocks or {"": model}


def _refuse_graphs_of_the_device(options: Mapping[str, Any]) -> None:
    """CUDA graphs replay fixed addresses, and gathered weights lie elsewhere each time."""
    given = options.get("options") or {}
    if options.get("mode") in ("reduce-overhead", "max-autotune") or given.get("triton.cudagraphs"):
        raise UsageError(
            "compile: CUDA graphs need weights at fixed addresses, and sharded weights are "
            "gathered elsewhere each "
            'time; use mode "default" or "max-autotune-no-cudagraphs"'
        )


def after_step(ctx: Context, step: int) -> None:
    """A step is done: say once that nothing is compiled, or begin what the schedule has for the
    next one.
    """
    compiled = ctx.stash.get(COMPILED)
    section = ctx.config.section(CompileConfig)
    if compiled is None:
        if section is not None and section.deepcompile and step == 0:
            log.warning(
                "compile.deepcompile is set, but nothing is compiled: call engine.compile() before "
                "training"
            )
    elif (passes := compiled.schedule.pop(step + 1, None)) is not None:
        compiled.use(passes)
