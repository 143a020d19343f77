"""Offload trains exactly as one process of plain torch does, and as the same stage does without
it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from ds_testing.kits.train.partitioner import PartitionerConformance

SMALL = {"reduce_bucket_size": 200, "param_persistence_threshold": 10, "prefetch_bucket_size": 150}
CPU = {"device": "cpu", "pin_memory": True}
ALL3 = {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU, **SMALL}


class _Some(PartitionerConformance):
    """The kit, with the cases that offload can touch."""

    __test__ = False

    @pytest.mark.parametrize(
        ("name", "how", "world"),
        [
            ("plain-fp32-clip", "manual", 1),
            ("bf16", "direct", 1),
            ("shared", "direct", 2),
            ("frozen-accumulate", "manual", 2),
            ("bf16", "manual", 2),
            ("unused", "train_batch", 2),
            ("partly-used", "manual", 4),
            ("groups", "direct", 4),
        ],
    )
    def test_trains_as_one_process(self, name: str, how: str, world: int) -> None:
        leaf = {"leaf_module": {"classes": "_Net"}} if name == "partly-used" else {}
        self.config = {"zero_optimization": {**self.config["zero_optimization"], **leaf}}  # type: ignore[misc]
        super().test_trains_as_one_process(name, how, world)

    @pytest.mark.parametrize(("name", "clip"), [("ep2", 0.05), ("pp2-tp2", 0.05), ("pp2-ep2", 0.0)])
    def test_products_of_axes(self, name: str, clip: float) -> None:
        super().test_products_of_axes(name, clip)


@pytest.mark.fast_cases(test_products_of_axes=("pp2-ep2-0.0",))
class TestStage1(_Some):
    __test__ = True
    config: ClassVar[Mapping[str, Any]] = {
        "zero_optimization": {"stage": 1, "offload_optimizer": CPU, **SMALL}
    }


@pytest.mark.fast_cases(test_products_of_axes=("pp2-tp2-0.05",))
class TestStage2(_Some):
    __test__ = True
    config: ClassVar[Mapping[str, Any]] = {
        "zero_optimization": {"stage": 2, "offload_optimizer": CPU, "overlap_comm": True, **SMALL}
    }


@pytest.mark.fast_cases(test_products_of_axes=("pp2-ep2-0.0",))
class TestStage3(_Some):
    __test__ = True
    config: ClassVar[Mapping[str, Any]] = {"zero_optimization": ALL3}


@pytest.mark.fast_cases(test_products_of_axes=("ep2-0.05",))
class TestStage3InParts(_Some):
    """Some masters on the device, some on the host; on 4 ranks with axes, some parameters are of
    one rank only.
    """

    __test__ = True
    config: ClassVar[Mapping[str, Any]] = {
        "zero_optimization": {
            **ALL3,
            "offload_optimizer": {**CPU, "ratio": 0.5},
            "use_all_reduce_for_fetch_params": True,
        }
    }


FAR = {"device": "nvme", "nvme_path": tempfile.gettempdir()}


@pytest.mark.slow
class TestStage3OnDisk(_Some):
    """Weights, masters, states and gradients in a store that frees memory."""

    __test__ = True
    config: ClassVar[Mapping[str, Any]] = {
        "zero_optimization": {
            "stage": 3,
            **SMALL,
            "offload_optimizer": {**FAR, "pipeline_read": True, "pipeline_write": True},
            "offload_param": {**FAR, "max_in_cpu": 0, "buffer_count": 2, "buffer_size": 150},
        }
    }


@pytest.mark.slow
class TestStage1OnDisk(_Some):
    __test__ = True
    config: ClassVar[Mapping[str, Any]] = {
        "zero_optimization": {"stage": 1, "offload_optimizer": FAR, **SMALL}
    }


@pytest.mark.slow
class TestStage2OnDisk(_Some):
    __test__ = True
    config: ClassVar[Mapping[str, Any]] = {
        "zero_optimization": {"stage": 2, "offload_optimizer": FAR, **SMALL}
    }
