"""The batch triple, row by row and for all numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_core.config.core import (
    Batch,
    CoreConfig,
    resolve_batch,
    with_micro_batch_size,
    with_train_batch_size,
)
from ds_core.errors import ConfigError

SIZES = st.integers(1, 64)
OPTIONAL = st.none() | SIZES


def core(train: int | None = None, micro: int | None = None, gas: int | None = None) -> CoreConfig:
    values = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": gas,
    }
    return CoreConfig.model_validate(values)


@pytest.mark.parametrize(
    ("given_sizes", "world", "expected"),
    [
        ((16, 2, 4), 2, (16, 2, 4)),
        ((16, 2, None), 2, (16, 2, 4)),
        ((16, None, 4), 2, (16, 2, 4)),
        ((None, 2, 4), 2, (16, 2, 4)),
        ((16, None, None), 2, (16, 8, 1)),
        ((None, 2, None), 2, (4, 2, 1)),
    ],
)
def test_the_six_rows(given_sizes: tuple[Any, ...], world: int, expected: tuple[int, ...]) -> None:
    assert resolve_batch(core(*given_sizes), world) == Batch(*expected)


@given(OPTIONAL, OPTIONAL, OPTIONAL, st.integers(1, 16))
def test_the_result_multiplies_out_or_is_refused(
    train: int | None, micro: int | None, gas: int | None, world: int
) -> None:
    try:
        batch = resolve_batch(core(train, micro, gas), world)
    except ConfigError as error:
        (problem,) = error.problems
        text = str(problem)
        if train is None:
            assert micro is None
            return
        # It was refused with reason: no triple holds what was given.
        unit = (micro or 1) * (gas or 1) * world
        assert train != unit if micro and gas else train % unit
        assert str(train) in text
        assert str(world) in text
        return
    assert batch.train == batch.micro * batch.gas * world
    assert min(batch.train, batch.micro, batch.gas) > 0
    for have, want in ((batch.train, train), (batch.micro, micro), (batch.gas, gas)):
        assert want in (None, have)


@given(SIZES, SIZES, SIZES, st.integers(1, 16))
def test_the_fix_works(train: int, micro: int, gas: int, world: int) -> None:
    if train == micro * gas * world:
        assert resolve_batch(core(train, micro, gas), world).train == train
        return
    with pytest.raises(ConfigError) as caught:
        resolve_batch(core(train, micro, gas), world)
    proposed = int("".join(c for c in caught.value.problems[0].fix.split(",")[0] if c.isdigit()))
    assert resolve_batch(core(proposed, micro, gas), world) == Batch(proposed, micro, gas)


@given(SIZES, SIZES, st.integers(1, 16), SIZES)
def test_changing_the_train_size_changes_accumulation_only(
    micro: int, gas: int, world: int, new_gas: int
) -> None:
    batch = Batch(micro * gas * world, micro, gas)
    assert with_train_batch_size(batch, micro * new_gas * world, world) == Batch(
        micro * new_gas * world, micro, new_gas
    )
    assert with_micro_batch_size(batch, new_gas, world) == Batch(
        new_gas * gas * world, new_gas, gas
    )


@pytest.mark.parametrize("train", [0, -8, 7, 9, True, "8", 8.0])
def test_a_train_size_that_does_not_divide(train: Any) -> None:
    with pytest.raises(ValueError, match="positive multiple of micro-batch size 2 x 4"):
        with_train_batch_size(Batch(8, 2, 1), train, 4)


@pytest.mark.parametrize("micro", [0, -1, True, "2", 2.0])
def test_a_micro_size_that_is_none(micro: Any) -> None:
    with pytest.raises(ValueError, match="whole number > 0"):
        with_micro_batch_size(Batch(8, 2, 1), micro, 4)
