"""Every stage trains exactly as one process of plain torch would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from ds_testing.kits.train.partitioner import PRODUCTS, TRAINED, PartitionerConformance


@pytest.mark.slow
class TestStage1(PartitionerConformance):
    config: ClassVar[Mapping[str, Any]] = {
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 200}
    }


@pytest.mark.slow
class TestStage2(PartitionerConformance):
    config: ClassVar[Mapping[str, Any]] = {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 200, "overlap_comm": True}
    }


STAGE3 = {
    "stage": 3,
    "reduce_bucket_size": 200,
    "param_persistence_threshold": 10,
    "prefetch_bucket_size": 150,
}


class TestStage3(PartitionerConformance):
    config: ClassVar[Mapping[str, Any]] = {"zero_optimization": STAGE3}

    @pytest.mark.parametrize(("name", "how", "world"), TRAINED)
    def test_trains_as_one_process(self, name: str, how: str, world: int) -> None:
        """A module that only some ranks run must be below a leaf."""
        leaf = {"leaf_module": {"classes": "_Net"}} if name == "partly-used" else {}
        self.config = {"zero_optimization": {**STAGE3, **leaf}}  # type: ignore[misc]
        super().test_trains_as_one_process(name, how, world)


class _InBlocks(PartitionerConformance):
    """Stage 3 with blocks of two ranks, or of as many as there are; key: which."""

    key: ClassVar[str]

    def _with(self, size: int, **more: Any) -> None:
        keys = {self.key: size} if size > 1 or self.key == "mics_shard_size" else {}
        self.config = {"zero_optimization": {**STAGE3, **keys, **more}}  # type: ignore[misc]

    @pytest.mark.parametrize(("name", "how", "world"), TRAINED)
    def test_trains_as_one_process(self, name: str, how: str, world: int) -> None:
        self._with(
            min(world, 2), **({"leaf_module": {"classes": "_Net"}} if name == "partly-used" else {})
        )
        super().test_trains_as_one_process(name, how, world)

    @pytest.mark.parametrize("clip", [0.0, 0.05])
    @pytest.mark.parametrize("name", list(PRODUCTS))
    def test_products_of_axes(self, name: str, clip: float) -> None:
        axes = PRODUCTS[name]
        self._with(max(min(2, 4 // axes.get("pp", 1) // axes.get("tp", 1)), axes.get("ep", 1)))
        super().test_products_of_axes(name, clip)

    @pytest.mark.parametrize("world", [2, 4])
    def test_overflow_is_agreed(self, world: int) -> None:
        self._with(2)
        super().test_overflow_is_agreed(world)

    @pytest.mark.parametrize("world", [1, 2])
    @pytest.mark.parametrize("name", ["unused", "shared"])
    def test_gradient_shards(self, name: str, world: int) -> None:
        self._with(1)
        super().test_gradient_shards(name, world)


@pytest.mark.slow
class TestHpz(_InBlocks):
    key = "zero_hpz_partition_size"


@pytest.mark.slow
class TestMics(_InBlocks):
    key = "mics_shard_size"
