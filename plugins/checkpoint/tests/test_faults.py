"""A save that goes wrong leaves the checkpoint before it; a checkpoint that is wrong changes
nothing."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from checkpoint_faults import load, make, save
from ds_checkpoint.folder import files, tensorfile
from ds_testing import RemoteError
from ds_testing.processes import full_at
from torch import nn

import ds_core
from ds_core import comm
from ds_core.errors import CheckpointError

# -- a process that dies ---------------------------------------------------------------------------


def die_at(folder: str, tag: str, where: str, count: int, rank: int) -> None:
    """Save value 2, and die at the n-th call of something on one rank."""
    engine = make(2.0)
    if comm.rank() == rank:
        module: Any = {"os": os, "files": files, "tensorfile": tensorfile}[where.split(".")[0]]
        name = where.split(".")[1]
        real = getattr(module, name)
        calls = []

        def deadly(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) == count:
                os._exit(9)
            return real(*args, **kwargs)

        setattr(module, name, deadly)
    engine.save_checkpoint(folder, tag)


# Tag "a" is saved first, with value 1, and is what latest names; the save that dies has value 2.
# "a" once more is replaced, "b" is new. The last column: what loads after the crash.
BEFORE = [
    "tensorfile.write_tensors 1",
    "tensorfile.write_tensors 2",
    "files.write_file 1",
    "files.put_in_place 1",
    "os.replace 1",
]
CRASHES: list[Any] = [("a", where, 1.0) for where in BEFORE[::2]]
CRASHES += [pytest.param("a", where, 1.0, marks=pytest.mark.slow) for where in BEFORE[1::2]]
CRASHES += [pytest.param("b", where, 1.0, marks=pytest.mark.slow) for where in BEFORE]
# the old one has stepped aside, the new one has no name yet
CRASHES += [("a", "os.replace 2", 1.0)]
CRASHES += [
    ("a", where, 2.0)
    for where in ("files.discard 1", "os.replace 3", "files.write_latest 1", "os.replace 4")
]
CRASHES += [("b", where, 1.0) for where in ("files.write_latest 1", "os.replace 2")]


@pytest.mark.fast_cases(
    "a-tensorfile.write_tensors 1-1.0",
    "a-files.write_file 1-1.0",
    "a-os.replace 1-1.0",
    "a-os.replace 2-1.0",
    "a-files.discard 1-2.0",
    "a-os.replace 3-2.0",
    "a-os.replace 4-2.0",
    "b-files.write_latest 1-1.0",
)
@pytest.mark.parametrize("tag, where, expected", CRASHES)
def test_a_crash_leaves_a_whole_checkpoint(
    ranks: Any, tmp_path: Path, tag: str, where: str, expected: float
) -> None:
    ranks(1, save, str(tmp_path), 1.0, "a")
    place, _, count = where.partition(" ")
    with pytest.raises(RemoteError, match="exit code 9"):
        ranks(1, die_at, str(tmp_path), tag, place, int(count), 0)
    [[_, value]] = ranks(1, load, str(tmp_path))
    assert value == expected
    ranks(1, save, str(tmp_path), 3.0, tag)
    assert ranks(1, load, str(tmp_path)) == [[tag, 3.0]]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted({".lock", "a", tag, "latest"})


def test_a_dead_rank_leaves_the_previous_checkpoint(ranks: Any, tmp_path: Path) -> None:
    ranks(2, save, str(tmp_path), 1.0, "a")
    with pytest.raises(RemoteError):
        ranks(2, die_at, str(tmp_path), "a", "tensorfile.write_tensors", 1, 1)
    assert ranks(2, load, str(tmp_path)) == [["a", 1.0]] * 2


# -- errors while saving ---------------------------------------------------------------------------


def full_disk(folder: str, size: int, full_rank: int, what: str) -> str:
    engine = make(2.0)
    with full_at(size) if comm.rank() == full_rank else nullcontext():
        with pytest.raises(CheckpointError) as caught:
            if what == "16bit":
                engine.save_16bit_model(folder)
            else:
                engine.save_checkpoint(folder, "a", client_state={"many": list(range(20000))})
    assert comm.all_gather_json(comm.rank()) == [0, 1]  # the ranks are still in step
    return str(caught.value)


@pytest.mark.fast_cases("2000-0", "30000-0", "100-1")
@pytest.mark.parametrize("size, rank", [(100, 0), (2000, 0), (30_000, 0), (100, 1)])
def test_a_full_disk_on_any_rank_fails_all_and_harms_nothing(
    ranks: Any, tmp_path: Path, size: int, rank: int
) -> None:
    ranks(2, save, str(tmp_path), 1.0, "a")
    for message in ranks(2, full_disk, str(tmp_path), size, rank, "checkpoint"):
        assert f"rank {rank}: OSError" in message and "File too large" in message
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "a", "latest"]
    assert ranks(2, load, str(tmp_path)) == [["a", 1.0]] * 2


def test_a_full_disk_and_the_16bit_model(ranks: Any, tmp_path: Path) -> None:
    for message in ranks(2, full_disk, str(tmp_path), 1000, 0, "16bit"):
        assert "File too large" in message
    assert list(tmp_path.iterdir()) == []


def refused(folder: str, arguments: dict[str, Any], bad_rank: int) -> list[str]:
    engine = make(1.0)
    found = []
    bad = {
        "set": {"client_state": {"a": {"b": [1, {2}]}}},
        "keys": {"client_state": {"a": {3: 1}}},
        "complex": {"client_state": {"a": torch.zeros(1, dtype=torch.complex128)}},
        "tag": {"tag": "../up"},
    }[arguments["kind"]]
    mine: dict[str, Any] = bad if comm.rank() == bad_rank else {}
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder, **mine)
    found.append(str(caught.value))
    return found


@pytest.mark.parametrize(
    "kind, words",
    [
        ("set", ["client_state['a']['b'][1]", "sorted(it)"]),
        ("keys", ["client_state['a']", "str(key)"]),
        ("complex", ["client_state['a']", "view_as_real"]),
        ("tag", ["'../up'", "A-Z"]),
    ],
)
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_what_cannot_be_saved_is_refused_before_writing(
    ranks: Any, tmp_path: Path, kind: str, words: list[str], bad_rank: int
) -> None:
    for [message] in ranks(2, refused, str(tmp_path / "new"), {"kind": kind}, bad_rank):
        assert all(word in message for word in [*words, f"rank {bad_rank}"]), message
    assert list(tmp_path.iterdir()) == []


def complex_buffer(folder: str) -> str:
    model = nn.Linear(1, 1)
    model.register_buffer("freqs", torch.zeros(2, dtype=torch.complex128))
    engine, *_ = ds_core.initialize(model=model, config={"train_batch_size": 1})
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder)
    return str(caught.value)


def test_a_dtype_that_safetensors_lacks(ranks: Any, tmp_path: Path) -> None:
    [message] = ranks(1, complex_buffer, str(tmp_path / "new"))
    assert "module/freqs" in message and "complex128" in message and "view_as_real" in message
    assert not (tmp_path / "new").exists()


def empty_names() -> list[str]:
    engine = make(1.0)
    found = []
    for call in (engine.save_checkpoint, engine.load_checkpoint, engine.save_16bit_model):
        with pytest.raises(CheckpointError) as caught:
            call("")
        found.append(str(caught.value))
    return found


def test_empty_directory_names(ranks: Any) -> None:
    for [messages] in [ranks(1, empty_names)]:
        assert all("is empty; name a directory" in m for m in messages)


# -- tags ------------------------------------------------------------------------------------------


def different_tags(folder: str, mode: str) -> Any:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ds_checkpoint")
    logger.addHandler(handler)
    engine = make(1.0, checkpoint={"tag_validation": mode})
    try:
        engine.save_checkpoint(folder, f"tag{comm.rank()}")
    except CheckpointError as error:
        return str(error)
    finally:
        logger.removeHandler(handler)
    return [m for m in messages if "tag" in m and "saved" not in m]


@pytest.mark.parametrize("mode", ["ignore", "Warn", "FAIL"])
def test_tags_that_differ_between_ranks(ranks: Any, tmp_path: Path, mode: str) -> None:
    answers = ranks(2, different_tags, str(tmp_path), mode)
    names = sorted(p.name for p in tmp_path.iterdir())
    if mode == "FAIL":
        assert all("'tag0' on rank 0 but 'tag1' on rank 1" in a and "one tag" in a for a in answers)
        assert names == []
        return
    assert names == [".lock", "latest", "tag0"]
    assert all(len(messages) == (1 if mode == "Warn" else 0) for messages in answers)


def save_without_latest(folder: str) -> Any:
    engine = make(1.0)
    engine.save_checkpoint(folder, "x", save_latest=False)
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_checkpoint").addHandler(handler)
    for missing_ok in (False, True):
        with pytest.raises(
            CheckpointError, match=r"latest does not exist.*there are x: give one as tag="
        ):
            engine.load_checkpoint(folder, missing_ok=missing_ok)
    nowhere = folder + "/nowhere"
    found = engine.load_checkpoint(nowhere, missing_ok=True), engine.load_checkpoint(nowhere)
    logging.getLogger("ds_checkpoint").removeHandler(handler)
    assert engine.module.weight.eq(1).all()
    assert engine.load_checkpoint(folder, fallback=True)[0] == f"{folder}/x"
    return *found, messages


def test_without_latest(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2, save_without_latest, str(tmp_path))
    assert first[:2] == second[:2] == ((None, {}), (None, None))
    assert second[2] == [] and len(first[2]) == 1  # rank 0 tells
    assert "there is no checkpoint in" in first[2][0]
    assert ranks(2, load, str(tmp_path), "x") == [["x", 1.0]] * 2


HOLDER = """
import sys
from pathlib import Path
from ds_checkpoint.folder.lock import FolderLock
lock = FolderLock()
lock.take(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def save_beside_another_job(folder: str, half_made: str) -> Any:
    engine = make(1.0)
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder, "mine")
    assert Path(half_made).exists()  # the other job's save, under way, is not cleared away
    return str(caught.value)


def save_with_two_engines(folder: str) -> None:
    one = make(1.0)
    two = make(2.0)
    for tag in ("a", "b"):
        one.save_checkpoint(folder, f"one_{tag}")
        two.save_checkpoint(folder, f"two_{tag}")
    one.destroy()
    two.save_checkpoint(folder, "after")
    two.destroy()


def test_a_second_job_in_one_folder_is_told_at_once(ranks: Any, tmp_path: Path) -> None:
    half_made = tmp_path / ".tmp-theirs-0123456789abcdef"
    half_made.mkdir()
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert (
            other.stdout is not None
            and other.stdin is not None
            and other.stdout.readline() == "held\n"
        )
        for message in ranks(2, save_beside_another_job, str(tmp_path), str(half_made)):
            assert (
                f"another job is saving into {tmp_path} (host " in message
                and f"process {other.pid}," in message
            )
            assert "a separate save_dir" in message
        other.stdin.close()
        other.wait()
    ranks(2, save_with_two_engines, str(tmp_path))  # one job may have several engines
    ranks(1, save, str(tmp_path), 3.0, "b")  # of another process: destroyed engines have let go
    assert not half_made.exists()


def wrong_arguments(folder: str) -> list[str]:
    engine = make(1.0)
    found = []
    for call in (engine.save_checkpoint, engine.load_checkpoint, engine.save_16bit_model):
        for wrong in (None, 3, b"x"):
            with pytest.raises(CheckpointError) as caught:
                call(wrong)
            found.append(str(caught.value))
    for wrong in ([("epoch", 3)], "epoch", 3):
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(folder, client_state=wrong)
        found.append(str(caught.value))
    return found


def test_arguments_of_a_wrong_type(ranks: Any, tmp_path: Path) -> None:
    [messages] = ranks(1, wrong_arguments, str(tmp_path))
    assert all("name a directory" in m for m in messages[:9]) and "save_dir is None" in messages[0]
    assert [m.split(": ", 1)[1].split(";")[0] for m in messages[9:]] == [
        "client_state is a list",
        "client_state is a str",
        "client_state is a int",
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_missing_checkpoint_is_an_error(ranks: Any, tmp_path: Path) -> None:
    ranks(1, save, str(tmp_path), 1.0, "good")
    assert "there are good" in ranks(1, load, str(tmp_path), "bad")[0]
    assert "tag '../x'" in ranks(1, load, str(tmp_path), "../x")[0]
    shutil.rmtree(tmp_path / "good")
    assert "good does not exist" in ranks(1, load, str(tmp_path))[0]
