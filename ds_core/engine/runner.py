"""Who turns micro-batches into forwards and backwards: the Runner contract, `Sequential`, and what
they read.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.errors import UsageError
from ds_core.nested import to_device

if TYPE_CHECKING:
    from ds_core.engine import Loader, RunningEngine
    from ds_core.mesh import Mesh


class Runner(ABC):
    """Runs one batch of micro-batches through the engine's module."""

    manual = True
    """Whether a user may drive the engine with forward, backward and step."""
    manual_reason = ""
    """Why not."""
    makes_loss = True
    """Whether this rank makes the loss that `evaluate` returns, or has it from another."""

    @abstractmethod
    def train(self, engine: RunningEngine, batches: Iterator[Any], count: int) -> Tensor:
        """Pull `count` micro-batches, run forward and backward of each through
        ``engine.backward_micro``.

        Returns the mean loss over this rank's micro-batches, a detached 0-d tensor. Lets
        StopIteration through when `batches` ends early; by then no weight has changed. Gradients
        are reduced when it returns.
        """

    @abstractmethod
    def evaluate(
        self,
        engine: RunningEngine,
        batches: Iterator[Any],
        count: int,
        *,
        return_logits: bool,
        compute_loss: bool = True,
    ) -> tuple[Tensor | None, Any]:
        """Forward only: (mean loss or None when the module gives none, the outputs when asked).

        compute_loss=False: only outputs are wanted, and batches may have no labels.
        """


class Sequential(Runner):
    """Runs micro-batches one after the other, forward then backward.

    The module's output has the loss.
    """

    def train(self, engine: RunningEngine, batches: Iterator[Any], count: int) -> Tensor:
        """See `Runner.train`."""
        losses: list[Tensor] = []
        for index in range(count):
            loss = loss_of(self._forward(engine, next(batches)))
            engine.backward_micro(loss, last=index == count - 1)
            losses.append(loss.detach())
        return sum(losses[1:], losses[0]) / count

    def evaluate(
        self,
        engine: RunningEngine,
        batches: Iterator[Any],
        count: int,
        *,
        return_logits: bool,
        compute_loss: bool = True,
    ) -> tuple[Tensor | None, Any]:
        """See `Runner.evaluate`; the module takes whole batches, and gives a loss with its outputs
        or none.
        """
        losses = []
        outputs = []
        for _ in range(count):
            output = self._forward(engine, next(batches))
            losses.append(loss_of(output, required=not return_logits))
            outputs.append(output)
        found = [x for x in losses if x is not None]
        mean = torch.stack(found).mean() if found else None
        return mean, (outputs if count > 1 else outputs[0]) if return_logits else None

    @staticmethod
    def _forward(engine: RunningEngine, batch: Any) -> Any:
        """The module's output. Loaders make batches on the host."""
        return call_with_batch(engine, to_device(batch, engine.ctx.accelerator.current_device()))


class Batches:
    """What `train_batch` without an argument reads: an iterator that was `given`, else the engine's
    own loader.
    """

    given: Iterator[Any] | None = None
    """What the user has set."""
    # Endless, over the engine's own loader; None: to be begun.
    _own: Iterator[Any] | None = None

    def __init__(self, loader: Loader | None) -> None:
        self.loader: Any = loader
        # None: the loader does not count.
        self._seen: int | None = getattr(loader, "samples_seen", None)

    def check_resizable(self) -> None:
        """Raise UsageError if the loader's batches have no size that can be set."""
        if self.loader is not None and not hasattr(self.loader, "set_batch_size"):
            raise UsageError(
                f"the micro-batch size cannot be changed: {type(self.loader).__name__}, which a "
                "plugin made, has no set_batch_size"
            )

    def set_batch_size(self, micro: int) -> None:
        """Samples per micro-batch of the engine's own loader, from its next iteration on."""
        if self.loader is not None:
            self.loader.set_batch_size(micro)
            self.restart()

    def take_samples(self, usual: int) -> int:
        """Samples that the loader has yielded on all ranks since the last call; `usual` if it
        counts none.
        """
        if self._seen is None:
            return usual
        before, self._seen = self._seen, self.loader.samples_seen
        # 0: other batches than the loader's were used, or another rank reads it.
        return self._seen - before or usual

    def position(self) -> Any:
        """The state of the engine's own loader; None without one."""
        return self.loader.state_dict() if self.loader is not None else None

    def restart(self) -> None:
        """Iterate over the engine's own loader again, from the position that its state gives."""
        self._own = None

    def iterator(self) -> Iterator[Any]:
        """The iterator to read from; the loader's is endless.

        Raises UsageError when there is none.
        """
        if self.given is not None:
            return self.given
        if self.loader is None:
            raise UsageError(
                "train_batch() needs an iterator, set_dataiterator(), or training_data in "
                "initialize()"
            )
        if self._own is None:
            from ds_core.engine.data import RepeatingLoader

            self._own = iter(RepeatingLoader(self.loader))
        return self._own


def call_with_batch(function: Any, batch: Any) -> Any:
    """Call with a batch as the loader gives it: a mapping as keywords, a tuple or list as
    arguments, else as one.
    """
    if isinstance(batch, Mapping):
        return function(**batch)
    if isinstance(batch, (tuple, list)):
        return function(*batch)
    return function(batch)


def loss_of(output: Any, required: bool = True) -> Any:
    """The scalar loss in a module's output: itself, its ``loss``, its ``["loss"]`` or its first
    item.

    Raises UsageError when there is none and `required`; gives None otherwise.
    """
    found = output
    if not isinstance(output, Tensor):
        if isinstance(output, Mapping):
            found = output.get("loss")
        elif getattr(output, "loss", None) is not None:
            found = output.loss
        elif isinstance(output, (tuple, list)) and output:
            found = output[0]
    if isinstance(found, Tensor) and found.numel() == 1:
        return found.reshape(())
    if not required:
        return None
    shown = (
        f"a tensor of shape {tuple(output.shape)}"
        if isinstance(output, Tensor)
        else type(output).__name__
    )
    raise UsageError(
        "train_batch needs the module to return a scalar loss (alone, as .loss, ['loss'] or the "
        f"first item), got {shown}; compute the loss inside the module's forward, or call the "
        "engine explicitly with backward(loss) and step()"
    )


def check_loss(loss: Any) -> None:
    """Raise UsageError unless `loss` is a scalar tensor with a graph."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, Tensor)
            else type(loss).__name__
        )
        raise UsageError(
            f"the loss must be a scalar tensor, got {shown}; reduce it with .mean() or .sum()"
        )
    if loss.grad_fn is None:
        raise UsageError(
            "the loss has no graph (was it detached, or made under torch.no_grad()?), so nothing "
            "would be learnt"
        )


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """All modules in eval mode inside; afterwards each in the mode that it was in."""
    # Each by itself: a user may keep some modules, such as frozen ones, in eval mode.
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def mean_over_dp(loss: Tensor, mesh: Mesh) -> Tensor:
    """The mean of a loss over the dp ranks; in fp32 where the loss has 16 bits.

    Collective along dp.
    """
    if mesh.size("dp") == 1:
        return loss
    total = (
        loss.detach().float()
        if loss.dtype in (torch.float16, torch.bfloat16)
        else loss.detach().clone()
    )
    comm.all_reduce(total, group=mesh.group("dp"))
    return total / mesh.size("dp")
