"""The store ``nvme``."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from ds_nvme import NvmeStore
from ds_nvme.aio import AsyncIO
from ds_testing import PluginConformance, StateStoreConformance

from ds_core.accelerator import get_accelerator
from ds_core.errors import ConfigError
from ds_core.setup.compose import compose


class TestStore(StateStoreConformance):
    def make_store(self, ctx: Any, tmp_path: Path) -> NvmeStore:
        return NvmeStore(ctx, {"nvme_path": str(tmp_path)})


@pytest.mark.parametrize("engine", ["kernel aio", "threads", "python threads"])
class TestOtherEngines(StateStoreConformance):
    """And with small blocks, deep queues, several threads; and copies instead of exchanged
    memory."""

    @pytest.fixture(autouse=True)
    def _chosen(self, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.aio: dict[str, Any] = {"engine": engine, "block_size": 4096, "queue_depth": 3}
        if engine == "threads":
            self.aio |= {"intra_op_parallelism": 2, "single_submit": True, "overlap_events": False}
        if engine == "python threads":
            monkeypatch.setattr("ds_nvme.store.swapping", lambda: None)

    def make_store(self, ctx: Any, tmp_path: Path) -> NvmeStore:
        return open_store(tmp_path, aio=self.aio, pipeline_write=False)


class TestPlugin(PluginConformance):
    entry_point = "ds_nvme.plugin"


class TestSection(PluginConformance):
    entry_point = "ds_nvme.aio"
    section = "aio"
    good_config: ClassVar[Any] = {
        "block_size": 8192,
        "thread_count": 2,
        "engine": "threads",
        "checksum": False,
    }
    bad_configs: ClassVar[Any] = [
        {"block_size": 0},
        {"queue_depth": 0},
        {"thread_count": 1, "intra_op_parallelism": 1},
    ]


def test_the_section_alone_is_idle_and_gds_is_refused_where_it_would_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "ds_nvme"):
        assert compose({"aio": {"use_gds": True}}).config.section("aio") is not None
    assert "section aio has no effect: nothing is offloaded to NVMe" in caplog.text
    with pytest.raises(
        ConfigError, match=r"aio.block_size: .*must be a multiple of 4096, as 4096 is"
    ):
        compose({"aio": {"block_size": 1000}})
    pytest.importorskip("ds_zero")
    offload = {
        "zero_optimization": {
            "stage": 1,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/x"},
        }
    }
    with pytest.raises(ConfigError, match=r"aio.use_gds: GPUDirect storage is not supported"):
        compose({"aio": {"use_gds": True}, **offload})


def open_store(path: Path, aio: dict[str, Any] | None = None, **options: Any) -> NvmeStore:
    config = SimpleNamespace(section=lambda name: AsyncIO(**(aio or {})))
    ctx: Any = SimpleNamespace(accelerator=get_accelerator(), config=config, rank=0)
    return NvmeStore(ctx, {"nvme_path": str(path), **options})


def test_a_tensor_that_is_fetched_while_it_is_written_is_not_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    tensor = store.copy_in(torch.arange(10_000.0))
    view = tensor[5:7]
    for _ in range(3):
        store.evict([tensor])
        store.fetch([tensor])
        store.evict([torch.zeros(5)])
        store.wait([tensor])
        assert torch.equal(tensor, torch.arange(10_000.0))
    assert store.moved.read == 0
    store.evict([tensor])
    store.flush()
    written = store.moved.written
    store.fetch([tensor])
    store.evict([tensor])  # fetched, and never waited for
    store.fetch([tensor])
    store.wait([tensor])
    store.evict([tensor], changed=False)
    assert store.read(view).tolist() == [5, 6]
    assert (store.moved.written, store.moved.read) == (written, 3 * 40_960)
    store.close()
    assert not list(tmp_path.rglob("*.bin"))
