"""The kit of transforms that divide a model among ranks passes what is right, and finds planted
faults.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from divided_modules import model
from ds_testing import RemoteError, ShardedTransformConformance


def divided(size: int, fault: str = "") -> dict[str, Any]:
    return {"divided_layers": {"size": size, "fault": fault}}


def zero(stage: int) -> dict[str, Any]:
    return {
        "zero_optimization": {
            "stage": stage,
            "param_persistence_threshold": 8,
            "reduce_bucket_size": 300,
        }
    }


@pytest.mark.fast_cases(test_trains_as_one_process=())
class TestDividedLayers(ShardedTransformConformance):
    axis = "divided"
    configs = {2: divided(2)}
    cut = (r"up\..*", r"down\.weight")
    frozen = (r"up\.weight", r"inp\.bias")
    load = ("divided_layers=divided_layers",)
    make_model = staticmethod(model)
    variants = {"": {}, "zero3": zero(3)}
    dtypes: ClassVar[tuple[str, ...]] = ("float64", "bfloat16")


@pytest.mark.slow
class TestDividedByFour(TestDividedLayers):
    configs = {2: divided(2), 4: divided(4)}
    data = (1,)
    variants = {f"zero{stage}": zero(stage) for stage in range(4)}
    dtypes = ("float64", "float32", "bfloat16")


FAULTS = {
    "start": (
        "parts_of_one_whole",
        "start with different values|not those of the first rank's model",
    ),
    "axes": ("parts_of_one_whole", "is cut, but ds_param_axes does not put it on 'divided'"),
    "slices": ("parts_of_one_whole", "is cut, but it is not in ds_run_state.SLICES"),
    "bias": ("evaluation", "eval_batch is off by"),
    "gradient": ("stays_the_same", "inp.* differs between ranks after two steps"),
    "stays": ("given_back", "after engine.destroy.., not as before"),
    "new": ("optimizer_of_the_users", "is not a parameter of the model"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    only, why = FAULTS[fault]
    kit: Any = type(
        "Kit", (TestDividedLayers,), {"configs": {2: divided(2, fault)}, "data": (1,)}
    )()
    (check,) = (name for name in dir(kit) if name.startswith("test_") and only in name)
    with pytest.raises((AssertionError, RemoteError), match=why):
        getattr(kit, check)()


def test_what_it_needs_is_told() -> None:
    class Empty(ShardedTransformConformance):
        axis = "divided"

    with pytest.raises(AssertionError, match="set `configs`"):
        Empty().test_evaluation()
