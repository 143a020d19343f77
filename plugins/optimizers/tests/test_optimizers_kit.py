"""Every optimizer passes the conformance kit."""

from __future__ import annotations

from collections.abc import Iterable

from ds_optimizers.plugin import OPTIMIZERS
from ds_testing import OptimizerConformance
from torch import Tensor


class Grown:
    """Stands in for what mup sets: both dimensions are twice those of the base model."""

    def ninf(self) -> int:
        return 2

    def width_mult(self) -> float:
        return 2.0

    def fanin_fanout_mult_ratio(self) -> float:
        return 1.0


class TestOptimizers(OptimizerConformance):
    plugin = "ds_optimizers.plugin"
    params = {name: {"lr": 0.01} for name in OPTIMIZERS}
    # The others are in tests/combinations/test_optimizer_layouts.py, with real axes.
    over_ranks = ("AdamW", "Lamb")

    def prepare(self, name: str, params: Iterable[Tensor]) -> None:
        if name.startswith("Mu") and name != "Muon":
            for param in params:
                param.infshape = Grown()  # type: ignore[attr-defined]
