"""Activation checkpointing of one function: its activations are computed again in backward.

[Note: how it works] While the function runs, hooks put an empty `Slot` into the graph for each
tensor that autograd would save. When backward opens the first of them, the function runs again with
the same inputs and random states; what autograd would save fills the slots in the same order, and
the run stops at the last one that is still wanted. From then on it is an ordinary graph: its tensors
are freed as backward passes, and a second backward (retain_graph) finds them again.

[Note: recomputation inside] A function that is recomputed inside another one is part of that: it
just runs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state.random_streams import STREAMS
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ds_activation_checkpointing.inputs import Keeper, held
from ds_activation_checkpointing.kept_outputs import TORCH_CONTEXTS, KeptOutputs
from ds_core.accelerator import get_accelerator
from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_activation_checkpointing.meter import Meter
    from ds_activation_checkpointing.timing import Watch


@dataclass(frozen=True, slots=True)
class Options:
    """How a function is recomputed."""

    name: str = "the checkpointed function"
    """Of the block, for messages."""
    keeper: Keeper = field(default_factory=Keeper)
    """Where inputs are kept."""
    policy: str = "all"
    """That of the section."""
    stop_early: bool = True
    """Stop after the last tensor that is wanted; False where ranks make collectives in the function,
    and may want different tensors."""
    watch: Watch | None = None
    """Times it."""
    meter: Meter | None = None
    """Measures it."""


PLAIN = Options()


def recompute(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Options
) -> Any:
    """``function(*args, **kwargs)``; what it needs in backward is computed again there."""
    # A graph knows torch's own checkpoint as an operation, and partitions it.
    if torch.compiler.is_compiling():
        from torch.utils.checkpoint import checkpoint

        if options.policy == "all":
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        contexts = TORCH_CONTEXTS[options.policy]
        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    if not torch.is_grad_enabled() or _inside():
        return function(*args, **kwargs)
    return Region(function, args, kwargs, options).forward(args, kwargs)


def _inside() -> bool:
    """See [Note: recomputation inside]."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and isinstance(getattr(hooks[0], "__self__", None), Region)


class Slot:
    """The place of one saved tensor in the graph.

    value: None until the function has run again.
    """

    __slots__ = ("__weakref__", "kind", "region", "value")

    def __init__(self, region: Region, tensor: Tensor) -> None:
        self.region = region
        self.kind = (tensor.shape, tensor.dtype)
        self.value: Tensor | None = None


class _Enough(Exception):
    """All slots are filled."""


class Region:
    """One forward of a function, and its second one."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Options,
    ) -> None:
        self.options = options

        # What is needed to run again; dropped once that is done.
        self._function: Callable[..., Any] | None = function
        self._inputs: Any = options.keeper.save((args, dict(kwargs)), options.name)
        # Outputs that the policy keeps; None: everything is computed again.
        self._kept = KeptOutputs(options.policy) if options.policy != "all" else None
        self._autocast = _autocast_now()
        self._random = STREAMS.snapshot()

        # The saved tensors in order. Weak: a slot whose part of the graph was freed is not needed.
        self._slots: list[weakref.ref[Slot]] = []
        # Of the second run: slots passed so far, and the last one that is wanted.
        self._filled = 0
        self._last = 0

    @property
    def inputs(self) -> Any:
        """What is kept of the inputs, in their structure; None once the function has run again."""
        return self._inputs

    def kept_bytes(self) -> int:
        """Bytes of this device that are kept until backward: of activations, and of outputs that are
        not computed again.
        """
        kept = self._kept.num_bytes() if self._kept is not None else 0
        return sum(item.num_bytes() for item in held(self._inputs) if item.requires_grad) + kept

    # -- forward -----------------------------------------------------------------------------------

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The function's result."""
        function = self._function
        watch = self.options.watch
        meter = self.options.meter
        assert function is not None
        if watch is not None:
            watch.begin()
        with contextlib.ExitStack() as stack:
            stack.enter_context(saved_tensors_hooks(self._pack, _unpack))
            if self._kept is not None:
                stack.enter_context(self._kept.recording(self._slots))
            if meter is not None:
                stack.enter_context(meter.measuring(self))
            out = function(*args, **kwargs)
        if watch is not None:
            watch.end(self.options.name, "forward")
        for item in held(self._inputs):
            item.check(self.options.name, "by its own forward")
        if self._kept is not None and self.options.stop_early:
            self._kept.forget_after(len(self._slots))
        return out

    def _pack(self, tensor: Tensor) -> Slot:
        if self.options.meter is not None:
            self.options.meter.saw(tensor)
        slot = Slot(self, tensor)
        self._slots.append(weakref.ref(slot))
        return slot

    # -- the second time ---------------------------------------------------------------------------

    def run_again(self) -> None:
        """Fill the slots. Raises UsageError where the function did not do the same as before."""
        function = self._function
        watch = self.options.watch
        if function is None:
            raise UsageError(
                f"{self._name} was computed again and saved other tensors than the first time; "
                f"{_SAME}"
            )
        if watch is not None:
            watch.begin()
        args, kwargs = self.options.keeper.restore(self._inputs, self.options.name)
        # Backward may have passed parts of the graph already, or never come to them.
        self._last = max(i for i, slot in enumerate(self._slots) if slot() is not None)
        self._filled = 0
        with (
            torch.enable_grad(),
            _autocast(self._autocast),
            STREAMS.replay(self._random),
            saved_tensors_hooks(self._fill, _none),
            self._kept.serving() if self._kept is not None else contextlib.nullcontext(),
            contextlib.suppress(_Enough),
        ):
            function(*args, **kwargs)
        if self._filled <= self._last or (
            not self.options.stop_early and self._filled != len(self._slots)
        ):
            raise UsageError(
                f"{self._name} saved {len(self._slots)} tensors for backward, and {self._filled} "
                f"when it was computed again; {_SAME}"
            )
        self._function = self._inputs = self._kept = None
        if watch is not None:
            watch.end(self.options.name, "recomputation")

    @property
    def _name(self) -> str:
        return self.options.name

    def _fill(self, tensor: Tensor) -> None:
        place = self._filled
        self._filled += 1
        if place >= len(self._slots):
            return
        slot = self._slots[place]()
        if slot is not None:
            if slot.kind != (tensor.shape, tensor.dtype):
                raise UsageError(
                    f"{self._name}: tensor {place} that backward needs was {_format(*slot.kind)}, "
                    f"and is {_format(tensor.shape, tensor.dtype)} when it is computed again; {_SAME}"
                )
            # Only the values of the second run are needed; detached, its graph is freed.
            slot.value = tensor.detach() if tensor.requires_grad else tensor
        if place == self._last and self.options.stop_early:
            raise _Enough


_SAME = (
    "with the same inputs and random numbers it must do the same: look for caches that it fills, "
    "counters, and random numbers that are not torch's"
)


def _format(shape: Any, dtype: Any) -> str:
    return f"{dtype} {list(shape)}".removeprefix("torch.")


def _unpack(slot: Slot) -> Tensor:
    if slot.value is None:
        slot.region.run_again()
        assert slot.value is not None
    return slot.value


def _none(_: Any) -> Any:
    raise AssertionError("nothing goes back through what is computed again")


# -- autocast --------------------------------------------------------------------------------------

_Autocast = tuple[tuple[str, bool, torch.dtype], ...]


def _autocast_now() -> tuple[_Autocast, bool]:
    """Per device type whether autocast is on and to what, and whether casts of weights are
    cached."""
    kinds = dict.fromkeys(("cpu", get_accelerator().device_type))
    states = tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)
    return states, torch.is_autocast_cache_enabled()


@contextlib.contextmanager
def _autocast(wanted: tuple[_Autocast, bool]) -> Iterator[None]:
    if wanted == _autocast_now():
        yield
        return
    states, cached = wanted
    with contextlib.ExitStack() as stack:
        for kind, enabled, dtype in states:
            stack.enter_context(
                torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached)
            )
        yield
