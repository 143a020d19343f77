"""The layouts of `OptimizerConformance`: what is right passes, and what is wrong is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ds_testing import OptimizerConformance

# So that "norm_optimizers" can be imported, on ranks too.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.mark.fast_cases(test_every_layout_trains_as_one_process=())
class TestNormed(OptimizerConformance):
    """Right in ZeRO, and refused where ranks have parts."""

    plugin = "norm_optimizers"
    load = ("norm_optimizers",)
    names = ("SaysSo",)


class Wrong(OptimizerConformance):
    plugin = "norm_optimizers"
    load = ("norm_optimizers",)
    names = ("DoesNot",)


def test_an_undeclared_norm_is_found() -> None:
    with pytest.raises(AssertionError, match=r"DoesNot under 'zero 1', float64: rank 0 has .* off"):
        Wrong().test_every_layout_trains_as_one_process(2, "float64")
