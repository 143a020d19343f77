"""Whether the weights of a loaded program are still what it was loaded with.

Providers keep addresses of the module's parameters, and copies of small ones in another dtype. The
module is the caller's, who may load other values into it or convert it; a program that went on
would read memory that is no longer the weights'.
"""

from __future__ import annotations

from ds_inference_kit.program import Runnable
from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_inference.families import Lowered


class WeightTracker:
    """Called before `runnable` is: binds it again where weights of `module` moved or have new
    values.

    UsageError where they are of another dtype or on another device.
    """

    def __init__(self, module: nn.Module, lowered: Lowered, runnable: Runnable) -> None:
        named = dict(module.named_parameters()) | dict(module.named_buffers())
        self._names = list(named)
        self._weights = list(named.values())
        self._lowered = lowered
        self._runnable = runnable
        self._kinds = [(x.dtype, x.device) for x in self._weights]
        # Comparing these is cheap beside binding again, which translates the program.
        self._marks = [_mark(x) for x in self._weights]

    def __call__(self) -> None:
        """See the class."""
        marks = [_mark(x) for x in self._weights]
        if marks == self._marks:
            return
        for name, x, (dtype, device) in zip(self._names, self._weights, self._kinds, strict=True):
            if (x.dtype, x.device) != (dtype, device):
                was = f"{dtype} on {device}"
                now = f"{x.dtype} on {x.device}"
                raise UsageError(
                    f"{name} was {was} when this engine was made, and is {now} now: make a new "
                    "engine"
                )
        # Derived tensors first: the program looks up their addresses too.
        self._lowered.refresh()
        self._runnable.rebind()
        self._marks = marks


def _mark(x: Tensor) -> tuple[int, int]:
    """Changes with each write in place, and with the memory."""
    return x.data_ptr(), 0 if x.is_inference() else x._version
