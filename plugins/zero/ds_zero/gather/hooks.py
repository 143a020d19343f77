"""Module hooks of stage 3: they report to `GatherScheduler` which module runs.

In forward and in backward.

[Note: parameters used elsewhere] A parameter that a running module reads from another one
(``self.emb.weight`` in the forward of a parent) is gathered at that moment. From then on the
running module gathers it with its own parameters. For this the modules' parameter dicts are
replaced by dicts that notice reads, until `GatherHooks.remove`.

[Note: compiled modules] The hooks wait for collectives and change what parameters hold, so
torch.compile must not trace into them: a graph ends at each module that gathers, and the next one
begins with unsharded weights. So what is compiled is gathered as a whole
(`GatherHooks.gather_whole`): below such a module there are no hooks, and reads go unnoticed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ds_zero.gather.external import externals
from ds_zero.gather.nested_tensors import tensors_of
from ds_zero.gather.scheduler import GatherScheduler
from ds_zero.gather.unit import BucketUnit, UnitState

if TYPE_CHECKING:
    from ds_zero.gather.grouping import Gatherer

log = logging.getLogger("ds_zero")


class _ObservedParams(dict[str, Any]):
    """A module's parameters by name, with a callback that is called when one is read."""

    def __init__(self, given: Mapping[str, Any], read: Callable[[nn.Parameter], None]) -> None:
        super().__init__(given)
        self._on_read = read

    def __getitem__(self, name: str) -> Any:
        # `nn.Module.__getattr__` reads parameters by this method, `parameters()` and other walks
        # over the modules by `items()`: those use no weights.
        param = super().__getitem__(name)
        if param is not None:
            self._on_read(param)
        return param

    def __reduce__(self) -> Any:  # copies of a module, by copy or pickle, have a plain dict
        return dict, (dict(self),)


class GatherHooks:
    """The gather hooks of one engine.

    modules: those that gather parameters.
    unit_of: the unit of each sharded parameter.
    backward_began: called when the first hook of a backward runs.
    """

    def __init__(
        self,
        root: nn.Module,
        modules: Sequence[Gatherer],
        gathering: GatherScheduler,
        unit_of: Mapping[nn.Parameter, BucketUnit],
        backward_began: Callable[[], None],
    ) -> None:
        self._root = root
        self._gathering = gathering
        self._unit_of = unit_of
        self._backward_began = backward_began

        # -- What each module gathers.

        # The units of each hooked module, which grow with the parameters it is seen to use.
        self._units = {g.module: list(dict.fromkeys(unit_of[p] for p in g.params)) for g in modules}
        # The leaf that gathers for a module: itself, or one above it.
        self._below = {m: g.module for g in modules if g.leaf for m in g.module.modules()}
        # Traced by torch.compile, see [Note: compiled modules].
        self._traced: set[nn.Module] = set()
        # Names for messages.
        self._names = {g.module: g.name for g in modules}

        # -- Changes of the model.

        # Whether a module or parameter was registered anywhere since the last forward.
        self._changed = False
        # The parameters that were there, or that the user was warned of.
        self._known = set(root.parameters())

        # -- What runs.

        # The modules whose forward runs, outermost first, and what each uses.
        self._stack: list[tuple[nn.Module, list[BucketUnit]]] = []
        # The last module that backward has reached.
        self._in_backward_of: nn.Module | None = None

        # -- The hooks, which torch.compile must not trace: see [Note: compiled modules].

        self._pre_forward = torch.compiler.disable(self._enter)
        self._post_forward = torch.compiler.disable(self._leave)
        self._pre_root_forward = torch.compiler.disable(self._hook_added)
        self._read_elsewhere = torch.compiler.disable(self._use_elsewhere)
        # To be removed by `remove`: torch's handles, and the modules with an `_ObservedParams`.
        self._hooks: list[Any] = []
        self._owners: list[nn.Module] = []
        self.install()
        for module in root.modules():
            for param in externals(module):
                self.add_external(module, param)

    def install(self) -> None:
        """Install the hooks (again, after `remove`)."""
        for module in self._units:
            self._hook(module)
        for module in self._root.modules():
            self._observe(module)
        # Torch has no hook of one model for what is added to it, so these see every module's.
        if self._unit_of:
            self._hooks.append(register_module_module_registration_hook(self._note_change))
            self._hooks.append(register_module_parameter_registration_hook(self._note_change))
            self._hooks.append(
                self._root.register_forward_pre_hook(self._pre_root_forward, prepend=True)
            )

    def _hook(self, module: nn.Module) -> None:
        # Before the user's hooks, which may read weights; after an exception too, or the module
        # would count as running for ever.
        self._hooks.append(
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
        )
        self._hooks.append(
            module.register_forward_hook(self._post_forward, with_kwargs=True, always_call=True)
        )

    def _observe(self, module: nn.Module) -> None:
        mine = any(p in self._unit_of for p in module._parameters.values() if p is not None)
        if (
            mine
            and module not in self._traced
            and not isinstance(module._parameters, _ObservedParams)
        ):
            module._parameters = _ObservedParams(module._parameters, self._on_read)
            self._owners.append(module)

    # -- changes after initialize ------------------------------------------------------------------

    def gather_whole(self, module: nn.Module) -> None:
        """From now on `module` gathers all units below it, and nothing below it has hooks."""
        units = [self._unit_of[p] for p in module.parameters() if p in self._unit_of]
        # All hooks are installed anew: those below `module`, and dicts that notice reads, must go.
        self.remove()
        for below in module.modules():
            self._units.pop(below, None)
            self._below[below] = module
        self._traced.update(module.modules())
        self._units[module] = list(dict.fromkeys(units))
        self._names.setdefault(
            module, next(n for n, m in self._root.named_modules() if m is module)
        )
        self.install()

    def _add(self, module: nn.Module, unit: BucketUnit) -> None:
        """Make `module`, or the leaf above it, gather `unit` too."""
        module = self._below.get(module, module)
        if module not in self._units:
            self._units[module] = []
            self._hook(module)
        if unit not in self._units[module]:
            self._units[module].append(unit)

    def add_external(self, module: nn.Module, param: nn.Parameter) -> None:
        """See `WeightOwner.add_external`."""
        if (unit := self._unit_of.get(param)) is not None:
            self._add(module, unit)

    def remove_external(self, module: nn.Module, param: nn.Parameter) -> None:
        """See `WeightOwner.remove_external`."""
        unit = self._unit_of.get(param)
        # Another parameter of the same unit may be registered with it, or be its own.
        others = (*externals(module), *module.parameters(recurse=False))
        needed = any(self._unit_of.get(p) is unit for p in others)
        if unit is not None and not needed and module not in self._below:
            self._units[module].remove(unit)

    def _note_change(self, module: nn.Module, name: str, added: Any) -> None:
        # Anywhere in the process; the next forward checks whether it is in this model.
        self._changed = True

    def _hook_added(self, root: nn.Module, args: Any) -> None:
        """If a module or parameter was added: hook modules that have parameters of a unit."""
        if not self._changed:
            return
        self._changed = False
        # A module that was added may have taken over a sharded weight (adapters do so): it has to
        # gather it. A parameter that is new altogether is in no bucket and no optimizer.
        untrained = []
        for name, module in root.named_modules():
            for key, param in module._parameters.items():
                if param is None:
                    continue
                if (unit := self._unit_of.get(param)) is not None:
                    self._observe(module)
                    self._add(module, unit)
                elif param.requires_grad and param not in self._known:
                    untrained.append(f"{name}.{key}" if name else key)
        if untrained:
            more = f" and {len(untrained) - 5} more" if len(untrained) > 5 else ""
            log.warning(
                "parameters added to the model after initialize are not trained, and each rank has "
                "its own: %s%s; add modules before initialize to train them",
                ", ".join(untrained[:5]),
                more,
            )
            self._known.update(root.parameters())

    def activity(self) -> tuple[str, int, tuple[str, ...], tuple[str, ...]]:
        """What runs now, how many passes have ended, and the modules of the last two passes.

        First those of this pass, then those of the one before.
        """
        # Called by another thread, so the stack is copied before it is looked at.
        gathering = self._gathering
        running = [module for module, _ in list(self._stack)]
        text = f"in forward of module {self._names[running[-1]]!r}" if running else ""
        if gathering.in_backward and self._in_backward_of is not None:
            text = f"in backward of module {self._names[self._in_backward_of]!r}"
        return text, gathering.passes, *gathering.trails()

    # -- forward -----------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        gathering = self._gathering
        # The outermost module begins a pass, unless it is recomputed in a backward (activation
        # checkpointing). Autograd has no task on this thread when no backward runs.
        if not self._stack:
            if gathering.in_backward and torch._C._current_graph_task_id() == -1:
                gathering.end_pass()  # that backward has failed
            if not gathering.in_backward:
                gathering.open()
        # A copy: what it uses in this forward may grow, see `_use_elsewhere`.
        units = list(self._units[module])
        self._stack.append((module, units))
        for unit in units:
            unit.uses.forward += 1
            gathering.fetch(unit)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not any(m is module for m, _ in self._stack):
            return  # it failed before it was entered
        # Modules inside that an exception left have not been popped: their uses end too.
        while True:
            left, units = self._stack.pop()
            if left is module:
                break
            self._end_use(units)
        # The order matters: what the module returns is given to the module around it before its own
        # use ends, or it would be released in between.
        if torch.is_grad_enabled() and units:
            self._expect_backward(module, (args, kwargs), output)
        self._note_returned(output, units)
        self._end_use(units)
        if not self._stack and not self._gathering.in_backward:
            self._gathering.close()

    def _end_use(self, units: Sequence[BucketUnit]) -> None:
        for unit in units:
            unit.uses.forward -= 1
            # In backward this forward was a recomputation, and its backward comes next;
            # `on_gradient` releases.
            if not self._gathering.in_backward:
                self._gathering.drop(unit)
            elif torch.is_grad_enabled():
                unit.uses.backward = True

    def _note_returned(self, output: Any, units: Sequence[BucketUnit]) -> None:
        """A module returns one of its parameters: the module around it will use it."""
        for tensor in tensors_of(output):
            unit = self._unit_of.get(tensor) if isinstance(tensor, nn.Parameter) else None
            if unit is not None and unit in units:
                self._use_elsewhere(unit)

    def _on_read(self, param: nn.Parameter) -> None:
        # The common case, a module that reads its own parameter, must be fast: its unit has a use.
        unit = self._unit_of.get(param)
        if unit is not None and self._stack and not unit.uses.forward:
            self._read_elsewhere(unit)

    def _use_elsewhere(self, unit: BucketUnit) -> None:
        """The running module uses a unit of another module: gather it with its own from now on."""
        # The outermost module returned it: nothing shows when its caller has done with it.
        if not self._stack:
            unit.uses.rest_of_pass = True
            return
        module, units = self._stack[-1]
        if unit in units:
            return
        # In this forward, and in the next ones and in backward, where it is gathered before.
        units.append(unit)
        if unit not in self._units[module]:
            self._units[module].append(unit)
        unit.uses.forward += 1
        self._gathering.fetch(unit)

    # -- backward ----------------------------------------------------------------------------------

    def _expect_backward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Register the hooks that gather the units when backward reaches `module`."""
        units = self._units[module]
        outputs = [t for t in tensors_of(output) if t.requires_grad]
        if not outputs:
            # It may hide tensors, so no hook shows when backward reaches this module.
            if not _is_searched(output):
                for unit in units:
                    unit.uses.rest_of_pass |= unit.bucket.trainable
            return
        # The gradient of any output comes before autograd computes anything of the module.
        register_multi_grad_hook(
            outputs, functools.partial(self._before_backward, module), mode="any"
        )
        # Where `on_gradient` does not show the end of a unit, the gradients of the inputs show it.
        if not all(unit.by_gradients for unit in units):
            before = [t for t in tensors_of(inputs) if t.requires_grad]
            if before:
                register_multi_grad_hook(before, functools.partial(self._after_backward, module))

    def _before_backward(self, module: nn.Module, grad: Any) -> None:
        gathering = self._gathering
        if not gathering.in_backward:
            gathering.in_backward = True
            self._backward_began()
        self._in_backward_of = module
        # Grad mode is on in a backward with create_graph only, see [Note: double backward] of
        # `scheduler`.
        create_graph = torch.is_grad_enabled()
        gathering.kept_graph |= create_graph
        for unit in self._units[module]:
            unit.uses.backward = True
            unit.uses.rest_of_pass |= create_graph
            gathering.fetch(unit)

    def _after_backward(self, module: nn.Module, grads: Any) -> None:
        """All gradients of the inputs are computed: frozen parameters are not needed any more."""
        for unit in self._units[module]:
            if not unit.by_gradients:
                self._end_backward_use(unit)

    def on_gradient(self, param: nn.Parameter) -> None:
        """A parameter has its gradient.

        Once all of a unit have, this backward does not need the unit any more.
        """
        unit = self._unit_of.get(param)
        if unit is None:
            return
        unit.arrived.add(param)
        if not unit.leaf and len(unit.arrived) == len(unit.bucket.params):
            self._end_backward_use(unit)

    def _end_backward_use(self, unit: BucketUnit) -> None:
        unit.uses.backward = False
        unit.arrived.clear()
        # It may have been released already, as when the pass has ended.
        if unit.state is UnitState.UNSHARDED:
            self._gathering.drop(unit)

    @property
    def running(self) -> bool:
        """Whether the forward of a hooked module is running."""
        return bool(self._stack)

    def end(self) -> None:
        """Forget running modules, after backward."""
        self._stack.clear()

    def remove(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        # With plain dicts, modules are as they were before `initialize`.
        for module in self._owners:
            module._parameters = dict(module._parameters)
        self._owners.clear()


def _is_searched(output: Any) -> bool:
    """Whether `tensors_of` finds all tensors in an output of this type."""
    return (
        isinstance(output, (Tensor, list, tuple, set, Mapping, int, float, str, bool))
        or output is None
    )
