"""What the arguments of `Init` and the config say: over which ranks, where and in which dtype."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from ds_state_stores import open_store

from ds_core import comm
from ds_core.accelerator import get_accelerator
from ds_core.errors import AcceleratorError, ConfigError, UsageError
from ds_core.process import log_once
from ds_zero.init.sharded_param import ShardSpec

if TYPE_CHECKING:
    from ds_state_stores import StateStore

    from ds_core.accelerator import Accelerator
    from ds_core.config import RunConfig
    from ds_core.plugins import Plugins
    from ds_zero.config import ZeroConfig

log = logging.getLogger("ds_zero")

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_arguments(remote: str | None, dtype: torch.dtype | None) -> None:
    """Raise UsageError for an unknown device or dtype."""
    if remote not in (None, "none", "cpu", "nvme"):
        raise UsageError(
            f"ds_zero.Init: remote_device is {remote!r}; use 'cpu', 'nvme', or None for the "
            "accelerator"
        )
    if dtype is not None and dtype not in _DTYPES:
        raise UsageError(
            f"ds_zero.Init: dtype is {dtype}; use torch.float16, bfloat16, float32 or float64"
        )


def choose_config(source: Any, deprecated: Any, quantised: bool) -> Any:
    """The config by either of its names; warns of arguments that belong into it."""
    if quantised and comm.rank() == 0:
        log.warning(
            "ds_zero.Init: zero_quantized_* have no effect here: set them in "
            "zero_optimization, for training"
        )
    if deprecated is not None:
        log.warning("ds_zero.Init: config= is deprecated; use config_dict_or_path=")
        if source is not None:
            raise UsageError(
                "ds_zero.Init: config and config_dict_or_path are both given; give one"
            )
    return deprecated if source is None else source


def warn_without_effect(mem_efficient_linear: bool, zero_param_parallel_group: Any) -> None:
    """Note in the log which of DeepSpeed's arguments have no effect; programs for it give them."""
    if not mem_efficient_linear and comm.rank() == 0:
        text = "ds_zero.Init: mem_efficient_linear has no effect: no module keeps a gathered weight"
        log_once(log, logging.WARNING, text)
    if zero_param_parallel_group is not None and comm.rank() == 0:
        text = (
            "ds_zero.Init: zero_param_parallel_group has no effect: hpZ's groups follow from the "
            "config"
        )
        log_once(log, logging.WARNING, text)


def choose_group(data_parallel_group: Any, mpu: Any) -> Any:
    """The group to shard over; None: all ranks."""
    if data_parallel_group is None and mpu is not None:
        return mpu.get_data_parallel_group()
    return data_parallel_group or None


def read_config(source: Any) -> tuple[RunConfig | None, Plugins | None]:
    """The run's config and its plugins; a `RunConfig` has been composed, and comes without them."""
    from ds_core.config import RunConfig
    from ds_core.setup.compose import compose

    if source is None or isinstance(source, RunConfig):
        return source, None
    # Front-ends fill in "auto" before `initialize`; what `Init` reads is never left to them.
    chosen = compose(source, fill_later=True)
    return chosen.config, chosen.plugins


def zero_section(run: RunConfig | None) -> ZeroConfig:
    """``zero_optimization`` of the config, or its defaults; without a config those of stage 3, as
    `Init` is meant as it stands.
    """
    from ds_zero.config import ZeroConfig

    if run is None:
        return ZeroConfig(stage=3)
    return run.section(ZeroConfig) or ZeroConfig()


def choose_dtype(
    given: torch.dtype | None, run: RunConfig | None, plugins: Plugins | None
) -> torch.dtype | None:
    """The dtype of weights; None: as they are built.

    Raises ConfigError when the argument and the config contradict each other.
    """
    if run is None:
        return given
    from ds_core.precision import make_precision

    wanted = make_precision(run, plugins).param
    if given is not None and wanted is not None and wanted != given:
        raise ConfigError(
            f"ds_zero.Init: dtype is {given}, but the config trains in {wanted}; leave dtype out"
        )
    return given or wanted


def choose_store(
    remote: str | None, section: ZeroConfig, run: RunConfig | None, plugins: Plugins | None
) -> Callable[[Accelerator], StateStore] | None:
    """What opens the store of shards; None: they are in memory."""
    # What the caller says takes precedence over the config.
    offload = section.weights_offload
    device = offload.device.lower() if offload is not None and remote is None else remote or "none"
    if device in ("none", "cpu"):
        return None
    if offload is None or plugins is None or (offload.nvme_path is None and device == "nvme"):
        raise UsageError(
            f"ds_zero.Init: remote_device {device!r} needs the folder; give config_dict_or_path= "
            "with zero_optimization.offload_param.nvme_path"
        )

    def open_on(accelerator: Accelerator) -> StateStore:
        # There is no engine yet, and stores need no more of one than this.
        like: Any = SimpleNamespace(
            accelerator=accelerator, config=run, plugins=plugins, rank=comm.rank()
        )
        # Nothing stays in host memory: a model under construction may be larger than that.
        return open_store(like, device, {**offload.options, "max_in_cpu": 0})

    return open_on


def make_spec(
    group: Any,
    remote: str | None,
    pin: bool,
    dtype: torch.dtype | None,
    section: ZeroConfig,
    store: Callable[[Accelerator], StateStore] | None,
) -> ShardSpec:
    """Choose the ranks and the device of shards.

    Starts torch.distributed if it is not running.
    """
    accelerator = get_accelerator()
    comm.init_distributed(accelerator.communication_backend)
    accelerator.set_device(accelerator.local_index(comm.local_rank()))
    if dtype is torch.float16 and not accelerator.supports(torch.float16):
        raise AcceleratorError(
            f"ds_zero.Init: {accelerator.name} cannot compute in float16; use torch.bfloat16"
        )
    group, ranks = _sharing_ranks(group)
    # Those of them over which a weight is divided: a block of them with MiCS.
    size = section.mics_shard_size if section.mics_shard_size > 0 else len(ranks)
    over, index = _block(group, ranks, size)
    # Where shards are kept.
    device = accelerator.current_device()
    offload = section.weights_offload
    if offload is not None and remote is None and offload.device == "cpu":
        remote = "cpu"
        pin = pin or offload.pin_memory
    # A store has its shards in host memory or behind it.
    opened = store(accelerator) if store is not None else None
    shard_device = torch.device("cpu") if remote == "cpu" or opened is not None else device
    spec = ShardSpec(
        group=group if len(ranks) > 1 else None,
        ranks=tuple(ranks),
        over=over,
        block=size,
        index=index,
        device=device,
        shard_device=shard_device,
        # Where the device is the CPU itself there is nothing to copy to, so nothing to lock pages
        # for.
        pin=pin and opened is None and shard_device.type == "cpu" and device.type != "cpu",
        dtype=dtype,
        checks=section.enable_sanity_checks,
        store=opened,
    )
    # Each sharded weight refers to the spec: the store is closed when an engine has taken over all
    # of them, else at exit.
    if opened is not None:
        weakref.finalize(spec, opened.close)
    return spec


def _sharing_ranks(group: Any) -> tuple[Any, list[int]]:
    """The group of the ranks that share the parameters, and their global ranks."""
    if group is None:
        ranks = list(range(comm.world_size()))
        return (torch.distributed.group.WORLD if len(ranks) > 1 else None), ranks
    ranks = torch.distributed.get_process_group_ranks(group)
    if comm.rank() not in ranks:
        raise UsageError(
            f"ds_zero.Init: rank {comm.rank()} is not in data_parallel_group, which has {ranks}"
        )
    return group, ranks


def _block(group: Any, ranks: list[int], size: int) -> tuple[Any, int]:
    """The group of this rank's block of `size` consecutive `ranks`, and its index there.

    Collective over the block.
    """
    if len(ranks) % size:
        good = ", ".join(str(d) for d in range(1, len(ranks) + 1) if len(ranks) % d == 0)
        raise ConfigError(
            f"zero_optimization.mics_shard_size: {size} does not divide the {len(ranks)} ranks of "
            f"ds_zero.Init; use {good}"
        )
    position = ranks.index(comm.rank())
    # The whole group needs no new one, a block of one rank none at all.
    if size in (1, len(ranks)):
        return (group if size > 1 else None), position % size
    # Only the ranks of a block make its group: others need not know of it.
    block = ranks[position - position % size :][:size]
    over = torch.distributed.new_group(block, use_local_synchronization=True)
    comm.open_transport(over)
    return over, position % size
