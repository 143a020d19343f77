"""The train batch size that most numbers of ranks divide (torch-free).

A candidate is a micro batch size, or the least common multiple of all, times a highly composite
number: these have more divisors than any smaller number, and each divisor is a number of ranks that
can share the batch. The best candidate is the one with the most such numbers between min_gpus and
max_gpus.
"""

from __future__ import annotations

import bisect
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version
from pydantic import ValidationError

from ds_core.config import Batch
from ds_core.errors import ConfigError, Problem
from ds_elasticity.config import Elasticity

log = logging.getLogger("ds_core.elasticity")

SCHEDULERS_CONFIG = "DEEPSPEED_ELASTICITY_CONFIG"
"""The variable in which a scheduler passes on the section that it computed numbers of ranks from.
"""
OLDEST = Version("0.3.8")
HIGHLY_COMPOSITE = (
    *(
        1,
        2,
        4,
        6,
        12,
        24,
        36,
        48,
        60,
        120,
        180,
        240,
        360,
        720,
        840,
        1260,
        1680,
        2520,
        5040,
        7560,
        10080,
        15120,
        20160,
    ),
    *(
        25200,
        27720,
        45360,
        50400,
        55440,
        83160,
        110880,
        166320,
        221760,
        277200,
        332640,
        498960,
        554400,
        665280,
        720720,
    ),
)


class ElasticityError(ConfigError):
    """The section ``elasticity`` cannot be used."""


class ElasticityConfigError(ElasticityError):
    """The section ``elasticity`` is missing, off or wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The batch size cannot be divided among so many ranks."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """A batch size that many numbers of ranks share."""

    train: int
    """The batch size."""
    worlds: list[int]
    """Numbers of data-parallel ranks that divide it."""
    micro: int | None = None
    """The micro-batch of version 0.2; None in 0.1."""


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str,
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[int, list[int]] | tuple[int, list[int], int | None]:
    """(train batch size, numbers of ranks that divide it), and the micro batch size where it is
    known or asked for.

    ds_config: a whole config.
    target_deepspeed_version: the version that will run it.
    world_size: check that so many ranks divide the batch, and return their micro batch size.
        Version 0.2 needs a number of ranks: `world_size`, or the variable WORLD_SIZE.

    Raises ElasticityConfigError, ElasticityIncompatibleWorldSize, or ElasticityError for a version
    that is too old; ValueError when `ds_config` is no mapping.
    """
    if not isinstance(ds_config, Mapping):
        raise ValueError(f"ds_config must be a dict, not {type(ds_config).__name__}")
    section = _enabled_section(ds_config)
    _check_version(target_deepspeed_version)
    # Version 0.2 counts in whole hosts, so it cannot do without the number of ranks.
    current = world_size or (_world_of_environment() if section.version == 0.2 else 0)
    sizes = _sizes(section, current)
    log.info("elasticity: train batch size %d, numbers of ranks %s", sizes.train, sizes.worlds)
    if world_size > 0:
        if world_size not in sizes.worlds:
            raise ElasticityIncompatibleWorldSize(_incompatible(world_size, sizes))
        return sizes.train, sizes.worlds, _micro(section, sizes.train, world_size)
    if not return_microbatch:
        return sizes.train, sizes.worlds
    if section.version == 0.1:
        raise ElasticityConfigError(
            "return_microbatch needs world_size with elasticity version 0.1"
        )
    return sizes.train, sizes.worlds, sizes.micro


def run_batch(section: Elasticity, dp_world: int) -> Batch:
    """The batch triple of a run on `dp_world` data-parallel ranks.

    Raises ElasticityIncompatibleWorldSize.
    """
    sizes = _sizes(section, dp_world * section.model_parallel_size)
    # Each rank needs one sample at least; this message names the key to change.
    if sizes.train < dp_world:
        why = f"{section.max_train_batch_size} is too small for {dp_world} data-parallel ranks"
        fix = f"use at least {min(section.micro_batch_sizes) * dp_world}"
        raise ElasticityIncompatibleWorldSize(
            [Problem("elasticity.max_train_batch_size", why, fix)]
        )
    if dp_world not in sizes.worlds or sizes.train % dp_world:
        raise ElasticityIncompatibleWorldSize(
            [Problem("elasticity", _incompatible(dp_world, sizes))]
        )
    micro = _micro(section, sizes.train, dp_world)
    return Batch(sizes.train, micro, sizes.train // (micro * dp_world))


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether a config has the section ``elasticity``, and it is on."""
    return bool((ds_config.get("elasticity") or {}).get("enabled", False))


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Raises ElasticityConfigError unless a scheduler computed with the same section as this run.

    The scheduler's section is JSON in the variable DEEPSPEED_ELASTICITY_CONFIG; without it a
    warning is logged.
    """
    if SCHEDULERS_CONFIG not in os.environ:
        log.warning(
            "%s is not set: whether the scheduler knows this elasticity config is unknown",
            SCHEDULERS_CONFIG,
        )
    elif problems := scheduler_problems(_parsed(runtime_elastic_config_dict)):
        raise ElasticityConfigError(problems)


def scheduler_problems(section: Elasticity) -> list[Problem]:
    """Where the section that a scheduler passed on, if one did, differs from the run's."""
    if (text := os.environ.get(SCHEDULERS_CONFIG)) is None:
        return []
    try:
        theirs = _parsed(json.loads(text))
    except (json.JSONDecodeError, ElasticityConfigError) as error:
        return [Problem("elasticity", f"{SCHEDULERS_CONFIG} is not a section elasticity: {error}")]
    problems = []
    for key in ("max_train_batch_size", "micro_batch_sizes", "version"):
        if (mine := getattr(section, key)) != (other := getattr(theirs, key)):
            why = f"is {mine} here, but the scheduler computed with {other} ({SCHEDULERS_CONFIG})"
            problems.append(Problem(f"elasticity.{key}", why, "give both the same config"))
    return problems


# -- the section and its checks --------------------------------------------------------------------


def _enabled_section(config: Mapping[str, Any]) -> Elasticity:
    if "elasticity" not in config:
        raise ElasticityConfigError("the config has no section elasticity")
    if not elasticity_enabled(config):
        raise ElasticityConfigError('elasticity is off; set "enabled": true in its section')
    return _parsed(config["elasticity"])


def _parsed(given: Any) -> Elasticity:
    try:
        return Elasticity.model_validate(given)
    except ValidationError as error:
        from ds_core.config.translate import translate_errors

        problems = translate_errors(
            error, Elasticity, "elasticity", owner="dscore-elasticity", data=given
        )
        raise ElasticityConfigError(problems) from None


def _check_version(text: str) -> None:
    try:
        version = Version(text)
    except InvalidVersion:
        raise ElasticityError(f"target_deepspeed_version {text!r} is not a version") from None
    if version < OLDEST:
        raise ElasticityError(f"version {text} has no elasticity; it begins with {OLDEST}")


def _world_of_environment() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise ElasticityConfigError(
        "elasticity version 0.2 needs the number of ranks: give world_size, or set WORLD_SIZE (it "
        f"is {text!r})"
    )


def _incompatible(world: int, sizes: Sizes) -> str:
    return (
        f"{world} data-parallel ranks cannot share a train batch of {sizes.train}; "
        f"possible numbers of ranks are {', '.join(map(str, sizes.worlds)) or 'none'}"
    )


# -- the computation -------------------------------------------------------------------------------


def _sizes(section: Elasticity, gpus: int) -> Sizes:
    """gpus: the number of ranks at present; only version 0.2 needs it."""
    limit = section.max_train_batch_size
    low = section.min_gpus
    high = section.max_gpus
    if section.version == 0.1:
        return _most_divisible(section, limit, low, high)
    node = section.num_gpus_per_node
    parallel = section.model_parallel_size
    per_node = node // parallel
    # Version 0.2 adds and removes whole hosts: choose the batch of one data-parallel rank per host,
    # for numbers of hosts, and multiply it by the ranks per host.
    by_node = _most_divisible(section, limit // per_node, low // node, high // node)
    worlds = [nodes * per_node for nodes in by_node.worlds]
    if gpus // parallel in worlds:
        train = by_node.train * per_node
        return Sizes(train, worlds, _micro_of_02(section, train, gpus))
    # No number of nodes that was counted on: the largest (or smallest) batch for the ranks that are
    # there.
    ranks = gpus / node * per_node
    trains = [
        math.floor(limit / (micro * ranks)) * (micro * ranks) for micro in section.micro_batch_sizes
    ]
    found = (max if section.prefer_larger_batch else min)(trains)
    return Sizes(int(found), [int(ranks)], _micro_of_02(section, found, gpus))


def _most_divisible(section: Elasticity, limit: int, low: int, high: int) -> Sizes:
    """The candidate batch size up to about `limit` with the most numbers of ranks (or nodes) from
    `low` to `high`.
    """
    micros = section.micro_batch_sizes
    low = low or 1
    high = high or limit // min(micros)
    # The multiple of all micro batch sizes gives batches that every one of them divides.
    candidates = {_candidate(base, limit) for base in (*micros, math.lcm(*micros))}
    rows = [
        (len(worlds := _worlds(train, micros, low, high)), train, worlds) for train in candidates
    ]
    most = max(count for count, _, _ in rows)
    if most == 0 and not section.prefer_larger_batch:
        return Sizes(min(micros), [])
    # Several candidates may serve equally many numbers of ranks: `prefer_larger_batch` decides.
    best = [(train, worlds) for count, train, worlds in rows if count == most]
    return Sizes(*(max if section.prefer_larger_batch else min)(best))


def _candidate(base: int, limit: int) -> int:
    """`base` times the largest highly composite number that keeps it within `limit`; `base` where
    it is more itself.
    """
    if base >= limit:
        return base
    return HIGHLY_COMPOSITE[bisect.bisect_right(HIGHLY_COMPOSITE, limit // base) - 1] * base


def _worlds(train: int, micros: list[int], low: int, high: int) -> list[int]:
    """Each number from `low` to `high` that divides ``train / micro`` of some micro batch size,
    ascending.
    """
    parts = {train // micro for micro in micros if train % micro == 0}
    return sorted({n for part in parts for n in _divisors(part) if low <= n <= high})


def _divisors(number: int) -> set[int]:
    # Each divisor up to the square root has a partner above it.
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return {*small, *(number // n for n in small)}


def _micro_of_02(section: Elasticity, train: float, gpus: int) -> int | None:
    fits = [micro for micro in section.micro_batch_sizes if train // gpus % micro == 0]
    if not fits:
        return None
    return max(fits) if section.prefer_larger_batch else fits[0]


def _micro(section: Elasticity, train: int, world: int) -> int:
    """The largest micro batch size that divides one rank's share of the batch."""
    fits = [micro for micro in section.micro_batch_sizes if train // world % micro == 0]
    if not fits:
        raise ElasticityIncompatibleWorldSize(
            f"no micro-batch size of {section.micro_batch_sizes} divides {train // world}, "
            f"which is the share of each of {world} ranks in a train batch of {train}"
        )
    return max(fits)
