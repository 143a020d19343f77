"""The base of optimizers on kernels: states, a clock, and one kernel call for all tensors of a group.

[Note: the clock] Every parameter has its own count of updates (``step``, a 0-d fp32 CPU tensor, as
in torch), since one without a gradient is left out of a step. All of them are views of one tensor,
so that a thousand counters are advanced by one operation and read by another. A counter that a
checkpoint has put in a view's place is copied into the clock.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from ds_kernel_kit import references
from ds_kernel_kit.portions import portion_sizes
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ds_core.errors import UsageError
from ds_core.kernels import Kernels
from ds_core.partition import StepInputs
from ds_core.plugins import Plugins

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MANY = 128
"""From so many parameters on it is worth it to let the kernel begin with some while others are
prepared.
"""

_layout = attrgetter("layout")


@dataclass(slots=True)
class StepBatch:
    """Parameters of one dtype, device and count of updates."""

    owners: list[Tensor] = field(default_factory=list)
    """The parameters."""
    params: list[Tensor] = field(default_factory=list)
    """The tensors that the kernel updates: the parameters, real views of complex ones. So are
    `grads`, `states` and `copies`."""
    grads: list[Tensor] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)
    """One list per name in `KernelOptimizer.states`."""
    step: int = 0
    """The number of this update, from 1; 0 where the optimizer does not count."""
    scale: float = 1.0
    """Gradients are multiplied by it, as in `ds_core.partition.StepInputs`."""
    copies: list[Tensor] | None = None
    """16-bit tensors that get the new values; None: there are none."""

    def without(self, places: Collection[int]) -> StepBatch:
        """The batch without the parameters at these places."""
        kept = [i for i in range(len(self.owners)) if i not in set(places)]
        return replace(
            self,
            owners=[self.owners[i] for i in kept],
            params=[self.params[i] for i in kept],
            grads=[self.grads[i] for i in kept],
            states=[[tensors[i] for i in kept] for tensors in self.states],
            copies=None if self.copies is None else [self.copies[i] for i in kept],
        )


@functools.cache
def _installed_kernels() -> Kernels:
    """The table of what is installed, for optimizers that no engine has given one."""
    return Kernels(Plugins())


class KernelOptimizer(Optimizer):
    """Base: subclasses say which states they keep and update a `StepBatch`."""

    op: ClassVar[str]
    """The operation of `ds_kernel_kit` that updates."""
    states: ClassVar[tuple[str, ...]] = ()
    """Names of the states that are shaped like the parameter. They have the parameter's dtype, but
    are fp32 for 16-bit parameters unless `fp32_states` is false."""
    counts: ClassVar[bool] = False
    """Whether the update depends on its number."""
    kept: ClassVar[tuple[str, ...]] = ("_fp32_states",)
    """Attributes of its own that a copy (`copy.deepcopy`) has; all else is found anew."""
    in_portions: ClassVar[bool] = False
    """Whether `update` of this very class is nothing but calls of the kernel, so that they may overlap
    (see `_together`)."""
    scales: ClassVar[bool] = False
    """Whether `update` uses the batch's `scale` and `copies`."""

    def __init__(self, params: Any, defaults: dict[str, Any], *, fp32_states: bool = True) -> None:
        self._fp32_states = fp32_states
        self._find_anew()
        super().__init__(params, defaults)

    def _find_anew(self) -> None:
        # Kernels of the engine's run; None: of what is installed.
        self._table: Kernels | None = None
        # [Note: the clock]: one tensor, and its views by place of the parameter.
        self._clock = torch.zeros(0)
        self._ticks: list[Tensor] = []
        # Parameters by place that were found alike, see `_alike`.
        self._known: dict[int, list[Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What a copy is made of; torch's optimizers leave out all that they do not know."""
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, and of `load_state_dict`."""
        super().__setstate__(state)
        if "_table" not in self.__dict__:
            self._find_anew()

    def narrow_states(self) -> None:
        """Keep the states of 16-bit parameters in their dtype from now on; before the first
        step."""
        self._fp32_states = False

    def use_kernels(self, kernels: Kernels) -> None:
        """Use the kernels of this table (an engine's) from now on."""
        self._table = kernels

    def kernel(self, like: Tensor) -> Callable[..., Any]:
        """Who serves `op` for tensors like this (`ds_kernel_kit.references` says what it does)."""
        return (self._table or _installed_kernels()).serving(
            self.op, like, getattr(references, self.op, None)
        )

    @property
    def takes_inputs(self) -> bool:
        """Whether `step` can be given `inputs`: not where a subclass or a hook would miss gradients
        in ``.grad``.
        """
        hooked = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        hooked = hooked or _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        return not hooked and self._has_flag("scales") and inspect.unwrap(self.step) is _STEP

    def _has_flag(self, flag: str) -> bool:
        """The flag of the class that defines this object's `update`: a subclass may do more there."""
        # Classes are hashable, which mypy does not see.
        kind: Any = type(self)
        return _has_flag(kind, flag)

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, inputs: StepInputs | None = None
    ) -> Any:
        """One update of every parameter that has a gradient; `closure` as in torch.

        inputs: gradients in other dtypes than their parameters', what to multiply them by, and what
        gets the new values in 16 bits; all in the same pass. See `ds_core.partition.stepping`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inputs = _PLAIN if inputs is None else inputs
        together = self._together()
        if together is None:
            self._update_all(itertools.repeat(sys.maxsize), inputs)
        else:
            together(functools.partial(self._update_all, portion_sizes(), inputs))
        return loss

    def _together(self) -> Callable[[Callable[[], None]], None] | None:
        """A function by which the kernel begins before all tensors are prepared.

        None where the kernel has none, or it would not pay.
        """
        lists = [g["params"] for g in self.param_groups if g["params"]]
        if (
            not self._has_flag("in_portions")
            or sum(map(len, lists)) < MANY
            or torch.get_num_threads() == 1
        ):
            return None
        # The first step allocates states, which torch does on all threads: nothing to overlap with.
        if not self.state:
            return None
        return getattr(self.kernel(lists[0][0]), "together", None)

    def _update_all(self, sizes: Iterator[int], inputs: StepInputs) -> None:
        """sizes: how many parameters, at most, to prepare for each call of the kernel."""
        everything = [p for g in self.param_groups for p in g["params"]]
        states: list[dict[str, Tensor]] | None = None
        if len(self.state) == len(everything) and all(map(is_, self.state, everything)):
            # In order: no look-up per parameter, as the hash of a tensor is a call of Python.
            states = list(self.state.values())
        if self.counts and len(self._ticks) != len(everything):
            self._wind(everything)
        place = 0
        for group in self.param_groups:
            end = place + len(group["params"])
            # Portions of a group: while the kernel works on one, the next is prepared.
            while place < end:
                stop = min(place + next(sizes), end)
                known = None if states is None else states[place:stop]
                for batch in self._batches(group, everything[place:stop], known, place, inputs):
                    batch.scale = inputs.scale
                    self.update(group, batch)
                place = stop

    @abstractmethod
    def update(self, group: dict[str, Any], batch: StepBatch) -> None:
        """Update `batch` of `group` in place."""

    def states_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The names of the states that parameters of `group` have."""
        return self.states

    def begin(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The states of a parameter that is updated for the first time."""
        half = param.dtype in (torch.float16, torch.bfloat16)
        dtype = torch.float32 if half and self._fp32_states else param.dtype
        names = self.states_of(group)
        return {
            n: torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
            for n in names
        }

    def _batches(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        known: list[dict[str, Tensor]] | None,
        place: int,
        inputs: StepInputs,
    ) -> Iterator[StepBatch]:
        """Those of `params` that have gradients, by what one kernel call can take.

        See [Note: the clock].

        params: some of `group`, the first at `place` among all parameters.
        known: their states, if they all have one.
        """
        # A thousand tensors pass here in every step, most of them no longer in any cache: each
        # question costs. So all is done on lists, and by parameter only where it must be.
        # 1. Gradients; parameters without one are left out.
        places: Sequence[int] = range(place, place + len(params))
        some = slice(place, place + len(params))
        found = [p.grad for p in params] if inputs.grads is None else inputs.grads[some]
        copies = None if inputs.copies is None else inputs.copies[some]
        live = params
        grads = cast("list[Tensor]", found)
        if any(map(is_, found, itertools.repeat(None))):
            places = [i for i, grad in zip(places, found, strict=True) if grad is not None]
            live = [params[i - place] for i in places]
            grads = [grads[i - place] for i in places]
            copies = None if copies is None else [copies[i - place] for i in places]
            known = None
        if not live:
            return iter(())
        # 2. States and counts.
        states, rows = self._states_of_live(group, live, known)
        steps: Sequence[float] = self._count_steps(states, places) if self.counts else (0,)
        # 3. One batch if all have one layout, which is nearly always; otherwise sorted.
        layouts = set(map(_layout, grads))
        if layouts != {torch.strided}:
            self._refuse_sparse(live, grads)
        lacking = 0 if copies is None else sum(map(is_, copies, itertools.repeat(None)))
        if lacking in (0, len(live)) and self._alike(live, place) and len(set(steps)) == 1:
            full = None if lacking else cast("list[Tensor] | None", copies)
            return iter([StepBatch(live, live, grads, rows, int(steps[0]), copies=full)])
        columns = zip(*rows, strict=True) if rows else ([] for _ in live)
        copies = [None] * len(live) if copies is None else copies
        return self._sort_into_batches(
            live, grads, columns, steps if self.counts else [0] * len(live), copies
        )

    def _states_of_live(
        self, group: dict[str, Any], live: list[Tensor], known: list[dict[str, Tensor]] | None
    ) -> tuple[list[dict[str, Tensor]], list[list[Tensor]]]:
        """The states of these parameters, and the same as one list per name; made where missing."""
        names = self.states_of(group)
        states = [self.state[p] for p in live] if known is None else known
        # Nearly always all are there: one try for all instead of a question for each.
        try:
            rows = [[state[name] for state in states] for name in names]
        except KeyError:
            for param, state in zip(live, states, strict=True):
                if names[0] not in state:
                    state.update(self.begin(param, group))
            rows = [[state[name] for state in states] for name in names]
        return states, rows

    def _count_steps(
        self, states: list[dict[str, Tensor]], places: Sequence[int]
    ) -> Sequence[float]:
        """Advance the counts of the parameters at `places`; their new values."""
        counters = [state.get("step") for state in states]
        # A counter that a checkpoint has put in the place of ours is adopted first.
        if not all(map(is_, counters, map(self._ticks.__getitem__, places))):
            for i, state in zip(places, states, strict=True):
                if state.get("step") is not self._ticks[i]:
                    self._adopt(i, state)
        return self._tick(places)

    def _alike(self, live: list[Tensor], place: int) -> bool:
        """Whether all have one dtype and device, and are real; not asked again of the same tensors.

        Where ``param.data = ...`` has changed some since, kernels find it out: they check every
        tensor.
        """
        known = self._known.get(place, [])
        if len(known) == len(live) and all(map(is_, known, live)):
            return True
        alike = len({(p.dtype, p.device) for p in live}) == 1 and not live[0].is_complex()
        if alike:
            self._known[place] = list(live)
        return alike

    def _sort_into_batches(
        self,
        live: list[Tensor],
        grads: list[Tensor],
        states: Iterable[Sequence[Tensor]],
        steps: Sequence[float],
        copies: Sequence[Tensor | None],
    ) -> Iterator[StepBatch]:
        batches: dict[Any, StepBatch] = {}
        for param, grad, row, step, copy in zip(live, grads, states, steps, copies, strict=True):
            key = (
                param.dtype,
                param.device,
                grad.dtype,
                step,
                None if copy is None else copy.dtype,
            )
            if key not in batches:
                batches[key] = StepBatch(states=[[] for _ in row], step=int(step))
            batch = batches[key]
            # As torch: a complex number is updated as two real ones.
            real = torch.view_as_real if param.is_complex() else _itself
            batch.owners.append(param)
            batch.params.append(real(param))
            batch.grads.append(real(grad))
            for tensor, into in zip(row, batch.states, strict=True):
                into.append(real(tensor))
            if copy is not None:
                batch.copies = [] if batch.copies is None else batch.copies
                batch.copies.append(real(copy))
        return iter(batches.values())

    def _refuse_sparse(self, live: list[Tensor], grads: list[Tensor]) -> None:
        for param, grad in zip(live, grads, strict=True):
            if grad.layout is not torch.strided:
                raise UsageError(
                    f"{type(self).__name__}: a parameter of shape {tuple(param.shape)} has a "
                    "sparse gradient; use nn.Embedding(sparse=False)"
                )

    def _wind(self, params: Sequence[Tensor]) -> None:
        """Make the clock as long as there are `params`: all of them."""
        self._clock = torch.zeros(len(params), dtype=torch.float32)
        self._ticks = list(self._clock.unbind())
        for place, param in enumerate(params):
            if "step" in self.state.get(param, {}):
                self._adopt(place, self.state[param])

    def _adopt(self, place: int, state: dict[str, Any]) -> None:
        self._ticks[place].fill_(float(state.get("step", 0)))
        state["step"] = self._ticks[place]

    def _tick(self, places: Sequence[int]) -> list[float]:
        """Advance these counters; their new values."""
        # Neighbours, as a rule: one slice of the clock instead of an index.
        if places[-1] - places[0] + 1 == len(places):
            some = self._clock[places[0] : places[-1] + 1]
            some += 1
            return some.tolist()
        index = torch.tensor(places, dtype=torch.long)
        self._clock[index] += 1
        return self._clock[index].tolist()


@functools.cache
def _has_flag(kind: type, flag: str) -> bool:
    # Asked twice in every step.
    return bool(vars(next(cls for cls in kind.__mro__ if "update" in vars(cls))).get(flag))


_PLAIN = StepInputs()
_STEP = inspect.unwrap(KernelOptimizer.step)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def require_cpu(optimizer: Optimizer) -> None:
    """For classes whose name says where they work (UsageError otherwise)."""
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param.device.type != "cpu":
                raise UsageError(
                    f"{type(optimizer).__name__} updates parameters on the CPU, but one of shape "
                    f"{tuple(param.shape)} in group {index} is on {param.device}; offload it "
                    "(zero_optimization.offload_optimizer), or use the optimizer's plain name, "
                    "which takes the best kernel for where parameters are"
                )


def check_common(
    *, lr: float, eps: float = 0.0, betas: Sequence[float] = (), weight_decay: float = 0.0
) -> None:
    """Refuse numbers that no optimizer can mean (ValueError)."""
    if lr < 0 or eps < 0 or weight_decay < 0:
        raise ValueError(f"lr {lr}, eps {eps} and weight_decay {weight_decay} must not be negative")
    if betas and (len(betas) != 2 or not all(0 <= b < 1 for b in betas)):
        raise ValueError(f"betas {tuple(betas)}: two numbers in [0, 1)")
