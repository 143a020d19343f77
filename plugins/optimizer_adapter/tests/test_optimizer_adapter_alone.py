"""The declaration and the measurement, which need no other package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from ds_optimizer_adapter import measure_grain
from ds_testing import PluginConformance
from torch.optim import SGD, Adafactor, AdamW, Optimizer


class TestPlugin(PluginConformance):
    entry_point = "ds_optimizer_adapter.plugin"
    section = "optimizer_adapter"
    good_config = {"grain": "tensor"}  # noqa: RUF012


class Scaled(Optimizer):
    """SGD with the size of what `sizes` gives for each group of tensors."""

    def __init__(self, params: Iterable[Any], together: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.together = together

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        for param in params:
            seen = params if self.together else [param]
            norm = torch.stack([p.grad.norm() for p in seen]).norm()
            param -= 0.1 * param.grad / norm


class Noisy(SGD):
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.grad += torch.randn_like(param)
        super().step()


class Idle(SGD):
    def step(self) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("make", "grain"),
    [
        (lambda params: SGD(params, lr=0.1, momentum=0.9), "element"),
        (lambda params: AdamW(params, lr=0.1), "element"),
        (lambda params: Adafactor(params, lr=0.1), "tensor"),
        (lambda params: Scaled(params, together=False), "tensor"),
        (lambda params: Scaled(params, together=True), "model"),
        (lambda params: Noisy(params, lr=0.1), None),
        (lambda params: Idle(params, lr=0.1), None),
        (lambda params: 1 / 0, None),
    ],
    ids=["SGD", "AdamW", "Adafactor", "norms", "a global norm", "noise", "nothing", "an error"],
)
def test_a_grain_is_measured(make: Any, grain: str | None) -> None:
    measured = measure_grain(make)
    assert measured.grain == grain, measured
    assert measured.why


def test_a_measurement_draws_none_of_the_program_s_random_numbers() -> None:
    before = torch.get_rng_state()
    measure_grain(lambda params: Noisy(params, lr=0.1))
    assert torch.equal(torch.get_rng_state(), before)


def test_it_works_where_gradients_are_off() -> None:
    with torch.no_grad():
        assert measure_grain(lambda params: AdamW(params, lr=0.1)).grain == "element"
