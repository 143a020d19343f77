"""What the optimizers on kernels share: states, a clock, and one call for all tensors of a group
that are alike.

[Note: the clock] Every parameter has its own count of updates (``step``, a 0-d fp32 CPU tensor, as
in torch), since one without a gradient is left out of a step. All of them are views of one tensor,
so that a thousand counters are advanced by one operation and read by another. A counter that a
checkpoint has put in a view's place is taken over.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from ds_core.plugins import Plugins
from ds_core.stepping import StepInputs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MANY = 128
"""From so many parameters on it is worth it to let the kernel begin with some while others are
prepared.
"""

_layout = attrgetter("layout")


@dataclass(slots=True)
class StepBatch:
    """Parameters of one dtype, device and count of updates. states: one list per name in
    `KernelOptimizer.states`.

    owners: the parameters; params: what is updated of them: for complex ones real views, as are
        grads and states then.
    scale, copies: as in `ds_core.stepping.StepInputs`, for the kernel; copies None: there are none.
    """

    owners: list[Tensor] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)
    step: int = 0
    scale: float = 1.0
    copies: list[Tensor] | None = None


@functools.cache
def _installed() -> Kernels:
    """The table of what is installed, for optimizers that no engine has given one."""
    return Kernels(Plugins())


class KernelOptimizer(Optimizer):
    """Base: subclasses say which states they keep and update a `StepBatch`.

    states: names of those that are shaped like the parameter. They have the parameter's dtype, but
    are fp32 for 16-bit parameters unless `fp32_states` is false. counts: whether the update depends
    on its number. kept: attributes of its own that a copy (`copy.deepcopy`) is to have; all else is
    found anew. in_portions: whether `update` of this very class is nothing but calls of the kernel,
    so that they may overlap (see `_together`). scales: whether it heeds the batch's `scale` and
    `copies`.
    """

    op: ClassVar[str]
    states: ClassVar[tuple[str, ...]] = ()
    counts: ClassVar[bool] = False
    kept: ClassVar[tuple[str, ...]] = ("_fp32_states",)
    in_portions: ClassVar[bool] = False
    scales: ClassVar[bool] = False

    def __init__(self, params: Any, defaults: dict[str, Any], *, fp32_states: bool = True) -> None:
        self._fp32_states = fp32_states
        self._find_anew()
        super().__init__(params, defaults)

    def _find_anew(self) -> None:
        self._table: Kernels | None = None
        self._clock = torch.zeros(0)
        self._ticks: list[Tensor] = []
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
        """Take kernels from this table (an engine's) from now on."""
        self._table = kernels

    def kernel(self, like: Tensor) -> Callable[..., Any]:
        """Who serves `op` for tensors like this (`ds_kernel_kit.references` says what it does)."""
        return (self._table or _installed()).serving(
            self.op, like, getattr(references, self.op, None)
        )

    @property
    def takes_inputs(self) -> bool:
        """Whether `step` can be given `inputs`: not where a subclass or a hook would miss gradients
        in ``.grad``.
        """
        hooked = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        hooked = hooked or _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        return not hooked and self._says("scales") and inspect.unwrap(self.step) is _STEP

    def _says(self, flag: str) -> bool:
        """What the class says that has this object's `update`: a subclass may do more there."""
        kind: Any = type(self)  # classes are hashable, which mypy does not see
        return _says(kind, flag)

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, inputs: StepInputs | None = None
    ) -> Any:
        """One update of every parameter that has a gradient; `closure` as in torch.

        inputs: gradients in other dtypes than their parameters', what to multiply them by, and what
        gets the new values in 16 bits; all in the same pass. See `ds_core.stepping`.
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
        """What lets the kernel begin before all tensors are prepared; None where it has none, or it
        would not pay.
        """
        lists = [g["params"] for g in self.param_groups if g["params"]]
        if (
            not self._says("in_portions")
            or sum(map(len, lists)) < MANY
            or torch.get_num_threads() == 1
        ):
            return None
        if not self.state:  # the first step makes them, which torch does on all threads
            return None
        return getattr(self.kernel(lists[0][0]), "together", None)

    def _update_all(self, sizes: Iterator[int], inputs: StepInputs) -> None:
        """sizes: how many parameters, at most, to prepare for each call of the kernel."""
        everything = [p for g in self.param_groups for p in g["params"]]
        states: list[dict[str, Tensor]] | None = None
        if len(self.state) == len(everything) and all(map(is_, self.state, everything)):
            states = list(self.state.values())  # the hash of a tensor is a call of Python
        if self.counts and len(self._ticks) != len(everything):
            self._wind(everything)
        place = 0
        for group in self.param_groups:
            end = place + len(group["params"])
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
        """Those of `params` that have gradients, by what one kernel call can take. See [Note: the
        clock].

        params: some of `group`, the first at `place` among all parameters. known: their states, if
        they all have one.
        """
        names = self.states_of(group)
        # A thousand tensors pass here in every step, most of them no longer in any cache: each
        # question costs.
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
        states = [self.state[p] for p in live] if known is None else known
        try:
            rows = [[state[name] for state in states] for name in names]
        except KeyError:
            for param, state in zip(live, states, strict=True):
                if names[0] not in state:
                    state.update(self.begin(param, group))
            rows = [[state[name] for state in states] for name in names]
        steps: Sequence[float] = (0,)
        if self.counts:
            if not all(
                map(
                    is_,
                    [state.get("step") for state in states],
                    map(self._ticks.__getitem__, places),
                )
            ):
                for i, state in zip(places, states, strict=True):
                    if state.get("step") is not self._ticks[i]:
                        self._adopt(i, state)
            steps = self._tick(places)
        layouts = set(map(_layout, grads))
        if layouts != {torch.strided}:
            self._refuse_sparse(live, grads)
        lacking = 0 if copies is None else sum(map(is_, copies, itertools.repeat(None)))
        if lacking in (0, len(live)) and self._alike(live, place) and len(set(steps)) == 1:
            full = None if lacking else cast("list[Tensor] | None", copies)
            return iter([StepBatch(live, live, grads, rows, int(steps[0]), copies=full)])
        columns = zip(*rows, strict=True) if rows else ([] for _ in live)
        copies = [None] * len(live) if copies is None else copies
        return self._sorted_out(
            live, grads, columns, steps if self.counts else [0] * len(live), copies
        )

    def _alike(self, live: list[Tensor], place: int) -> bool:
        """Whether all have one dtype and device, and are real; not asked again of the same tensors.

        Where ``param.data = ...`` has changed some since, kernels find it out: they look at every
        tensor.
        """
        known = self._known.get(place, [])
        if len(known) == len(live) and all(map(is_, known, live)):
            return True
        alike = len({(p.dtype, p.device) for p in live}) == 1 and not live[0].is_complex()
        if alike:
            self._known[place] = list(live)
        return alike

    def _sorted_out(
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
                    "sparse gradient; use "
                    "nn.Embedding(sparse=False)"
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
        if places[-1] - places[0] + 1 == len(places):
            some = self._clock[places[0] : places[-1] + 1]
            some += 1
            return some.tolist()
        index = torch.tensor(places, dtype=torch.long)
        self._clock[index] += 1
        return self._clock[index].tolist()


@functools.cache
def _says(kind: type, flag: str) -> bool:
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
                    f"{tuple(param.shape)} "
                    f"in group {index} is on {param.device}; offload it "
                    "(zero_optimization.offload_optimizer), or use "
                    "the optimizer's plain name, which takes the best kernel for where "
                    "parameters are"
                )


def check_common(
    *, lr: float, eps: float = 0.0, betas: Sequence[float] = (), weight_decay: float = 0.0
) -> None:
    """Refuse numbers that no optimizer can mean (ValueError)."""
    if lr < 0 or eps < 0 or weight_decay < 0:
        raise ValueError(f"lr {lr}, eps {eps} and weight_decay {weight_decay} must not be negative")
    if betas and (len(betas) != 2 or not all(0 <= b < 1 for b in betas)):
        raise ValueError(f"betas {tuple(betas)}: two numbers in [0, 1)")
