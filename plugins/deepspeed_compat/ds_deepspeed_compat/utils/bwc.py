"""``deepspeed.utils.bwc``: what a model-parallel unit answers, under whichever of three names it
has.
"""

from __future__ import annotations

from typing import Any

_TENSOR = ("tensor_model_parallel", "slice_parallel", "model_parallel")
_PIPELINE = ("pipeline_model_parallel", "pipe_parallel")


def _ask(mpu: Any, words: tuple[str, ...], what: str, otherwise: Any) -> Any:
    """The answer of the first method that `mpu` has; otherwise: where there is no unit, or it has
    none of them.
    """
    names = [f"get_{word}_{what}" for word in words]
    method = next((getattr(mpu, name) for name in names if hasattr(mpu, name)), None)
    return otherwise if method is None else method()


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """This process's place among the ranks that divide the layers; 0 without a unit."""
    return int(_ask(mpu, _TENSOR, "rank", 0))


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """The number of ranks that divide the layers; 1 without a unit."""
    return int(_ask(mpu, _TENSOR, "world_size", 1))


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    """Their group; None without a unit."""
    return _ask(mpu, _TENSOR, "group", None)


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    """The number of stages of a pipeline; 1 without a unit."""
    return int(_ask(mpu, _PIPELINE, "world_size", 1))


def bwc_pipeline_parallel_group(mpu: Any = None) -> Any:
    """The group of the stages; None without a unit."""
    return _ask(mpu, _PIPELINE, "group", None)
