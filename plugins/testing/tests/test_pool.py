"""The worker pool: results, failures of every kind, and that one test leaves nothing for the
next."""

from __future__ import annotations

import importlib.util
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ds_testing import RemoteError, WorkerPool, run_ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2) as workers:
        yield workers


def rank_and_sum(start: float) -> tuple[int, torch.Tensor]:
    total = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), total


def echo(value: Any) -> Any:
    return value


def pid() -> int:
    return os.getpid()


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"boom from {rank}")


def raise_everywhere() -> None:
    raise KeyError(f"rank {dist.get_rank()}")


def raise_while_other_waits() -> None:
    if dist.get_rank() == 1:
        raise ValueError("left the others waiting")
    dist.barrier()


def leave(code: int) -> None:
    print("last words")
    if dist.get_rank() == 0:
        os._exit(code)


def kill_self() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def hang_in_here() -> None:
    print("going to sleep")
    time.sleep(1000)


def start_and_hang() -> None:
    print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid)
    time.sleep(1000)


def exit_system() -> None:
    raise SystemExit(7)


def unsendable() -> Any:
    return {"fine": 1, "deep": [object()]}


def environment() -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: os.environ[name] for name in names}


def spoil(folder: str) -> None:
    os.environ["SPOILT"] = "1"
    os.environ["RANK"] = "77"
    os.chdir(folder)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(99)
    torch.set_num_threads(3)
    torch.set_grad_enabled(False)
    sys.path.insert(0, "/spoilt")


def state() -> tuple[Any, ...]:
    numbers = (torch.rand(1).item(), random.random())
    flags = (torch.get_num_threads(), torch.is_grad_enabled(), str(torch.get_default_dtype()))
    return (
        os.environ.get("SPOILT"),
        os.environ["RANK"],
        os.getcwd(),
        numbers,
        flags,
        "/spoilt" in sys.path,
    )


def make_groups() -> int:
    group = dist.new_group([1, 0])
    assert group is not None
    return dist.get_world_size(group)


def destroy_world() -> bool:
    dist.destroy_process_group()
    return dist.is_initialized()


def own_world() -> int:
    dist.destroy_process_group()
    dist.init_process_group("gloo")  # env://, on the free MASTER_PORT
    value = torch.ones(1)
    dist.all_reduce(value)
    return int(value)


def variable() -> str | None:
    return os.environ.get("DS_POOL_TEST")


class Holder:
    @staticmethod
    def static(value: int) -> int:
        return value + dist.get_rank()

    def method(self) -> None:
        raise AssertionError


def test_results_come_by_rank(pool: WorkerPool) -> None:
    first, second = pool.run(rank_and_sum, 10.0)
    assert first == (0, torch.tensor([21.0]))
    assert second == (1, torch.tensor([21.0]))


@pytest.mark.parametrize("size", [1, 3])
def test_sizes(size: int) -> None:
    assert run_ranks(size, Holder.static, 5) == list(range(5, 5 + size))


def test_pool_is_reused_and_cached(pool: WorkerPool) -> None:
    assert tuple(pool.run(pid)) == tuple(pool.run(pid)) == pool.pids
    assert run_ranks(1, pid) == run_ranks(1, pid)


def test_plain_values_round_trip(pool: WorkerPool) -> None:
    value: dict[str, Any] = {
        "none": None,
        "bools": [True, False],
        "int": 2**70,
        "float": 0.1,
        "inf": -math.inf,
        "text": 'ü\n\ud800"',
        "bytes": b"\x00\xff",
        "tuple": (1, (2, [3])),
        "empty": [{}, [], ()],
        "!": {"!": "float"},
        "dtype": torch.bfloat16,
        "path": Path("a/b"),
    }
    for back in pool.run(echo, value):
        assert back == value
        assert [type(v) for v in back.values()] == [type(v) for v in value.values()]
    assert math.isnan(pool.run(echo, math.nan)[1])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.tensor(2.5, dtype=torch.float64),
        torch.tensor(7),
        torch.empty(0, 5, dtype=torch.int8),
        torch.tensor([1.5, -2.0, math.nan], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.arange(12).reshape(3, 4).t()[1:],
        torch.tensor([1.0, 448.0]).to(torch.float8_e4m3fn),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}",
)
def test_tensors_round_trip(pool: WorkerPool, tensor: torch.Tensor) -> None:
    for back in pool.run(echo, [tensor])[1]:
        assert back.dtype is tensor.dtype and back.shape == tensor.shape and not back.requires_grad
        assert torch.equal(
            back.contiguous().reshape(-1).view(torch.uint8),
            tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8),
        )
        back.view(-1)[:1] = 0  # the copy is writable


def test_large_tensor(pool: WorkerPool) -> None:
    big = torch.arange(3_000_000, dtype=torch.float32)
    assert all(torch.equal(big, back) for back in pool.run(echo, big))


@pytest.mark.parametrize(
    "value, place",
    [({"a": [1, {2}]}, r"args\[0\]\['a'\]\[1\] is a builtins.set"), ({3: 4}, "key 3")],
)
def test_values_that_cannot_travel(pool: WorkerPool, value: Any, place: str) -> None:
    with pytest.raises(TypeError, match=place):
        pool.run(echo, value)


def test_result_that_cannot_travel(pool: WorkerPool) -> None:
    with pytest.raises(RemoteError, match=r"result\['deep'\]\[0\] is a builtins.object"):
        pool.run(unsendable)


def test_exception_on_one_rank(pool: WorkerPool) -> None:
    with pytest.raises(RemoteError, match="rank 1 raised ValueError: boom from 1") as caught:
        pool.run(raise_on, 1)
    assert caught.value.rank == 1
    assert [(f.rank, f.kind) for f in caught.value.failures] == [(1, "raised")]
    assert "in raise_on\n    raise ValueError" in caught.value.failures[0].detail
    assert pool.pids == ()
    assert [r for r, _ in pool.run(rank_and_sum, 0.0)] == [0, 1]


def test_exception_on_every_rank_is_shown_for_each(pool: WorkerPool) -> None:
    with pytest.raises(RemoteError) as caught:
        pool.run(raise_everywhere)
    assert sorted((f.rank, f.what) for f in caught.value.failures) == [
        (0, "raised KeyError: 'rank 0'"),
        (1, "raised KeyError: 'rank 1'"),
    ]


def test_rank_left_waiting_is_stopped_and_its_stack_shown(pool: WorkerPool) -> None:
    with pytest.raises(RemoteError) as caught:
        pool.run(raise_while_other_waits)
    first, second = caught.value.failures
    assert (first.rank, first.kind, second.rank, second.kind) == (1, "raised", 0, "stopped")
    assert "raise_while_other_waits" in second.detail


def test_exit_of_one_rank(pool: WorkerPool) -> None:
    with pytest.raises(RemoteError, match="rank 0 ended itself with exit code 3") as caught:
        pool.run(leave, 3)
    assert caught.value.failures[0].kind == "died"
    assert "last words" in caught.value.failures[0].output


def test_signal_on_one_rank(pool: WorkerPool) -> None:
    with pytest.raises(RemoteError, match="rank 1 died of SIGKILL"):
        pool.run(kill_self)


def test_system_exit_is_a_failure_not_an_end(pool: WorkerPool) -> None:
    with pytest.raises(RemoteError, match="rank 0 raised SystemExit: 7"):
        pool.run(exit_system)


def test_hang_shows_every_stack(pool: WorkerPool) -> None:
    before = pool.run(pid)
    with pytest.raises(RemoteError, match=r"rank 0 did not answer within 0\.3 s") as caught:
        pool.run(hang_in_here, timeout=0.3)
    assert [(f.rank, f.kind) for f in caught.value.failures] == [(0, "hung"), (1, "hung")]
    for failure in caught.value.failures:
        assert "in hang_in_here" in failure.detail
        assert "going to sleep" in failure.output
    for process in before:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert not set(before) & set(pool.run(pid))


def test_what_a_test_started_ends_with_the_pool(pool: WorkerPool) -> None:
    with pytest.raises(RemoteError) as caught:
        pool.run(start_and_hang, timeout=1.0)
    _wait_until_gone([int(failure.output) for failure in caught.value.failures])


def test_worker_killed_between_runs_is_replaced(pool: WorkerPool) -> None:
    before = pool.run(pid)
    os.kill(before[1], signal.SIGKILL)
    deadline = time.monotonic() + 5
    while not pool._any_closed() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(before) & set(pool.run(pid))


def test_environment_of_a_rank(pool: WorkerPool) -> None:
    first, second = pool.run(environment)
    assert (first["RANK"], second["RANK"], second["LOCAL_RANK"]) == ("0", "1", "1")
    assert first["WORLD_SIZE"] == first["LOCAL_WORLD_SIZE"] == "2"
    assert first["MASTER_ADDR"] == "127.0.0.1" and first["MASTER_PORT"] == second["MASTER_PORT"]


def test_state_is_reset_between_runs(pool: WorkerPool, tmp_path: Path) -> None:
    before = pool.run(state)
    pids = pool.pids
    pool.run(spoil, str(tmp_path))
    assert pool.run(state) == before
    assert pool.pids == pids


def test_worker_sees_the_callers_environment(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DS_POOL_TEST", "here")
    assert pool.run(variable) == ["here", "here"]
    monkeypatch.delenv("DS_POOL_TEST")
    assert pool.run(variable) == [None, None]
    monkeypatch.chdir(tmp_path)
    assert {row[2] for row in pool.run(state)} == {str(tmp_path)}


def test_groups_of_a_test_do_not_reach_the_next(pool: WorkerPool) -> None:
    assert pool.run(make_groups) == [2, 2]
    pids = pool.pids
    assert pool.run(destroy_world) == [False, False]
    assert pool.run(own_world) == [2, 2]
    assert pool.run(rank_and_sum, 0.0)[0] == (0, torch.tensor([1.0]))
    assert pool.pids == pids


def test_files_with_one_module_name(pool: WorkerPool, tmp_path: Path) -> None:
    for folder in ("first", "second"):
        file = tmp_path / folder / "same_name_helper.py"
        file.parent.mkdir()
        file.write_text(f"def where():\n    return {folder!r}\n")
        spec = importlib.util.spec_from_file_location("same_name_helper", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["same_name_helper"] = module
        try:
            spec.loader.exec_module(module)
            assert pool.run(module.where) == [folder, folder]
        finally:
            del sys.modules["same_name_helper"]


def test_only_module_level_functions(pool: WorkerPool) -> None:
    def local() -> None:
        raise AssertionError

    for bad in (local, lambda: 1, Holder().method):
        with pytest.raises(TypeError, match="module level"):
            pool.run(bad)


def test_sizes_that_make_no_sense() -> None:
    for size in (0, -1, 10_000):
        with pytest.raises(ValueError, match=f"a pool of {size} workers"):
            WorkerPool(size)


SCRIPT = """
import os, signal, sys
sys.path.insert(0, {root!r})
from ds_testing.pool import run_ranks

def pid():
    return os.getpid()

if __name__ == "__main__":
    print(*run_ranks(2, pid), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[3])))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    _wait_until_gone(pids)


def _wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while (left := [p for p in pids if _alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
