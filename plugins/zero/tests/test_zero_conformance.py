"""Every stage trains exactly as one process of plain torch would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from ds_testing.partitioner import CASES, WAYS, PartitionerConformance


@pytest.mark.slow
class TestStage1(PartitionerConformance):
    config: ClassVar[Mapping[str, Any]] = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 200}}


@pytest.mark.slow
class TestStage2(PartitionerConformance):
    config: ClassVar[Mapping[str, Any]] = {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 200, "overlap_comm": True}
    }


STAGE3 = {"stage": 3, "reduce_bucket_size": 200, "param_persistence_threshold": 10, "prefetch_bucket_size": 150}


class TestStage3(PartitionerConformance):
    config: ClassVar[Mapping[str, Any]] = {"zero_optimization": STAGE3}

    @pytest.mark.parametrize(("how", "world"), WAYS)
    @pytest.mark.parametrize("name", list(CASES))
    def test_trains_as_one_process(self, name: str, how: str, world: int) -> None:
        """A module that only some ranks run must be below a leaf."""
        leaf = {"leaf_module": {"classes": "_Net"}} if name == "partly-used" else {}
        self.config = {"zero_optimization": {**STAGE3, **leaf}}  # type: ignore[misc]
        super().test_trains_as_one_process(name, how, world)
