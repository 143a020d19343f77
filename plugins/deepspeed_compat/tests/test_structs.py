"""The seed's config objects."""

from __future__ import annotations

from typing import Any

import pytest
from ds_deepspeed_compat.configs.config import BatchConfig, Config, FP16Config, TrainingConfig

from ds_core.errors import ConfigError

TRIPLE = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def test_attributes_and_items_are_the_same() -> None:
    config = Config(a=1, b=Config(c=2))
    config["d"] = 4
    config.a = 5
    assert config["a"] == 5
    assert config.d == 4  # type: ignore[attr-defined]
    assert config["b"]["c"] == 2
    assert list(config) == ["a", "b", "d"]
    assert "d" in config
    with pytest.raises(KeyError):
        config["z"]
    with pytest.raises(AttributeError):
        config.z  # type: ignore[attr-defined]
    assert config.is_valid()


def test_from_dict_builds_the_nested_ones() -> None:
    config = TrainingConfig.from_dict(
        {"batch": {"train_batch_size": 8, "gradient_accumulation_steps": 2}, "fp16": {}}
    )
    assert isinstance(config.batch, BatchConfig)
    assert config.fp16 == FP16Config()
    assert config.is_valid()
    assert config.batch.train_micro_batch_size_per_gpu == 4


def test_defaults() -> None:
    assert (TrainingConfig().batch, TrainingConfig().fp16) == (None, None)
    assert [BatchConfig()[k] for k in TRIPLE] == [None] * 3
    assert (FP16Config().enabled, FP16Config().clip) == (None, None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((8, 2, None), (8, 2, 4)),
        ((8, None, 2), (8, 4, 2)),
        ((None, 2, 4), (8, 2, 4)),
        ((8, None, None), (8, None, None)),
        ((8, 0, None), (8, 0, None)),
    ],
)
def test_two_give_the_third(given: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    config = BatchConfig(**dict(zip(TRIPLE, given, strict=True)))
    config.resolve()
    assert tuple(config[k] for k in TRIPLE) == expected


@pytest.mark.parametrize(
    ("config", "valid"),
    [
        (
            BatchConfig(
                train_batch_size=16, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=4
            ),
            True,
        ),
        (
            BatchConfig(
                train_batch_size=8, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2
            ),
            False,
        ),
        (BatchConfig(train_batch_size=8), False),
        (BatchConfig(train_batch_size=True, gradient_accumulation_steps=1), False),
        (FP16Config(enabled=True, clip=1.0), True),
        (FP16Config(clip=-1), False),
        (FP16Config(clip=float("nan")), False),
        (FP16Config(enabled="yes"), False),
        (TrainingConfig(fp16=FP16Config(clip=-1)), False),
        (
            TrainingConfig(batch=BatchConfig(train_batch_size=2, gradient_accumulation_steps=4)),
            False,
        ),
    ],
)
def test_validity(config: Config, valid: bool) -> None:
    assert config.is_valid() is valid


def test_a_wrong_field_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'train_batch_size'"):
        BatchConfig(train_batchsize=8)
    with pytest.raises(ConfigError, match="known: enabled, clip"):
        FP16Config(qqq=1)
