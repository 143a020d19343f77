"""What can be said of a config's batch sizes and mesh before its processes are there (torch-free)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ds_core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from ds_core.config import Batch
    from ds_core.setup.compose import Composition

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def check_batch(chosen: Composition, world: int | None) -> Batch | None:
    """The batch sizes on `world` processes; None without a world, or where a front-end fills in
    one.

    Raises ConfigError for sizes that do not go with `world`, or with any world.
    """
    if not set(KEYS).isdisjoint(chosen.config.autos):
        return None
    if world is None:
        _check_for_any_world(chosen)
        return None
    _check_axes(chosen, world)
    return chosen.batch(chosen.mesh(world).size("batch"))


def _check_for_any_world(chosen: Composition) -> None:
    """Raises ConfigError where no number of data-parallel ranks gives whole batches."""
    if _chosen_by_a_plugin(chosen):
        return
    core = chosen.config.core
    train, micro = core.train_batch_size, core.train_micro_batch_size_per_gpu
    steps = core.gradient_accumulation_steps
    if train is None:
        return
    factors = [
        (key, size)
        for key, size in zip(KEYS[1:], (micro, steps), strict=True)
        if size is not None and size > 1
    ]
    unit = math.prod(size for _, size in factors)
    if train % unit:
        shown = " x ".join(f"{key} {size}" for key, size in factors)
        is_unit = f"{shown} = {unit}" if len(factors) > 1 else shown
        why = f"{train} is not a multiple of {is_unit}, so it fits no number of processes"
        below, above = train // unit * unit, (train // unit + 1) * unit
        fix = f"use {below} or {above}" if below else f"use {above}"
        raise ConfigError([Problem(KEYS[0], why, fix)])


def check_given(chosen: Composition) -> None:
    """Raises ConfigError where nothing says a batch size. Asked last: what else is wrong may be the
    reason.
    """
    core = chosen.config.core
    given = (core.train_batch_size, core.train_micro_batch_size_per_gpu)
    if not set(KEYS).isdisjoint(chosen.config.autos) or any(given) or _chosen_by_a_plugin(chosen):
        return
    chosen.batch(1)  # says what is missing


def _chosen_by_a_plugin(chosen: Composition) -> bool:
    try:
        return chosen.plugins.driver("ds_batch", config=chosen.config, dp_world=1) is not None
    except ConfigError:  # one rank is too few for them
        return True


def _check_axes(chosen: Composition, world: int) -> None:
    """Name the keys whose processes do not divide `world`."""
    sizes = {}
    for answer in chosen.plugins.ask("ds_mesh_axes", config=chosen.config):
        for axis in answer.value:
            if axis.inside is None and axis.size > 1:
                sizes[_key_of(chosen, answer.plugin.name, axis.name, axis.size)] = axis.size
    product = math.prod(sizes.values())
    if world % product:
        keys = " x ".join(f"{key} {size}" for key, size in sizes.items())
        why = f"{keys} needs a multiple of {product} processes; --world is {world}"
        raise ConfigError([Problem("", why)])


def _key_of(chosen: Composition, section: str, axis: str, size: int) -> str:
    """The key that makes an axis: the only one of its plugin's section that has its size."""
    written = chosen.config.raw.get(section)
    keys = [k for k, v in written.items() if v == size] if isinstance(written, dict) else []
    return f"{section}.{keys[0]}" if len(keys) == 1 else f"{section} ({axis})"
