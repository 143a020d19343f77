"""Where memory cannot be used: damage, a full memory, what others have planted, an error on the way
out. Training goes on, and the disk has its checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from ds_checkpoint_peer import room
from ds_testing import CheckpointerConformance
from ds_testing.processes import full_at
from peer_lives import begin, first_life, killed, rooms, second_life, steps_of

from ds_core import comm
from ds_core.errors import ConfigError
from ds_core.setup.compose import compose

TWO = [0, 1]


class TestCheckpointer(CheckpointerConformance):
    variants = {"peer": {"checkpoint_peer": {"folder": "nowhere", "every": 1}}}  # noqa: RUF012


def sets(folder: str, tag: str) -> list[Path]:
    return [r / tag for r in rooms(folder) if (r / tag / "manifest.json").exists()]


def damage(path: Path, how: str) -> None:
    file = path / "rank00000.safetensors"
    if how == "a byte":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif how == "a link":
        file.rename(path.parent / "moved")
        file.symlink_to(path.parent / "moved")
    elif how == "no manifest":
        (path / "manifest.json").unlink()
    else:
        (path / "manifest.json").write_bytes(b"{}")


@pytest.mark.parametrize(
    "how",
    [
        "a byte",
        *(pytest.param(h, marks=pytest.mark.slow) for h in ("a link", "no manifest", "another")),
    ],
)
def test_a_damaged_set_is_passed_over_and_the_disk_used(
    ranks: Any, tmp_path: Path, how: str
) -> None:
    folder = str(tmp_path)
    ranks(2, first_life, folder, "stage 3", TWO, True, {})
    damaged = sets(folder, "global_step3")
    assert len(damaged) == 2
    for path in damaged:
        damage(path, how)
    for where, client, _, _, said in ranks(2, second_life, folder, "stage 3", TWO, {}):
        assert where == ["disk", 2] and client == {"epoch": 7}
        assert how == "no manifest" or any("the set in memory is passed over" in s for s in said)


def every_step(folder: str) -> None:
    engine = begin(folder, "fp32", TWO, every=1)
    for step in range(4):
        steps_of(engine, 1)
        engine.wait_for_checkpoint()
        comm.barrier()
        if step == 1:
            engine.save_checkpoint(folder)


def test_the_older_set_is_taken_before_an_older_checkpoint(ranks: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    ranks(2, every_step, folder)
    tags = {p.parent.name for r in rooms(folder) for p in r.glob("*/manifest.json")}
    assert tags == {"global_step3", "global_step4"}  # two generations
    for path in sets(folder, "global_step4"):
        damage(path, "a byte")
    for where, *_ in ranks(2, second_life, folder, "fp32", TWO, {}):
        assert where == ["memory", 3]


def test_a_limit_of_bytes(ranks: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    for _, _, said in ranks(2, first_life, folder, "fp32", TWO, True, {"every": 1, "max_bytes": 9}):
        [text] = said  # once, though no set could be made five times
        assert "checkpoint_peer.max_bytes is 9" in text and "training continues" in text
    assert not sets(folder, "global_step3")
    for where, *_ in ranks(2, second_life, folder, "fp32", TWO, {"max_bytes": 9}):
        assert where == ["disk", 2]


def full_memory(folder: str) -> Any:
    with full_at(300) if comm.rank() else contextlib.nullcontext():
        losses, _, said = first_life(folder, "fp32", TWO, False, {})
    return len(losses), said


def test_memory_that_is_full_on_one_host(ranks: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    for count, said in ranks(2, full_memory, folder):
        assert count == 2 and len(said) == 1 and "no set in memory was made (rank 1:" in said[0]
    assert not sets(folder, "global_step3")
    assert not [p for r in rooms(folder) for p in r.glob(".tmp-*")]


def no_copy(folder: str) -> Any:
    """One rank has no memory for the copy of its states."""
    from ds_checkpoint_peer import checkpointer

    def fail(*_: Any) -> Any:
        raise RuntimeError("you tried to allocate 9 bytes")

    usual = checkpointer.snapshot
    checkpointer.snapshot = fail if comm.rank() == 0 else usual  # type: ignore[assignment]
    try:
        return first_life(folder, "fp32", TWO, False, {})[2]
    finally:
        checkpointer.snapshot = usual


def test_a_rank_without_memory_for_its_copy(ranks: Any, tmp_path: Path) -> None:
    for said in ranks(2, no_copy, str(tmp_path)):
        assert len(said) == 1 and "rank 0: RuntimeError: you tried to allocate" in said[0]
    assert not sets(str(tmp_path), "global_step3")


def planted(folder: str) -> Any:
    """Somebody has guessed the name of the second host's folder."""
    import socket

    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    socket.gethostname = lambda: f"host{comm.rank()}"
    memory = Path(folder) / "memory"
    memory.mkdir(exist_ok=True)
    if comm.rank() == 1:
        room.room_of(memory, folder).mkdir()
        room.room_of(memory, folder).chmod(0o777)
    comm.barrier()
    return first_life(folder, "fp32", TWO, True, {})[2]


def test_a_planted_folder(ranks: Any, tmp_path: Path) -> None:
    for said in ranks(2, planted, str(tmp_path)):
        [text] = said
        assert "others could have put files there" in text and "on disk alone" in text
    assert not sets(str(tmp_path), "global_step3")


def going_back(folder: str) -> Any:
    """A checkpoint by its tag: what came after it is another run's now."""
    engine = begin(folder, "fp32", TWO)
    steps_of(engine, 1)
    engine.save_checkpoint(folder)
    steps_of(engine, 2)
    engine.wait_for_checkpoint()
    comm.barrier()
    kept = len(sets(folder, "global_step3"))
    comm.barrier()
    engine.load_checkpoint(folder, tag="global_step1")
    comm.barrier()
    return kept, len(sets(folder, "global_step3")), engine.global_steps


def test_a_load_by_tag_drops_the_sets(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, going_back, str(tmp_path)) == [(2, 0, 1)] * 2


def ends(folder: str, error: bool) -> Any:
    engine = begin(folder, "fp32", TWO)
    with contextlib.suppress(ZeroDivisionError):
        try:
            steps_of(engine, 3)
            engine.wait_for_checkpoint()
            comm.barrier()
            if error:
                raise ZeroDivisionError
        finally:
            engine.destroy()
    comm.barrier()
    return len(rooms(folder))


@pytest.mark.parametrize("error", [False, True])
def test_an_error_on_the_way_out_leaves_the_sets_for_the_restart(
    ranks: Any, tmp_path: Path, error: bool
) -> None:
    assert ranks(2, ends, str(tmp_path), error) == [2 * error] * 2


def other_folder(folder: str) -> Any:
    engine = begin(folder, "fp32", TWO)
    engine.save_checkpoint(folder + "/base")
    steps_of(engine, 3)
    engine.wait_for_checkpoint()
    comm.barrier()
    path, _ = engine.load_checkpoint(folder + "/base")
    return path == folder + "/base/global_step0", len(sets(folder, "global_step3"))


def test_loads_of_other_folders_are_not_served_from_memory(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, other_folder, str(tmp_path)) == [(True, 2)] * 2


def with_autosave(folder: str) -> Any:
    from peer_lives import MODES

    MODES["saved"] = {"autosave": {"folder": folder, "every": 3, "on_sigterm": False}}
    engine = begin(folder, "saved", TWO)
    steps_of(engine, 3)
    engine.wait_for_checkpoint()
    comm.barrier()
    return (Path(folder) / "global_step3").is_dir(), len(sets(folder, "global_step3"))


def test_a_set_and_a_checkpoint_of_autosave_in_one_step(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, with_autosave, str(tmp_path)) == [(True, 2)] * 2


def test_states_on_nvme_are_refused() -> None:
    store = {"device": "NVMe", "nvme_path": "/x"}
    config = {"zero_optimization": {"stage": 2, "offload_optimizer": store}, "train_batch_size": 1}
    with pytest.raises(ConfigError) as caught:
        compose(config | {"checkpoint_peer": {"folder": "a"}})
    assert "zero_optimization.offload_optimizer.device: is nvme, and checkpoint_peer" in str(
        caught.value
    )


def pipeline_life(folder: str, first: bool) -> Any:
    import torch
    from ds_pipeline import LayerSpec, PipelineModule
    from peer_lives import BASE
    from torch import nn

    import ds_core

    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    torch.manual_seed(0)
    specs = [LayerSpec(nn.Linear, 8, 8) for _ in range(4)]
    model = PipelineModule(specs, num_stages=2, loss_fn=nn.functional.mse_loss)
    section = {"folder": folder, "every": 3, "memory": folder}
    engine = ds_core.initialize(model=model, config=BASE | {"checkpoint_peer": section})[0]
    batches = iter([(torch.full((2, 8), i / 9), torch.ones(2, 8)) for i in range(40)])
    path = None
    if first:
        losses = [engine.train_batch(batches).item() for _ in range(3)]
        engine.wait_for_checkpoint()
        comm.barrier()
        killed(engine)
    else:
        path, _ = engine.load_checkpoint(folder)
        for _ in range(6):
            next(batches)
    losses = [engine.train_batch(batches).item() for _ in range(2)]
    return path is not None and "dscore-peer" in path, losses


def test_a_pipeline(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("ds_pipeline")
    before = ranks(2, pipeline_life, str(tmp_path), True)
    after = ranks(2, pipeline_life, str(tmp_path), False)
    assert [b[1] for b in before] == [a[1] for a in after] and all(a[0] for a in after)
