"""Checks of ``zero_optimization`` that depend on other keys or other plugins (torch-free)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ds_state_stores import check_store

from ds_core.errors import Problem

if TYPE_CHECKING:
    from ds_core.config import RunConfig
    from ds_core.config.core import OptimizerConfig
    from ds_core.plugins import Plugins
    from ds_zero.config import OffloadOptimizer, OffloadParam, ZeroConfig

OPTIMIZER = "zero_optimization.offload_optimizer"
PARAM = "zero_optimization.offload_param"


SELF_REDUCED = "this optimizer reduces gradients by itself, and so does ZeRO"


def problems(section: ZeroConfig, config: RunConfig, plugins: Plugins) -> Iterator[Problem]:
    """What the stage does not support, unknown stores, and optimizers that reduce gradients
    themselves.
    """
    yield from hierarchy_problems(section)
    yield from offload_problems(section, plugins)
    yield from optimizer_problems(section, config.core.optimizer, plugins)
    yield from quantised_problems(section)
    yield from zenflow_problems(section, config)


def optimizer_problems(
    section: ZeroConfig, optimizer: OptimizerConfig | None, plugins: Plugins
) -> Iterator[Problem]:
    """An optimizer that reduces gradients itself."""
    if section.stage == 0 or optimizer is None:
        return
    answer = plugins.named("ds_optimizers", "optimizer").get(optimizer.type.lower())
    if answer is not None and answer.value.partitioner is not None:
        yield Problem(
            "optimizer.type",
            f"{optimizer.type!r}: {SELF_REDUCED}",
            "set stage 0, or use another optimizer",
        )


def hierarchy_problems(section: ZeroConfig) -> Iterator[Problem]:
    """Keys of hierarchies outside stage 3, and two hierarchies."""
    hpz = section.zero_hpz_partition_size > 1
    mics = section.mics_shard_size > 0
    given = [key for key, on in (("zero_hpz_partition_size", hpz), ("mics_shard_size", mics)) if on]
    if section.mics_hierarchical_params_gather and not mics:
        path = "zero_optimization.mics_hierarchical_params_gather"
        yield Problem(
            path, "there are no shard groups to gather over", "set mics_shard_size, or remove it"
        )
    if section.stage != 3:
        for key in given:
            path = f"zero_optimization.{key}"
            why = f"only stage 3 partitions weights, this is stage {section.stage}"
            yield Problem(path, why, "set stage 3, or remove the key")
    if hpz and mics:
        why = "MiCS gathers inside a shard group already, so hpZ adds nothing to it"
        yield Problem(f"zero_optimization.{given[0]}", why, "remove it, or mics_shard_size")


def offload_problems(section: ZeroConfig, plugins: Plugins) -> Iterator[Problem]:
    """Problems of the offload sections."""
    stage = section.stage
    if (weights := section.weights_offload) is not None and weights.on:
        yield from _store_problems(weights, PARAM, plugins)
    if (states := section.offload_optimizer) is not None and states.on:
        if stage == 0:
            yield Problem(
                f"{OPTIMIZER}.device",
                "stage 0 partitions nothing",
                'set stage 1, 2 or 3, or "none"',
            )
        if states.ratio < 1 and stage != 3:
            yield Problem(
                f"{OPTIMIZER}.ratio",
                f"{states.ratio} needs stage 3, this is stage {stage}",
                "set stage 3, or ratio 1",
            )
        if states.super_offload and states.device.lower() == "nvme":
            yield Problem(
                f"{OPTIMIZER}.super_offload",
                "needs states that stay in memory",
                'set device "cpu", or leave it out',
            )
        yield from _store_problems(states, OPTIMIZER, plugins)


def zenflow_problems(section: ZeroConfig, config: RunConfig) -> Iterator[Problem]:
    """What ZenFlow needs beside it."""
    if section.zenflow is None:
        return
    path = "zero_optimization.zenflow"
    states = section.offload_optimizer
    if states is None or states.device.lower() != "cpu":
        yield Problem(
            path, "needs optimizer states on the host", f'set {OPTIMIZER}.device to "cpu"'
        )
    elif states.ratio < 1:
        yield Problem(
            f"{OPTIMIZER}.ratio",
            f"{states.ratio} does not go with zenflow, which has a topk_ratio",
            "set 1",
        )
    elif states.super_offload:
        yield Problem(
            f"{OPTIMIZER}.super_offload",
            "zenflow updates the host's states in its own time",
            "leave it out",
        )
    if config.core.gradient_allreduce_op == "sum":
        yield Problem(
            "gradient_allreduce_op",
            "'sum' does not go with zero_optimization.zenflow",
            'set "mean"',
        )


def quantised_problems(section: ZeroConfig) -> Iterator[Problem]:
    """Quantised communication that the stage or other keys do not allow."""
    path = "zero_optimization"
    for key in (
        "zero_quantized_weights",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients",
    ):
        if getattr(section, key) and section.stage != 3:
            yield Problem(
                f"{path}.{key}",
                f"needs stage 3, this is stage {section.stage}",
                "set stage 3, or false",
            )
    if section.zero_quantized_weights and section.mics_hierarchical_params_gather:
        why = "gathers weights as they are, and zero_quantized_weights in 8 bits"
        yield Problem(f"{path}.mics_hierarchical_params_gather", why, "remove one of the two")
    if section.zero_quantized_gradients and not section.reduce_scatter:
        yield Problem(
            f"{path}.zero_quantized_gradients",
            "takes the place of reduce_scatter, which is false",
            "set it to true",
        )
    if section.zeropp_loco_param is not None and not section.zero_quantized_gradients:
        yield Problem(
            f"{path}.zeropp_loco_param",
            "corrects the errors of zero_quantized_gradients, which is false",
            "set that to true, or remove this key",
        )


def _store_problems(
    place: OffloadParam | OffloadOptimizer, path: str, plugins: Plugins
) -> Iterator[Problem]:
    """An unknown store, and NVMe without its folder."""
    if (problem := check_store(plugins, place.device, f"{path}.device")) is not None:
        yield problem
    if place.device.lower() == "nvme" and place.nvme_path is None:
        yield Problem(
            f"{path}.nvme_path", 'device "nvme" needs it', "name a folder on the NVMe device"
        )
