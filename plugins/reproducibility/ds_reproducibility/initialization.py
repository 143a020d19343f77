"""Initial weights by the names of parameters, so that any layout, and a stage of a pipeline alone,
begins with the same bits.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from ds_run_state.lazy import lazy_weight
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_core.errors import UsageError
from ds_core.process import log_once
from ds_reproducibility.counter import Grid, Key
from ds_reproducibility.functions import FUNCTIONS, OTHERS

log = logging.getLogger("ds_reproducibility")


@contextlib.contextmanager
def named_draws(model: nn.Module, seed: int = 1234) -> Iterator[None]:
    """Inside, what fills parameters and buffers of `model` with random numbers draws them by seed,
    name and index: `nn.init`'s functions, ``reset_parameters``, ``weight.data.normal_()``.

    The same numbers come in any order of modules, on any device (normal ones but for rounding), and
    for a model that has only some of the modules. For example
    ``with named_draws(model): model.apply(init)``.

    Raises UsageError where random numbers are asked for that go into no parameter or buffer.
    """
    with _NamedDraws(model, seed):
        yield


def draw_again(model: nn.Module, seed: int) -> nn.Module:
    """Call ``reset_parameters`` of all modules that have it, inside of `named_draws`.

    UsageError for weights that are sharded already, as after ``ds_zero.Init``. Parameters of other
    modules stay as they are, which is logged once.
    """
    if lazy := [name for name, p in model.named_parameters() if lazy_weight(p) is not None]:
        raise UsageError(
            f"reproducibility.initialization: {lazy[0]} is sharded already (ds_zero.Init); draw it "
            "inside of ds_zero.GatheredParameters and ds_reproducibility.named_draws, and set "
            "initialization to false"
        )
    left = []
    with named_draws(model, seed):
        for name, module in model.named_modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            elif next(module.parameters(recurse=False), None) is not None:
                left.append(name or type(model).__name__)
    if left:
        log_once(
            log,
            logging.WARNING,
            f"reproducibility.initialization: {', '.join(left[:5])} (of {len(left)}) have no "
            "reset_parameters, and keep the values that their constructors gave them",
        )
    return model


class _NamedDraws(TorchFunctionMode):
    """See `named_draws`."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__()
        self._seed = seed
        # A tied parameter has its first name.
        self._names = {
            _identity(tensor): name
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if tensor.numel()
        }
        # How often each has been drawn.
        self._calls: Counter[str] = Counter()
        # The parameter that is being filled, for numbers that are rejected and drawn again.
        self._last: tuple[str, torch.Size] | None = None

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The result of one call."""
        kwargs = dict(kwargs or {})
        ours = FUNCTIONS.get(function)
        if kwargs.get("generator") is None:
            kwargs.pop("generator", None)
            if ours is not None:
                return ours(self, *args, **kwargs)
            if function in OTHERS:
                raise UsageError(f"named_draws: {function.__name__} is not offered")
        return function(*args, **kwargs)

    def draw(
        self, shape: Any, device: torch.device, target: Tensor | None = None
    ) -> tuple[Key, Grid]:
        """See `ds_reproducibility.functions.Source`."""
        name = None if target is None else self._names.get(_identity(target))
        if name is not None:
            self._last = (name, torch.Size(shape))
        elif self._last is not None and self._last[1] == torch.Size(shape):
            # trunc_normal_ draws again, into a tensor of its own, where a number was too large.
            name = self._last[0]
        if name is None:
            raise UsageError(
                f"named_draws: random numbers of shape {tuple(shape)} are for no parameter or "
                "buffer of the model, so they have no name; fill parameters themselves, in place"
            )
        key = Key.of(self._seed, "initialization", name, self._calls[name])
        self._calls[name] += 1
        return key, Grid([torch.arange(size, device=device) for size in shape])


def _identity(tensor: Tensor) -> tuple[int, torch.Size]:
    """Where its values are: ``param.data`` is another object with the same ones."""
    return tensor.data_ptr(), tensor.shape
