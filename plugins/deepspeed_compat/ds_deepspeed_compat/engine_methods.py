"""Methods that DeepSpeed's engine has and ds_core's does not need: functions whose first argument is the engine.

They serve where neither the engine nor its module has the name. This module loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_core import Engine
    from ds_core.data import Loader

__all__ = [
    "deepspeed_io",
    "empty_partition_cache",
    "get_batch_info",
    "get_mom",
    "get_type",
    "save_fp16_model",
    "set_dataloader",
    "zero_optimization_partition_gradients",
]


def deepspeed_io(
    engine: Engine,
    dataset: Any,
    batch_size: int | None = None,
    route: str = "train",
    pin_memory: bool = True,
    data_sampler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_local_io_workers: int | None = None,
) -> Loader:
    """A loader of this rank's share of `dataset`; shuffled for route "train", in order for any other."""
    from ds_core.data import make_loader

    ctx = engine.ctx
    return make_loader(
        ctx,
        dataset,
        batch_size,
        route=route,
        collate_fn=collate_fn or ctx.collate_fn,
        num_workers=num_local_io_workers or 0,
        pin_memory=pin_memory and ctx.accelerator.device_type != "cpu",
        sampler=data_sampler,
    )


def empty_partition_cache(engine: Engine) -> None:
    """Free weights that the partitioner has gathered ahead or keeps for later. Every rank calls it."""
    engine.partitioner.release_idle()


def get_batch_info(engine: Engine) -> tuple[int, int, int]:
    """(train batch size, micro-batch size, accumulation steps)."""
    batch = engine.ctx.batch
    return batch.train, batch.micro, batch.gas


def get_mom(engine: Engine) -> list[Any]:
    """Momentum (or betas) of each parameter group."""
    return [g["momentum"] if "momentum" in g else g.get("betas") for g in engine.param_groups()]


def get_type(engine: Engine) -> list[str | None]:
    """The ``type`` that each parameter group carries, if any."""
    return [g.get("type") for g in engine.param_groups()]


def save_fp16_model(
    engine: Engine,
    save_dir: str,
    save_filename: str = "model.safetensors",
    exclude_frozen_parameters: bool = False,
) -> bool:
    """The old name of `Engine.save_16bit_model`."""
    return engine.save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)


def set_dataloader(engine: Engine, loader: Iterable[Any]) -> None:
    """What `train_batch` takes its micro-batches from when it is given nothing; started again whenever it ends."""
    from ds_core.data import RepeatingLoader

    engine.set_dataiterator(RepeatingLoader(loader))


def zero_optimization_partition_gradients(engine: Engine) -> bool:
    """Whether gradients are sharded over ranks (ZeRO stages 2 and 3), which rules out `no_sync`."""
    return engine.partitioner.partitions_gradients
