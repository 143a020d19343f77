"""One step of a divided model and of the whole one, on the ranks of
`ShardedTransformConformance`."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

from ds_testing.kits.parallel.runner import MICRO

if TYPE_CHECKING:
    from torch import Tensor, nn


def functions_of(names: list[Any]) -> tuple[Any, Any, Any]:
    """The functions that a kit names: the model's, the batch's, the whole model's."""
    from ds_testing.worker import find_function

    return find_function(names[0]), find_function(names[1]), find_function(names[2])


def made(make: Any, dtype: Any, frozen: list[str] | None = None, seed: int = 0) -> nn.Module:
    """A model of these weights, with parameters of these names frozen."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = make().to(dtype)
    for name, param in model.named_parameters():
        if any(re.fullmatch(pattern, name) for pattern in frozen or ()):
            param.requires_grad_(False)
    return model


def started(model: nn.Module, extra: dict[str, Any], *, optimizer: Any = None, **keys: Any) -> Any:
    """An engine over `model`, with AdamW where no optimizer is given."""
    import ds_core
    from ds_testing.kits.train.partitioner import with_plugins

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_clipping": 0.0,
        **keys,
    }
    if optimizer is None:
        config["optimizer"] = {
            "type": "AdamW",
            "params": {"lr": 0.05, "eps": 0.1, "weight_decay": 0.1},
        }
    engine, *_ = ds_core.initialize(
        model=model, config=with_plugins(config, extra, []), optimizer=optimizer
    )
    return engine


def plain_optimizer(model: nn.Module) -> Any:
    """What `started` asks for, of torch.

    The eps keeps what rounding does to small gradients small.
    """
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=0.05, eps=0.1, weight_decay=0.1)


class Truth:
    """One process of plain torch that sees what all ranks do."""

    def __init__(
        self, make: Any, make_batch: Any, dtype: Any, frozen: list[str] | None = None
    ) -> None:
        self.model = made(make, dtype, frozen)
        self.make_batch = make_batch
        self.dtype = dtype
        self.optimizer = plain_optimizer(self.model)

    def step(self, step: int, ranks: int, gas: int = 1, clip: float = 0.0) -> tuple[float, float]:
        """Train one step; its loss, and the norm of its gradients before they are clipped."""
        import torch

        total = 0.0
        for micro, index in itertools.product(range(gas), range(ranks)):
            loss = (
                loss_in(self.model, self.make_batch(step, micro, index), self.dtype) / gas / ranks
            )
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip or 1e30)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, float(norm)


def cast_batch(batch: Any, dtype: Any) -> Any:
    """`batch` with its floating-point tensors in `dtype`."""
    from ds_core.precision import cast_floats

    return cast_floats(batch, dtype)


def loss_in(model: Any, batch: Any, dtype: Any) -> Tensor:
    """The loss that `model` gives of `batch`."""
    from ds_core.engine import call_with_batch, loss_of

    loss: Tensor = loss_of(call_with_batch(model, cast_batch(batch, dtype)))
    return loss


def one_step(engine: Any, batches: list[Any], dtype: Any, *, by_hand: bool = True) -> float:
    """One step, by hand where the runner can be driven so; the mean of the losses over
    micro-batches and all ranks.
    """
    import torch

    from ds_core import comm

    # Pipelines run whole batches only, so `train_batch` drives them.
    if not (by_hand and engine.runner.manual):
        return float(engine.train_batch(iter(batches)).item())
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        loss = loss_in(engine, batch, dtype)
        total += loss.detach().double() / len(batches)
        engine.backward(loss)
        engine.step()
    comm.all_reduce(total)
    return total.item() / comm.world_size()
