"""Offload trains exactly as one process of plain torch does, and as the same stage does without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from ds_core.testing.partitioner import PartitionerConformance

SMALL = {"reduce_bucket_size": 200, "param_persistence_threshold": 10, "prefetch_bucket_size": 150}
CPU = {"device": "cpu", "pin_memory": True}
ALL3 = {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU, **SMALL}


class _Some(PartitionerConformance):
    """The kit, with the cases that offload can touch."""

    __test__ = False
    names: ClassVar[tuple[str, ...]] = ()

    @pytest.mark.parametrize("world", [1, 2, 4])
    @pytest.mark.parametrize("how", ["manual", "direct"])
    @pytest.mark.parametrize(
        "name", ["plain-fp32-clip", "partly-used", "groups", "bf16", "shared", "frozen-accumulate"]
    )
    def test_trains_as_one_process(self, name: str, how: str, world: int) -> None:
        leaf = {"leaf_module": {"classes": "_Net"}} if name == "partly-used" else {}
        self.config = {"zero_optimization": {**self.config["zero_optimization"], **leaf}}  # type: ignore[misc]
        super().test_trains_as_one_process(name, how, world)


class TestStage1(_Some):
    __test__ = True
    config: ClassVar[Mapping[str, Any]] = {"zero_optimization": {"stage": 1, "offload_optimizer": CPU, **SMALL}}


class TestStage2(_Some):
    __test__ = True
    config: ClassVar[Mapping[str, Any]] = {
        "zero_optimization": {"stage": 2, "offload_optimizer": CPU, "overlap_comm": True, **SMALL}
    }


class TestStage3(_Some):
    __test__ = True
    config: ClassVar[Mapping[str, Any]] = {"zero_optimization": ALL3}
