"""Policies: outputs of some operators are kept, everything else is computed again."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ds_run_state.random_streams import STREAMS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ds_core.nested import map_leaves

_ATTENTION = {
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
}
_MATMULS = {
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "linear",
    "convolution",
    "_scaled_mm",
    "_grouped_mm",
    "_scaled_grouped_mm",
}
_KEPT = {"keep_matmuls": _MATMULS | _ATTENTION, "keep_attention": _ATTENTION}


@functools.cache
def keeps(policy: str, op: Any) -> bool:
    """Whether a policy keeps the outputs of an operator (an OpOverload)."""
    packet = getattr(op, "overloadpacket", None)
    if packet is None or op.namespace != "aten" or op._schema.is_mutable:
        return False
    return packet.__name__ in _KEPT[policy]


def _torch_policy(policy: str, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if keeps(policy, op) else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_matmuls() -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_torch_policy, "keep_matmuls"))


def _keep_attention() -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_torch_policy, "keep_attention"))


TORCH_CONTEXTS = {"keep_matmuls": _keep_matmuls, "keep_attention": _keep_attention}
"""The same for ``torch.utils.checkpoint``, which torch.compile knows: it takes functions of modules
only.
"""


@dataclass(slots=True)
class _Kept:
    """One operator's outputs."""

    op: Any
    outputs: Any
    versions: tuple[int, ...]
    """Of the outputs, when they were made."""
    place: int
    """How many tensors autograd had saved before."""
    random: Any
    """The random states after it, where it draws numbers."""


class KeptOutputs:
    """What one run of a function keeps, in order."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._kept: deque[_Kept] = deque()

    def recording(self, saved: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        """Inside, outputs are kept.

        saved: grows with each tensor that autograd saves.
        """
        return _Mode(self._policy, lambda op, run: self._record(op, run, len(saved)))

    def serving(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, operators that were kept are not run again."""
        left = deque(self._kept)
        self._kept.clear()
        return _Mode(self._policy, lambda op, run: _serve(op, run, left))

    def forget_after(self, place: int) -> None:
        """Drop what is made after the last tensor that autograd saves: nothing needs it
        again."""
        while self._kept and self._kept[-1].place == place:
            self._kept.pop()

    def num_bytes(self) -> int:
        """Bytes of the outputs."""
        return sum(
            t.numel() * t.element_size() for kept in self._kept for t in _tensors(kept.outputs)
        )

    def _record(self, op: Any, run: Callable[[], Any], place: int) -> Any:
        # Attention with dropout draws; a snapshot of all states is not made for every product.
        draws = torch.Tag.nondeterministic_seeded in op.tags
        before = STREAMS.snapshot() if draws else None
        out = run()
        after = STREAMS.snapshot() if before is not None else None
        drawn = (
            after
            if before is not None
            and after is not None
            and not torch.equal(before.current, after.current)
            else None
        )
        alias = map_leaves(_alias, out)
        self._kept.append(
            _Kept(op, alias, tuple(t._version for t in _tensors(alias)), place, drawn)
        )
        return out


def _serve(op: Any, run: Callable[[], Any], left: deque[_Kept]) -> Any:
    if not left or left[0].op is not op:
        # Another path than the first time, which the checks of saved tensors report.
        return run()
    kept = left.popleft()
    if kept.versions != tuple(t._version for t in _tensors(kept.outputs)):
        # Changed in place since it was made.
        return run()
    # What comes after it must draw the same numbers as if it had run.
    if kept.random is not None:
        STREAMS.go_on_from(kept.random)
    return kept.outputs


class _Mode(TorchDispatchMode):
    def __init__(self, policy: str, handle: Callable[[Any, Callable[[], Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._policy = policy
        self._handle = handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not keeps(self._policy, func):
            return func(*args, **(kwargs or {}))
        return self._handle(func, functools.partial(func, *args, **(kwargs or {})))


def _alias(value: Any) -> Any:
    """Another tensor of the same memory and version counter, which does not hold the graph."""
    if not isinstance(value, Tensor):
        return value
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
