"""The disk passes the kit of storages; what an address means, and what is never said of one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from checkpoint_faults import make
from ds_checkpoint.offline import open_saved
from ds_checkpoint.storages.conformance import StorageConformance
from ds_checkpoint.storages.contract import Storage
from ds_checkpoint.storages.disk import DiskStorage
from ds_checkpoint.storages.finding import check_folder, shown

from ds_core.errors import CheckpointError


class TestDisk(StorageConformance):
    def make_storage(self, tmp_path: Path, below: str = "") -> Storage:
        return DiskStorage(tmp_path / "run" / below)


SECRETS = [
    ("s3://key:hunter2@bucket/run", "s3://***@bucket/run"),
    ("s3://hunter2@bucket/run", "s3://***@bucket/run"),
    ("https://host/run?X-Amz-Signature=hunter2", "https://host/run?***"),
    ("gs://bucket/run#hunter2", "gs://bucket/run#***"),
    ("az://a:hunter2@b/c?sig=hunter2", "az://***@b/c?***"),
]


@pytest.mark.parametrize("url, told", SECRETS)
def test_a_url_with_a_secret_is_refused_and_never_shown(url: str, told: str) -> None:
    assert shown(url) == told
    for work in (lambda: check_folder(url, "save_dir"), lambda: open_saved(url).__enter__()):
        with pytest.raises(CheckpointError, match="may be a secret") as caught:
            work()
        assert "hunter2" not in str(caught.value) and told in str(caught.value)


def refused(url: str) -> list[str]:
    engine = make(1.0)
    found = []
    for call in (engine.save_checkpoint, engine.load_checkpoint, engine.save_16bit_model):
        with pytest.raises(CheckpointError) as caught:
            call(url)
        found.append(str(caught.value))
    return found


def test_an_engine_refuses_a_url_with_a_secret(ranks: Any) -> None:
    for url, told in SECRETS[:1]:
        for messages in ranks(2, refused, url):
            assert all(told in m and "hunter2" not in m for m in messages), messages


def test_a_scheme_that_nobody_offers(ranks: Any) -> None:
    [messages] = ranks(1, refused, "nowhere://bucket/run")
    assert all("no checkpoint storage is called 'nowhere'" in m for m in messages[:2])
    assert "is a URL, and a folder is needed here" in messages[2]


def test_folders_of_each_host_need_a_disk(ranks: Any) -> None:
    [message] = ranks(1, node_local)
    assert "checkpoint.use_node_local_storage" in message and "kept://x" in message


def node_local() -> str:
    import types

    plugin = types.ModuleType("kept_storage")
    plugin.ds_checkpoint_storages = lambda: {"kept": f"{__name__}:keep"}  # type: ignore[attr-defined]
    sys.modules["kept_storage"] = plugin
    engine = make(
        1.0,
        checkpoint={"use_node_local_storage": True},
        plugins={"load": ["kept_storage"]},
    )
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint("kept://x")
    return str(caught.value)


def keep(url: str, ctx: Any) -> Storage:
    return _Elsewhere(url)


class _Elsewhere(Storage):
    def __init__(self, url: str) -> None:
        self._url = url

    def path(self, name: str = "") -> str:
        return self._url + name

    def _never(self, *_: Any) -> Any:
        raise AssertionError("refused before anything is asked")

    tags = latest = find = open = itself = hold = begin = draft = next_serial = _never
    write_latest = remove = prune = _never
