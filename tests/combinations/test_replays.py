"""Steps that dscore-numerics computes again draw the random numbers that they drew: those of
dscore-reproducibility are counted, not those of a generator.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
from ds_testing import run_ranks


class Records(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def warnings_of(samples: str, gas: int) -> list[str]:
    """What is logged in three steps, of which the first and the last are computed again."""
    import torch
    from ds_testing.truth import start
    from torch import nn

    records = Records()
    logging.getLogger("ds_numerics").addHandler(records)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.3), nn.Linear(9, 5), nn.Linear(5, 1))
    engine = start(
        model,
        gradient_accumulation_steps=gas,
        reproducibility={"samples": samples},
        numerics={"every": 2},
        zero_optimization={"stage": 2},
    )
    # What the first step cannot compare would not be compared later, either.
    for step in range(3):
        for _ in range(gas):
            engine.backward(engine(torch.randn(4, 6) + step).square().mean())
            engine.step()
    engine.destroy()
    logging.getLogger("ds_numerics").removeHandler(records)
    return records.texts


@pytest.mark.parametrize(
    ("samples", "gas"), [("interleaved", 2), pytest.param("blocks", 1, marks=pytest.mark.slow)]
)
def test_dropout_that_is_counted_is_the_same_in_a_replay(samples: str, gas: int) -> None:
    assert run_ranks(2, warnings_of, samples, gas) == [[], []]


def test_a_source_that_cannot_go_back_is_told() -> None:
    """The check of this file: without its place in the step, the dropout of a replay differs."""
    (texts,) = run_ranks(1, without_places)
    assert any("same bits twice" in text for text in texts)


def without_places() -> list[str]:
    from ds_reproducibility.forwards import Book

    def stay(self: Any, state: Any) -> None:
        """Does nothing."""

    kept = Book.go_on_from
    Book.go_on_from = stay  # type: ignore[method-assign]
    try:
        return warnings_of("interleaved", 2)
    finally:
        Book.go_on_from = kept  # type: ignore[method-assign]
