"""Methods that DeepSpeed's engine has and ds_core's does not need: functions whose first argument
is the engine.

They serve where neither the engine nor its module has the name. This module loads no torch.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ds_deepspeed_compat.constants import DEEPSPEED_OPTIMIZERS
from ds_deepspeed_compat.engines.engine_getters import read

if TYPE_CHECKING:
    from torch import Tensor

    from ds_core import Engine
    from ds_core.engine import Loader

__all__ = [
    "_consolidated_16bit_state_dict",
    "_zero3_consolidated_16bit_state_dict",
    "allreduce_gradients",
    "checkpoint_tag_validation_enabled",
    "checkpoint_tag_validation_fail",
    "deepspeed_io",
    "dynamic_loss_scale",
    "dynamic_loss_scale_args",
    "empty_partition_cache",
    "get_batch_info",
    "get_data_parallel_rank",
    "get_data_types",
    "get_model_parallel_rank",
    "get_mom",
    "get_tensor_parallel_rank",
    "get_type",
    "initial_dynamic_scale",
    "is_iterable_style_dataset",
    "is_map_style_dataset",
    "load_module_state_dict",
    "module_state_dict",
    "optimizer_name",
    "postscale_gradients",
    "save_fp16_model",
    "set_dataloader",
    "set_lr",
    "torch_autocast_dtype",
    "zero_cpu_offload",
    "zero_gather_16bit_weights_on_model_save",
    "zero_nvme_offload_optimizer",
    "zero_optimization",
    "zero_optimization_partition_gradients",
    "zero_optimization_partition_weights",
    "zero_optimization_stage",
    "zero_partial_offload",
    "zero_use_cpu_optimizer",
]

log = logging.getLogger("ds_core")


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
    """A loader of this rank's share of `dataset`; shuffled for route "train", in order for any
    other.
    """
    from ds_core.engine import make_loader

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
    """Free weights that the partitioner has gathered ahead or keeps for later.

    Every rank calls it.
    """
    if (release := getattr(engine.partitioner, "release_idle", None)) is not None:
        release()


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
    """What `train_batch` takes its micro-batches from when it is given nothing; started again
    whenever it ends.
    """
    from ds_core.engine import RepeatingLoader

    engine.set_dataiterator(RepeatingLoader(loader))


def zero_optimization_partition_gradients(engine: Engine) -> bool:
    """Whether gradients are sharded over ranks (ZeRO stages 2 and 3), which rules out `no_sync`."""
    return engine.partitioner.partitions_gradients


# -- what the config says, worked out --------------------------------------------------------------


def zero_optimization_stage(engine: Engine) -> int:
    """The stage of ZeRO, 0 to 3."""
    return int(read(engine, "zero_optimization.stage", 0))


def zero_optimization(engine: Engine) -> bool:
    """Whether anything is sharded over ranks."""
    return zero_optimization_stage(engine) > 0


def zero_optimization_partition_weights(engine: Engine) -> bool:
    """Whether weights are sharded over ranks (ZeRO stage 3)."""
    return zero_optimization_stage(engine) == 3


def zero_cpu_offload(engine: Engine) -> bool:
    """Whether optimizer states rest on the host."""
    return _offload_device(engine) == "cpu"


def zero_use_cpu_optimizer(engine: Engine) -> bool:
    """Whether the optimizer's arithmetic runs on the host."""
    return _offload_device(engine) in ("cpu", "nvme")


def zero_nvme_offload_optimizer(engine: Engine) -> bool:
    """Whether optimizer states rest on NVMe."""
    return _offload_device(engine) == "nvme"


def _offload_device(engine: Engine) -> str:
    return str(read(engine, "zero_optimization.offload_optimizer.device", "none")).lower()


def zero_partial_offload(engine: Engine) -> float:
    """The share of optimizer states that is offloaded."""
    return float(read(engine, "zero_optimization.offload_optimizer.ratio", 1.0))


def zero_gather_16bit_weights_on_model_save(engine: Engine) -> bool:
    """Whether `save_16bit_model` writes at stage 3: unless the config says false."""
    return read(engine, "zero_optimization.gather_16bit_weights_on_model_save", True) is not False


def optimizer_name(engine: Engine) -> str | None:
    """``optimizer.type`` of the config; DeepSpeed's own names in small letters, as its engine gives
    them.
    """
    name: str | None = read(engine, "optimizer.type")
    return name.lower() if name and name.lower() in DEEPSPEED_OPTIMIZERS else name


def postscale_gradients(engine: Engine) -> bool:
    """Whether gradients are divided after their sum."""
    return not read(engine, "prescale_gradients", False)


def dynamic_loss_scale(engine: Engine) -> bool:
    """Whether the loss scale changes with overflows; false without fp16."""
    return engine.scaler is not None and read(engine, "fp16.loss_scale", 0) == 0


def initial_dynamic_scale(engine: Engine) -> float:
    """The loss scale at the start."""
    return float(2 ** int(read(engine, "fp16.initial_scale_power", 16)))


def dynamic_loss_scale_args(engine: Engine) -> dict[str, Any]:
    """How the loss scale changes, by DeepSpeed's names."""
    return {
        "init_scale": initial_dynamic_scale(engine),
        "scale_window": read(engine, "fp16.loss_scale_window", 1000),
        "min_scale": read(engine, "fp16.min_loss_scale", 1),
        "delayed_shift": read(engine, "fp16.hysteresis", 2),
        "consecutive_hysteresis": read(engine, "fp16.consecutive_hysteresis", False),
    }


def torch_autocast_dtype(engine: Engine) -> Any:
    """The dtype of autocast; None when it is off."""
    return engine.ctx.precision.autocast


def get_data_types(engine: Engine) -> tuple[Any, Any]:
    """The dtype of the weights in the module, and that in which gradients accumulate."""
    import torch

    param = engine.ctx.precision.param or torch.float32
    named = read(engine, "data_types.grad_accum_dtype")
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    return param, dtypes.get(str(named), param)


def checkpoint_tag_validation_enabled(engine: Engine) -> bool:
    """Whether ranks compare their tags when they save."""
    return str(read(engine, "checkpoint.tag_validation", "Warn")) != "Ignore"


def checkpoint_tag_validation_fail(engine: Engine) -> bool:
    """Whether unequal tags are an error."""
    return str(read(engine, "checkpoint.tag_validation", "Warn")) == "Fail"


# -- where this rank stands ------------------------------------------------------------------------


def get_data_parallel_rank(engine: Engine) -> int:
    """This rank's place among those that divide the batch."""
    return engine.ctx.mesh.index("batch")


def get_model_parallel_rank(engine: Engine) -> int:
    """This rank's place among those that divide the layers."""
    return engine.ctx.mesh.index("tp") if engine.ctx.mesh.has("tp") else 0


get_tensor_parallel_rank = get_model_parallel_rank


# -- learning rate, data ---------------------------------------------------------------------------


def set_lr(engine: Engine, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in engine.param_groups():
        group["lr"] = lr


def is_map_style_dataset(engine: Engine, obj: Any) -> bool:
    """Whether a dataset has items by number."""
    return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")


def is_iterable_style_dataset(engine: Engine, obj: Any) -> bool:
    """Whether a dataset is a stream."""
    from torch.utils.data import IterableDataset

    return isinstance(obj, IterableDataset)


def allreduce_gradients(engine: Engine, bucket_size: int = 0) -> None:
    """Nothing: backward and step reduce gradients by themselves, which the log says once."""
    from ds_core.process import log_once

    log_once(
        log,
        logging.INFO,
        "allreduce_gradients has no effect: backward and step reduce gradients by themselves",
    )


# -- weights ---------------------------------------------------------------------------------------


def module_state_dict(
    engine: Engine,
    destination: Any = None,
    prefix: str = "",
    keep_vars: bool = False,
    exclude_frozen_parameters: bool = False,
) -> Any:
    """The module's ``state_dict``, as this rank holds it; `_zero3_consolidated_16bit_state_dict`
    gathers stage 3.
    """
    given = {} if destination is None else {"destination": destination}
    state = engine.module.state_dict(**given, prefix=prefix, keep_vars=keep_vars)
    if exclude_frozen_parameters:
        for name, param in engine.module.named_parameters():
            if not param.requires_grad:
                state.pop(prefix + name, None)
    return state


def load_module_state_dict(
    engine: Engine,
    state_dict: Mapping[str, Any],
    strict: bool = True,
    custom_load_fn: Callable[..., Any] | None = None,
) -> None:
    """Load weights into the module, master weights with them; a checkpoint's dict is known by its
    key ``module``.

    custom_load_fn: called with ``src`` and ``dst`` instead.

    Every rank calls it.
    """
    weights = state_dict["module"] if isinstance(state_dict.get("module"), Mapping) else state_dict
    if custom_load_fn is not None:
        custom_load_fn(src=weights, dst=engine.module)
    else:
        engine.module.load_state_dict(weights, strict=strict)


def _zero3_consolidated_16bit_state_dict(
    engine: Engine, exclude_frozen_parameters: bool = False
) -> dict[str, Any] | None:
    """The module's whole ``state_dict``, on the CPU, on rank 0; None on the others.

    Every rank calls it.
    """
    import torch
    from torch import nn

    mesh = engine.ctx.mesh
    if mesh.size("dp") != mesh.world_size or (mesh.has("ep") and mesh.size("ep") > 1):
        # Ranks hold different layers, experts, or parts of them.
        gathered: dict[str, Any] | None = importlib.import_module(
            "ds_checkpoint.export"
        ).gather_model(engine, exclude_frozen_parameters)
        return gathered
    # Only data parallelism: every weight is whole on a rank, or gathered from its shards.
    found: dict[str, Any] = {}
    copies: dict[Any, Tensor] = {}  # a tied weight keeps its names
    for name, value in engine.module.state_dict(keep_vars=True).items():
        if (
            exclude_frozen_parameters
            and isinstance(value, nn.Parameter)
            and not value.requires_grad
        ):
            continue
        # All ranks take part in gathering; rank 0 alone keeps a copy.
        with _whole(engine, value):
            if mesh.rank == 0 and isinstance(value, torch.Tensor) and value not in copies:
                copies[value] = value.detach().cpu().clone()
        found[name] = copies.get(value, value)
    return found if mesh.rank == 0 else None


_consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict


def _whole(engine: Engine, value: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside, a weight that stage 3 shards is whole."""
    if not zero_optimization_partition_weights(engine) or not hasattr(value, "requires_grad"):
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = importlib.import_module(
        "ds_zero"
    ).GatheredParameters([value])
    return context
