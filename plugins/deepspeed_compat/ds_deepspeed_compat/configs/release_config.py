"""What DeepSpeed's release makes of a config where ds_core alone would refuse it, or take it
otherwise.

`deepspeed.initialize` reads configs so. Each change is named once in the log.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from ds_core import comm
from ds_core.catalogue import documented
from ds_core.config.build import plugin_settings
from ds_core.config.core import CORE_KEYS, complete
from ds_core.config.source import ConfigSource
from ds_core.config.unknown import places
from ds_core.errors import nearest
from ds_core.plugins import Plugins
from ds_core.process import log_once

log = logging.getLogger("ds_core")

_DECAYED = (
    "config: optimizer.params.weight_decay is not given; torch_adam gives torch's AdamW its own "
    "default of 0.01, as in "
    "DeepSpeed's release; the documented default, which ds_core.initialize has, is 0"
)
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def as_released(source: ConfigSource) -> ConfigSource:
    """The config as `ds_core.initialize` is to read it."""
    config = source.raw
    steps: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (
        _cleaned,
        _known,
        _decayed,
        _timed,
        _counted,
    )
    for step in steps:
        config = step(config)
    return ConfigSource(config, source.origin)


def _cleaned(config: dict[str, Any]) -> dict[str, Any]:
    """`config` without what front-ends leave in it and DeepSpeed passes over; the log names it.

    That are values which are still ``"auto"``, whose defaults hold (they stay, and are an error,
    where an optimizer or a schedule is named), and keys of the top level with a dot
    (``"zero_optimization.reduce_bucket_size"``).
    """
    dropped: list[str] = []

    def kept(values: dict[str, Any], path: str) -> dict[str, Any]:
        dropped.extend(path + key for key, value in values.items() if value == "auto")
        rest = {key: value for key, value in values.items() if value != "auto"}
        return {
            key: kept(v, f"{path}{key}.") if isinstance(v, dict) else v for key, v in rest.items()
        }

    built = {key: config[key] for key in ("optimizer", "scheduler") if key in config}
    dotted = [key for key in config if "." in key]
    found = (
        kept(
            {key: value for key, value in config.items() if key not in built and key not in dotted},
            "",
        )
        | built
    )
    if dropped:
        log_once(
            log,
            logging.WARNING,
            f'config: {", ".join(dropped)}: "auto" was not filled in; the default is taken',
        )
    if dotted:
        log_once(
            log,
            logging.WARNING,
            f"config: {', '.join(dotted)}: no such keys; write sections as dicts",
        )
    return found


def _known(config: dict[str, Any]) -> dict[str, Any]:
    """`config` without keys of the top level that are like no key at all, which DeepSpeed passes
    over.

    One that is like a key may be that key, misspelt, and one that belongs into a section was meant
    to have an effect: both stay, and are errors.
    """
    strange = [key for key in config if key not in CORE_KEYS and key not in documented()]
    if not strange:
        return config
    plugins = Plugins(plugin_settings(ConfigSource(config, "the config")))
    sections = plugins.sections()
    inside = places(plugins.models(key for key in config if key not in CORE_KEYS))
    known = {*CORE_KEYS, *documented(), *sections, *plugins.disabled()}
    unlike = [
        key
        for key in strange
        if key not in known and nearest(key, known) is None and key not in inside
    ]
    if unlike:
        text = (
            f"config: {', '.join(unlike)}: no such keys, and like none; passed over, as "
            "DeepSpeed "
            "does"
        )
        log_once(log, logging.WARNING, text)
    return {key: value for key, value in config.items() if key not in unlike}


def _decayed(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with the weight decay that ``torch_adam`` has in DeepSpeed's release; the log says
    so.
    """
    optimizer = config.get("optimizer")
    params = optimizer.get("params") if isinstance(optimizer, dict) else None
    if not isinstance(optimizer, dict) or not isinstance(params, dict) or "weight_decay" in params:
        return config
    name = str(optimizer.get("type")).lower()
    if params.get("torch_adam") is not True or not (
        name == "adamw" or (name == "adam" and params.get("adam_w_mode", True))
    ):
        return config
    log_once(log, logging.INFO, _DECAYED)
    return {**config, "optimizer": {**optimizer, "params": {**params, "weight_decay": 0.01}}}


def _timed(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with ``wall_clock_breakdown`` where the flops profiler is on, which turns it on in
    DeepSpeed.
    """
    profiler = config.get("flops_profiler")
    if (
        not isinstance(profiler, dict)
        or profiler.get("enabled") is not True
        or find_spec("ds_step_log") is None
    ):
        return config
    return {**config, "wall_clock_breakdown": True}


def _counted(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with the sizes of batches that DeepSpeed has where its config divides layers
    (``autotp_size``).

    It takes every rank for a data-parallel one then: train_batch_size is micro x accumulation x all
    ranks. What ranks do is the same with the micro-batch and the accumulation alone, so these stay.
    Sizes that are right for the data-parallel ranks are left as they are.
    """
    section = config.get("tensor_parallel")
    tp = section.get("autotp_size") if isinstance(section, dict) else None
    train, micro, gas = (config.get(key) for key in _SIZES)
    sizes = [size for size in (tp, train, micro, gas) if size is not None]
    if (
        not all(type(size) is int and size > 0 for size in sizes)
        or tp in (None, 1)
        or train is None
    ):
        return config
    assert isinstance(tp, int)
    ranks = comm.world_size() if comm.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if ranks % tp or (
        micro is not None and gas is not None and train == micro * gas * (ranks // tp)
    ):
        return config
    whole, micro, gas = complete(train, micro, gas, ranks)
    if min(micro, gas) < 1 or whole != micro * gas * ranks:
        return config
    log_once(
        log,
        logging.WARNING,
        f"config: train_batch_size {train} counts all {ranks} ranks, as DeepSpeed does with "
        f"tensor_parallel.autotp_size {tp}; "
        f"{ranks // tp} of them have different data, so an update sees "
        f"{micro * gas * (ranks // tp)} samples",
    )
    rest = {key: value for key, value in config.items() if key not in _SIZES}
    return {**rest, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": gas}
