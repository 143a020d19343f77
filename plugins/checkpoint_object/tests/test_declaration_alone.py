"""The declaration, and what one process does with a bucket in memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_checkpoint.storages.conformance import StorageConformance
from ds_checkpoint.storages.contract import Storage
from ds_checkpoint.storages.finding import open_storage as find
from ds_checkpoint_object.bucket import cause_of
from ds_checkpoint_object.opening import open_storage
from ds_testing import PluginConformance
from ds_testing.one_process import one_process_engine

from ds_core.errors import CheckpointError

CONFIG: dict[str, Any] = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}


class TestPlugin(PluginConformance):
    entry_point = "ds_checkpoint_object.plugin"
    section = "checkpoint_object"
    good_config = {"timeout": 5, "part_size": 8 << 20, "spool": False}  # noqa: RUF012
    bad_configs = (
        {"timeout": 0},
        {"part_size": 1},
        {"requests": 0},
        {"lease_seconds": 0.1},
        {"secret_key": "x"},
    )


class TestMemory(StorageConformance):
    def make_storage(self, tmp_path: Path, below: str = "") -> Storage:
        return open_storage(f"memory://{tmp_path.name}/run/{below}".rstrip("/"), None)


def test_an_engine_saves_and_resumes() -> None:
    with one_process_engine(
        torch.nn.Linear(3, 2), CONFIG | {"checkpoint": {"keep_last": 2}}
    ) as run:
        for _ in range(3):
            run.backward(run(torch.ones(1, 3)).sum())
            run.step()
            run.save_checkpoint("memory://engine/runs", client_state={"at": run.global_steps})
        wanted = [p.detach().clone() for p in run.module.parameters()]
        with torch.no_grad():
            run.module.weight.zero_()
        path, client = run.load_checkpoint("memory://engine/runs")
        assert (path, client) == ("memory://engine/runs/global_step3", {"at": 3})
        assert all(map(torch.equal, run.module.parameters(), wanted))
        assert find("memory://engine/runs", "x").tags() == ["global_step3", "global_step2"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "has no bucket"),
        ("s3:///run", "has no bucket"),
        ("s3://bu cket/run", "has no bucket"),
        ("s3://bucket/../other", "'..' cannot be a part of a key"),
        ("s3://bucket/a//b", "has // in its path"),
        ("s3://bucket/a\nb", "has no bucket"),
    ],
)
def test_urls_that_name_no_place(url: str, words: str) -> None:
    with pytest.raises(CheckpointError, match="s3:") as caught:
        find(url, "save_dir")
    assert words in str(caught.value)


def test_a_url_that_went_through_a_path() -> None:
    with pytest.raises(CheckpointError, match="was a URL before it became a Path"):
        find(Path("s3://bucket/run"), "save_dir")


def test_what_a_store_says_is_told_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-secret")
    monkeypatch.setenv("AZURE_STORAGE_SAS_KEY", "hunter3-sas")
    text = (
        "Error performing GET http://h/b?sig=hunter1 with hunter2-secret and hunter3-sas\n\n"
        "Debug source: hunter4"
    )
    told = cause_of(RuntimeError(text))
    assert told == "Error performing GET http://h/b?*** with *** and ***"
    assert len(cause_of(RuntimeError("x" * 5000))) < 400


def test_importing_the_declaration_loads_no_library() -> None:
    import subprocess

    code = "import sys, ds_checkpoint_object.plugin; print({'obstore', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
