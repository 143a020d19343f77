"""The batch triple: train = micro x accumulation x data-parallel ranks (api.md 2.1, exactly)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from ds_core.config.core import CoreConfig

__all__ = ["Batch", "complete", "resolve_batch", "with_micro_batch_size", "with_train_batch_size"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Sizes in samples. train: per optimizer update over all ranks. micro: per rank and forward. gas: micro-batches."""

    train: int
    micro: int
    gas: int


def complete(train: int | None, micro: int | None, gas: int | None, dp_world: int) -> tuple[int, int, int]:
    """Fill in what was not given, by floor division; the result may still be inconsistent.

    Raises ConfigError when neither the train nor the micro batch size is given.
    """
    if train is not None and micro is not None:
        return train, micro, (train // micro) // dp_world if gas is None else gas
    if train is not None:
        steps = 1 if gas is None else gas
        return train, (train // dp_world) // steps, steps
    if micro is not None:
        steps = 1 if gas is None else gas
        return micro * steps * dp_world, micro, steps
    had = "nothing" if gas is None else f"only gradient_accumulation_steps {gas}"
    raise ConfigError(
        [
            Problem(
                "train_batch_size",
                f"a batch size is needed, and {had} is given",
                "set train_batch_size (samples per update over all ranks) or train_micro_batch_size_per_gpu",
            )
        ]
    )


def resolve_batch(core: CoreConfig, dp_world: int) -> Batch:
    """The three sizes of a run on `dp_world` data-parallel ranks.

    Raises ConfigError naming all four numbers when they do not multiply out.
    """
    given = (core.train_batch_size, core.train_micro_batch_size_per_gpu, core.gradient_accumulation_steps)
    train, micro, gas = complete(*given, dp_world)
    if min(train, micro, gas) > 0 and train == micro * gas * dp_world:
        return Batch(train, micro, gas)
    problem = Problem(
        "train_batch_size",
        f"train_batch_size {train} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {gas}"
        f" x {dp_world} data-parallel ranks (= {micro * gas * dp_world})",
        _mend(*given, dp_world),
    )
    raise ConfigError([problem])


def _mend(train: int | None, micro: int | None, gas: int | None, dp_world: int) -> str:
    if train is None:  # cannot be wrong: it is computed
        return ""
    unit = (micro or 1) * (gas or 1) * dp_world
    if micro is not None and gas is not None:
        return f"set train_batch_size to {unit}, or leave it out"
    below, above = train // unit * unit, (train // unit + 1) * unit
    near = f"{below} or {above}" if below else str(above)
    return f"train_batch_size must be a multiple of {unit}: use {near}"


def with_train_batch_size(batch: Batch, train: int, dp_world: int) -> Batch:
    """The batch with another train size: micro stays, accumulation follows.

    Raises ValueError unless `train` is a positive multiple of micro x `dp_world`.
    """
    unit = batch.micro * dp_world
    if isinstance(train, bool) or not isinstance(train, int) or train <= 0 or train % unit:
        raise ValueError(
            f"train batch size {train!r} must be a positive multiple of micro batch size {batch.micro}"
            f" x {dp_world} data-parallel ranks = {unit}"
        )
    return Batch(train, batch.micro, train // unit)


def with_micro_batch_size(batch: Batch, micro: int, dp_world: int) -> Batch:
    """The batch with another micro size: accumulation stays, train follows. Raises ValueError unless `micro` > 0."""
    if isinstance(micro, bool) or not isinstance(micro, int) or micro <= 0:
        raise ValueError(f"micro batch size {micro!r} must be a whole number > 0")
    return Batch(micro * batch.gas * dp_world, micro, batch.gas)
