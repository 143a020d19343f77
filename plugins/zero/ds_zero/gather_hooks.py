"""Hooks on modules, which tell `Gathering` what runs: before and after forward, before and after backward.

[Note: parameters used elsewhere] While a watched module runs, a parameter that is read from another module
(``self.emb.weight`` in the forward of a parent) is gathered on the spot, for the module that runs; from then on that
module gathers it with its own. For this the modules' parameter dicts are replaced by dicts that see reads,
until `Watch.remove`.

[Note: compiled modules] The hooks wait for collectives and change what parameters hold, so torch.compile must not look
into them: a graph ends at each module that gathers, and the next begins with whole weights.
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

from ds_core import comm
from ds_core.nested import tensors_of
from ds_zero.gather import Gathering, State, Unit

if TYPE_CHECKING:
    from ds_zero.units import Gatherer

__all__ = ["Watch"]


log = logging.getLogger("ds_zero")


class _SeenParams(dict[str, Any]):
    """A module's parameters by name; tells when one is read."""

    def __init__(self, given: Mapping[str, Any], read: Callable[[nn.Parameter], None]) -> None:
        super().__init__(given)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if param is not None:
            self._read(param)
        return param

    def __reduce__(self) -> Any:  # copies of a module, by copy or pickle, are not watched
        return dict, (dict(self),)


class Watch:
    """The hooks of one engine.

    backward_began: called when the first hook of a backward runs.
    """

    def __init__(
        self,
        root: nn.Module,
        modules: Sequence[Gatherer],
        gathering: Gathering,
        unit_of: Mapping[nn.Parameter, Unit],
        backward_began: Callable[[], None],
    ) -> None:
        self._root, self._gathering, self._unit_of, self._backward_began = root, gathering, unit_of, backward_began
        self._units = {g.module: list(dict.fromkeys(unit_of[p] for p in g.params)) for g in modules}
        self._below = {m: g.module for g in modules if g.leaf for m in g.module.modules()}  # a module: the leaf above
        self._known = set(root.parameters())
        self._registered: dict[nn.Module, list[Unit]] = {}
        self._changed = False
        self._stack: list[tuple[nn.Module, list[Unit]]] = []
        self._names = {g.module: g.name for g in modules}
        self._behind: nn.Module | None = None  # the last module that backward came to
        comm.register_activity(self.activity)
        # See [Note: compiled modules].
        self._entered, self._left = torch.compiler.disable(self._enter), torch.compiler.disable(self._leave)
        self._begun, self._lent = torch.compiler.disable(self._look_again), torch.compiler.disable(self._use_elsewhere)
        self._hooks: list[Any] = []
        self._owners: list[nn.Module] = []
        self.install()

    def install(self) -> None:
        """Put the hooks in their places (again, after `remove`)."""
        for module in self._units:
            self._watch(module)
        for module in self._root.modules():
            self._see(module)
        if self._unit_of:
            self._hooks.append(register_module_module_registration_hook(self._note_change))
            self._hooks.append(register_module_parameter_registration_hook(self._note_change))
            self._hooks.append(self._root.register_forward_pre_hook(self._begun, prepend=True))

    def _watch(self, module: nn.Module) -> None:
        self._hooks.append(module.register_forward_pre_hook(self._entered, prepend=True, with_kwargs=True))
        self._hooks.append(module.register_forward_hook(self._left, with_kwargs=True, always_call=True))

    def _see(self, module: nn.Module) -> None:
        mine = any(p in self._unit_of for p in module._parameters.values() if p is not None)
        if mine and not isinstance(module._parameters, _SeenParams):
            module._parameters = _SeenParams(module._parameters, self._on_read)
            self._owners.append(module)

    # -- changes after initialize ----------------------------------------------------------------------------

    def _add(self, module: nn.Module, unit: Unit) -> None:
        """`module`, or the leaf above it, gathers `unit` too."""
        module = self._below.get(module, module)
        if module not in self._units:
            self._units[module] = []
            self._watch(module)
        if unit not in self._units[module]:
            self._units[module].append(unit)

    def add_external(self, module: nn.Module, param: nn.Parameter) -> None:
        """`module` uses `param`, which another module owns."""
        if (unit := self._unit_of.get(param)) is not None:
            self._registered.setdefault(module, []).append(unit)
            self._add(module, unit)

    def remove_external(self, module: nn.Module, param: nn.Parameter) -> None:
        """The reverse of `add_external`."""
        unit, left = self._unit_of.get(param), self._registered.get(module, [])
        if unit not in left:
            return
        left.remove(unit)
        own = any(self._unit_of.get(p) is unit for p in module.parameters(recurse=False))
        if unit not in left and not own and module not in self._below:
            self._units[module].remove(unit)

    def _note_change(self, module: nn.Module, name: str, added: Any) -> None:
        self._changed = True  # anywhere in the process; whether it is ours is seen before the next forward

    def _look_again(self, root: nn.Module, args: Any) -> None:
        """Modules and parameters were added somewhere: watch those that hold weights of ours."""
        if not self._changed:
            return
        self._changed = False
        strangers = []
        for name, module in root.named_modules():
            for key, param in module._parameters.items():
                if param is None:
                    continue
                if (unit := self._unit_of.get(param)) is not None:
                    self._see(module)
                    self._add(module, unit)
                elif param.requires_grad and param not in self._known:
                    strangers.append(f"{name}.{key}" if name else key)
        if strangers:
            more = f" and {len(strangers) - 5} more" if len(strangers) > 5 else ""
            log.warning(
                "%s%s came into the model after initialize: they are used as they are on each rank, and not trained; "
                "add modules before initialize to train them",
                ", ".join(strangers[:5]),
                more,
            )
            self._known.update(root.parameters())

    def activity(self) -> comm.Activity:
        """What runs now, for messages; asked from another thread."""
        gathering = self._gathering
        running = [module for module, _ in list(self._stack)]
        text = f"in forward of module {self._names[running[-1]]!r}" if running else ""
        if gathering.in_backward and self._behind is not None:
            text = f"in backward of module {self._names[self._behind]!r}"
        return comm.Activity(text, gathering.passes, gathering.trail())

    # -- forward ---------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        gathering = self._gathering
        if not self._stack:
            if gathering.in_backward and torch._C._current_graph_task_id() == -1:
                gathering.end_pass()  # that backward failed half-way
            if not gathering.in_backward:
                gathering.open()
        units = list(self._units[module])
        self._stack.append((module, units))
        for unit in units:
            unit.holders += 1
            gathering.fetch(unit)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not any(m is module for m, _ in self._stack):
            return  # it failed before it was entered
        while True:  # modules that an exception left
            left, units = self._stack.pop()
            if left is module:
                break
            self._let_go(units)
        if torch.is_grad_enabled() and units:
            self._expect_backward(module, (args, kwargs), output)
        self._hand_on(output, units)
        self._let_go(units)
        if not self._stack and not self._gathering.in_backward:
            self._gathering.close()

    def _let_go(self, units: Sequence[Unit]) -> None:
        for unit in units:
            unit.holders -= 1
            # In backward a forward is recomputed, and its backward comes next; `_on_gradient` releases.
            if not self._gathering.in_backward:
                self._gathering.drop(unit)
            elif torch.is_grad_enabled():
                unit.wanted = True

    def _hand_on(self, output: Any, units: Sequence[Unit]) -> None:
        """A module that returns one of its parameters: the module around it will use it."""
        for tensor in tensors_of(output):
            unit = self._unit_of.get(tensor) if isinstance(tensor, nn.Parameter) else None
            if unit is not None and unit in units:
                self._use_elsewhere(unit)

    def _on_read(self, param: nn.Parameter) -> None:
        unit = self._unit_of.get(param)
        if unit is not None and self._stack and unit.holders == 0:
            self._lent(unit)

    def _use_elsewhere(self, unit: Unit) -> None:
        """The running module uses a unit of another: gather it with its own, from now on."""
        if not self._stack:
            unit.pinned = True  # the caller of the model has it; until this pass ends
            return
        module, units = self._stack[-1]
        if unit in units:
            return
        units.append(unit)
        if unit not in self._units[module]:
            self._units[module].append(unit)
        unit.holders += 1
        self._gathering.fetch(unit)

    # -- backward --------------------------------------------------------------------------------------------

    def _expect_backward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Arrange for the units to be whole when backward comes to `module`."""
        units = self._units[module]
        outputs = [t for t in tensors_of(output) if t.requires_grad]
        if not outputs:
            for unit in units:  # its output is hidden from us, so nothing tells when backward comes
                unit.pinned |= bool(output is not None and unit.bucket.trainable and not _plain(output))
            return
        register_multi_grad_hook(outputs, functools.partial(self._before_backward, module), mode="any")
        if any(not p.requires_grad for u in units for p in u.bucket.params) or any(u.leaf for u in units):
            before = [t for t in tensors_of(inputs) if t.requires_grad]
            if before:
                register_multi_grad_hook(before, functools.partial(self._after_backward, module))

    def _before_backward(self, module: nn.Module, grad: Any) -> None:
        gathering = self._gathering
        if not gathering.in_backward:
            gathering.in_backward = True
            self._backward_began()
        self._behind = module
        again = torch.is_grad_enabled()  # with create_graph: what this backward computes may be differentiated, too
        gathering.kept_graph |= again
        for unit in self._units[module]:
            unit.wanted = True
            unit.pinned |= again
            gathering.fetch(unit)

    def _after_backward(self, module: nn.Module, grads: Any) -> None:
        """All gradients of the inputs are there: what is frozen is not needed any more."""
        for unit in self._units[module]:
            if unit.leaf or not all(p.requires_grad for p in unit.bucket.params):
                self._through(unit)

    def on_gradient(self, param: nn.Parameter) -> None:
        """A parameter has its gradient; a unit of which all have is not needed any more in this backward."""
        unit = self._unit_of.get(param)
        if unit is None:
            return
        unit.arrived.add(param)
        if not unit.leaf and len(unit.arrived) == len(unit.bucket.params):
            self._through(unit)

    def _through(self, unit: Unit) -> None:
        unit.wanted = False
        unit.arrived.clear()
        if unit.state is State.WHOLE:
            self._gathering.drop(unit)

    @property
    def running(self) -> bool:
        """Whether a watched module's forward is under way."""
        return bool(self._stack)

    def end(self) -> None:
        """Nothing runs any more."""
        self._stack.clear()

    def remove(self) -> None:
        """Take all hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for module in self._owners:
            module._parameters = dict(module._parameters)
        self._owners.clear()


def _plain(output: Any) -> bool:
    """Whether the output is of kinds that `tensors_of` sees into."""
    return isinstance(output, (Tensor, list, tuple, set, Mapping, int, float, str, bool)) or output is None
