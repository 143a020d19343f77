"""The keys of offload: each has its effect, or says why it cannot; and the copies keep their
order."""

from __future__ import annotations

import ctypes
import gc
import math
import resource
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ds_optimizers import DeepSpeedCPUAdam
from ds_state_stores import StateStore
from ds_testing import run_ranks
from ds_testing.truth import start
from torch import Tensor, nn

from ds_core.accelerator.cpu import CpuAccelerator
from ds_core.errors import ConfigError, UsageError
from plugins.zero.tests.offload_models import host_grads

CPU = {"device": "cpu"}
STORE = "plugins.zero.tests.disk_store"


def engine_of(zero: dict[str, Any], model: nn.Module | None = None, **more: Any) -> Any:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    zero = {"param_persistence_threshold": 0, **zero}
    return start(
        model or nn.Linear(3, 3),
        **{
            "micro": 1,
            "clip": 1.0,
            "optimizer": optimizer,
            "zero_optimization": zero,
            **more,
        },
    )


# -- errors ----------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"stage": 0, "offload_optimizer": CPU},
        r"zero_optimization\.offload_optimizer\.device: stage 0",
    ),
    (
        {"stage": 2, "offload_optimizer": {**CPU, "ratio": 0.5}},
        r"zero_optimization\.offload_optimizer\.ratio: 0\.5 ",
    ),
    (
        {"stage": 1, "offload_optimizer": {"device": "cup"}},
        r"no state store is called 'cup'; did you mean 'cpu'\?",
    ),
    (
        {"stage": 3, "offload_optimizer": {"device": "nvme"}},
        r"offload_optimizer\.nvme_path: device \"nvme\" needs it",
    ),
    (
        {"stage": 3, "offload_param": {"device": "nvme"}},
        r"offload_param\.nvme_path: device \"nvme\" needs it",
    ),
    (
        {"stage": 3, "offload_optimizer": {**CPU, "cpuadam_cores_perc": 80}},
        r"cpuadam_cores_perc: must .* <= 1, not 80",
    ),
    (
        {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp", "super_offload": True},
        },
        r"super_offload: needs states that stay in memory.*cpu",
    ),
]


@pytest.mark.usefixtures("clean_ds")
@pytest.mark.parametrize(("zero", "told"), WRONG)
def test_what_cannot_be_offloaded_is_named_before_anything_starts(
    zero: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        engine_of(zero)


@pytest.mark.usefixtures("clean_ds")
@pytest.mark.parametrize("given", ["object", "function"])
def test_an_optimizer_of_the_users_needs_permission_with_offload(given: str) -> None:
    def run(zero: dict[str, Any], kind: Any = torch.optim.AdamW, **more: Any) -> bool:
        model = nn.Linear(3, 3)
        made: Any = kind(model.parameters()) if given == "object" else kind
        untested = {"zero_allow_untested_optimizer": True}
        engine = engine_of({"stage": 2, **zero}, model, optimizer=made, **untested, **more)
        engine.backward(engine(torch.ones(1, 3)).sum())
        engine.step()
        applied = engine.was_step_applied()
        engine.destroy()
        return applied

    with pytest.raises(UsageError, match=r'set "zero_force_ds_cpu_optimizer": false'):
        run({"offload_optimizer": CPU})
    assert run({"offload_optimizer": CPU}, zero_force_ds_cpu_optimizer=False)
    assert run({"offload_optimizer": CPU}, DeepSpeedCPUAdam)  # what accelerate puts in its place
    assert run({})
    assert run({"offload_optimizer": {"device": "none", "pin_memory": True}})


# -- where states rest -----------------------------------------------------------------------------


def placed(ratio: float) -> dict[str, Any]:
    """The share of elements whose masters are offloaded, by the model's order, and the largest
    parameter's share.
    """
    sizes = [(7, 11), (11, 40), (40, 3), (3, 3), (3, 19)]
    model = nn.Sequential(*(nn.Linear(*s) for s in sizes))
    engine = engine_of(
        {"stage": 3, "offload_optimizer": {**CPU, "ratio": ratio}}, model, bf16={"enabled": True}
    )
    there = {p for b in engine.partitioner.buckets if b.masters.movable == [] for p in b.params}
    order = [p in there for p in model.parameters()]
    counts = {p: math.prod(p.ds_shape) for p in model.parameters()}
    total = sum(counts.values())
    found = {
        "share": sum(counts[p] for p in there) / total,
        "largest": max(counts.values()) / total,
        "suffix": order == sorted(order),
        "order": order,
    }
    engine.destroy()
    return found


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_ratio(ratio: float) -> None:
    first, second = run_ranks(2, placed, ratio)
    assert first == second
    assert first["suffix"]
    assert abs(first["share"] - ratio) <= (first["largest"] / 2 if 0 < ratio < 1 else 0)


class Pinning(CpuAccelerator):
    """A CPU that remembers what was asked to be page-locked."""

    def __init__(self) -> None:
        self.pinned: list[Tensor] = []

    def pin(self, tensor: Tensor) -> Tensor:
        self.pinned.append(tensor)
        return tensor


@pytest.mark.usefixtures("clean_ds")
@pytest.mark.parametrize("wanted", [True, False])
def test_pin_memory(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Pinning()
    monkeypatch.setattr("ds_core.setup.opening.get_accelerator", lambda plugins: device)
    offload = {**CPU, "pin_memory": wanted}
    engine = engine_of(
        {"stage": 3, "offload_optimizer": offload, "offload_param": offload}, bf16={"enabled": True}
    )
    engine.backward(engine(torch.ones(1, 3, dtype=torch.bfloat16)).sum())
    engine.step()
    held = {t.untyped_storage()._cdata for t in device.pinned}
    wants = [b.weights.shard for b in engine.partitioner.buckets] + [
        b.masters.flat for b in engine.partitioner.buckets
    ]
    wants += host_grads(engine)
    assert wants
    assert [t.untyped_storage()._cdata in held for t in wants] == [wanted] * len(wants)
    engine.destroy()


# -- copies ----------------------------------------------------------------------------------------


class Lazy(torch.utils._python_dispatch.TorchDispatchMode):
    """Copies that need not wait happen only when somebody waits for an event that was recorded
    after them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[Callable[[], Any]] = deque()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and len(args) > 2 and args[2]:
            self.queue.append(lambda: func(args[0], args[1]))
            self.most = max(self.most, len(self.queue))
            return args[0]
        return func(*args, **(kwargs or {}))

    def new_event(self) -> Any:
        mark: list[Callable[[], Any]] = []

        def synchronize() -> None:
            while any(work in mark for work in self.queue):
                self.queue.popleft()()

        return SimpleNamespace(
            record=lambda: mark.extend(self.queue),
            synchronize=synchronize,
            query=lambda: not any(work in mark for work in self.queue),
        )


def test_the_host_waits_for_copies_and_only_for_those_it_needs() -> None:
    from ds_state_stores import HostStore
    from ds_zero.offload.placement import Transfers

    from ds_core.kernels import Kernels
    from ds_core.plugins import Plugins

    device = Lazy()
    accelerator = SimpleNamespace(new_event=device.new_event, pin=lambda t: t)
    ctx: Any = SimpleNamespace(accelerator=accelerator, kernels=Kernels(Plugins()))
    transfers = Transfers(ctx, HostStore(ctx, {"pin_memory": True}))
    parts = [torch.full((n,), float(n), dtype=torch.bfloat16) for n in (4, 9, 2, 9, 6)]
    hosts = [torch.full((len(p),), torch.nan) for p in parts]
    back = [torch.zeros_like(p) for p in parts]
    same = [torch.zeros(len(p)) for p in parts]
    with device:
        for times in range(2):
            for part, host in zip(parts, hosts, strict=True):
                transfers.to_host(host, part, add=times == 1)
        assert device.queue  # the last two are still on their way
        transfers.synchronize()
        assert not device.queue
        assert all(torch.equal(h, 2 * p.float()) for h, p in zip(hosts, parts, strict=True))
        for target, other, host in zip(back, same, hosts, strict=True):
            transfers.to_device(target, host)
            transfers.to_device(other, host)
        assert device.queue
        transfers.synchronize()
    assert device.most >= 2
    assert all(torch.equal(b.float(), h) for b, h in zip(back, hosts, strict=True))
    assert all(torch.equal(s, h) for s, h in zip(same, hosts, strict=True))


class LazyDevice(Lazy):
    """One stream of a device: its own work sees its copies, the host sees them after an event only.

    host: addresses of the storages of stores; every other tensor is the device's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host: set[int] = set()
        self.open: deque[set[int]] = deque()  # the device's side of each copy in the queue

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        mine = {t.untyped_storage()._cdata for t in flat} - self.host
        while self.queue and any(mine & side for side in self.open):
            self.queue.popleft()()
        before = len(self.queue)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.queue) > before:
            assert len(flat) == 2
            # only copies between the host and the device are asked for without waiting
            assert len(mine) == 1
            self.open.append(mine)
            work = self.queue.pop()
            self.queue.append(lambda: (work(), self.open.popleft()))
        return out


@pytest.mark.fast_cases("none-False-bf16", "none-True-fp32", "cpu-False-fp32", "cpu-True-bf16")
@pytest.mark.usefixtures("clean_ds")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("weights", ["none", "cpu"])
def test_nothing_reads_what_a_copy_has_not_brought_yet(
    dtype: str, disk: bool, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that does copies as late as it may trains to the same bits, and saves and loads the
    same.
    """
    device = LazyDevice()

    class Accelerator(CpuAccelerator):
        def new_event(self) -> Any:
            return device.new_event()

    def run(folder: Path, **more: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(9, 9) for _ in range(4)))
        states = {"device": "disk"} if disk else {**CPU, "ratio": 0.7}
        zero: dict[str, Any] = {"stage": 3, "reduce_bucket_size": 50}
        zero |= {"offload_optimizer": states, "offload_param": {"device": weights}}
        if disk:
            more |= {"plugins": {"load": [f"disk={STORE}"]}, "disk": {"path": str(tmp_path)}}
        engine = engine_of(
            zero, model, gradient_accumulation_steps=2, bf16={"enabled": dtype == "bf16"}, **more
        )
        found = []
        for step in range(6):
            x = torch.full((1, 9), 0.1 * step, dtype=engine.ctx.precision.param or torch.float32)
            engine.backward(engine(x).float().square().sum())
            engine.step()
            if step == 3:
                engine.save_checkpoint(str(folder))
        found += [s.values().clone() for s in engine.partitioner.states(engine.optimizer)]
        engine.load_checkpoint(str(folder))
        found += [s.values().clone() for s in engine.partitioner.states(engine.optimizer)]
        engine.destroy()
        return found + [p.detach().clone() for p in model.parameters()]

    truth = run(tmp_path / "plain")
    made = StateStore.buffer

    def buffer(self: Any, numel: int, dtype: torch.dtype) -> Tensor:
        memory = made(self, numel, dtype)
        kept.append(memory)
        device.host.add(memory.untyped_storage()._cdata)
        return memory

    def together(*tensors: Tensor) -> bool:
        return len({t.untyped_storage()._cdata in device.host for t in tensors}) == 1

    kept: list[Tensor] = []
    monkeypatch.setattr("ds_zero.buckets.masters._together", together)
    monkeypatch.setattr(StateStore, "buffer", buffer)
    monkeypatch.setattr("ds_core.setup.opening.get_accelerator", lambda plugins: Accelerator())
    with device:
        found = run(tmp_path / "lazy")
    assert device.most >= 2
    assert len(found) == len(truth) > 20
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))


# -- memory ----------------------------------------------------------------------------------------

D = 96
LAYERS = 6


def measured(zero: dict[str, Any]) -> dict[str, float]:
    """Bytes per parameter on the device and on the host, between backward and step; bf16 with
    Adam."""
    from plugins.zero.tests.test_zero_memory import live_bytes, live_tensors

    # of what ran here before; kept, so that their going is not taken for ours
    others = live_tensors()
    before = live_bytes()
    model = nn.Sequential(*(nn.Linear(D, D) for _ in range(LAYERS)))
    count = sum(p.numel() for p in model.parameters())
    engine = engine_of({**zero, "reduce_bucket_size": D * D}, model, bf16={"enabled": True})
    found: dict[str, Any] = {}
    for _ in range(2):
        engine.backward(engine(torch.ones(1, D, dtype=torch.bfloat16)).float().sum())
        everything = live_bytes() - before
        host = [b.masters.flat for b in engine.partitioner.buckets if b.masters.movable == []]
        host += [
            b.weights.shard for b in engine.partitioner.buckets if b.weights.on_host is not None
        ]
        host += host_grads(engine)
        offloaded = {
            p.master
            for b in engine.partitioner.buckets
            if b.masters.movable == []
            for p in b.fragments
        }
        host += [v for p, s in engine.optimizer.state.items() if p in offloaded for v in s.values()]
        host += [
            s.memory for s in engine.partitioner.offload.transfers._slots if s.memory is not None
        ]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in host}
        found = {"host": sum(storages.values()) / count}
        found["device"] = everything / count - found["host"]
        engine.step()
    engine.destroy()
    del others
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("zero", "device", "host"),
    [
        # weights, and the bucket that is reduced
        ({"stage": 1, "offload_optimizer": CPU}, 2 + 2 / LAYERS, 14),
        ({"stage": 2, "offload_optimizer": CPU}, 2, 14),
        ({"stage": 3, "offload_optimizer": CPU}, "2/W", 14),
        ({"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}, 0, 16),
        ({"stage": 3, "offload_param": CPU}, "14/W", 2),
        ({"stage": 3, "offload_optimizer": {**CPU, "ratio": 0.5}}, "9/W", 7),
    ],
)
def test_bytes_per_parameter(zero: dict[str, Any], device: Any, host: float, world: int) -> None:
    """Weights 2, gradients 2, masters and moments 12."""
    wanted = float(device.removesuffix("/W")) / world if isinstance(device, str) else device
    for found in run_ranks(world, measured, zero):
        assert found["device"] == pytest.approx(wanted, rel=0.05, abs=0.15)
        assert found["host"] == pytest.approx(host / world, rel=0.05)


P_WIDTH = 1024
P_LAYERS = 16
MMAP_THRESHOLD = -3  # glibc's number of the setting


def capped(zero: dict[str, Any], room: float, folder: Path | None = None) -> str:
    """Train under a cap on this process's memory, `room` bytes per parameter above what it has; ""
    or the error.
    """
    gc.collect()
    allocator = ctypes.CDLL(None)
    allocator.mallopt(MMAP_THRESHOLD, 1 << 20)  # give large blocks back to the system at once
    torch.manual_seed(0)
    count = P_LAYERS * P_WIDTH * P_WIDTH
    with open("/proc/self/status") as file:
        data = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))
    disk = (
        {}
        if folder is None
        else {"plugins": {"load": [f"disk={STORE}"]}, "disk": {"path": str(folder)}}
    )
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(data + room * count), before[1]))
    try:
        model = nn.Sequential(
            *(
                nn.Linear(P_WIDTH, P_WIDTH, bias=False, dtype=torch.bfloat16)
                for _ in range(P_LAYERS)
            )
        )
        engine = engine_of(
            {"reduce_bucket_size": P_WIDTH * P_WIDTH, **zero}, model, bf16={"enabled": True}, **disk
        )
        for _ in range(2):
            engine.backward(
                engine(torch.ones(1, P_WIDTH, dtype=torch.bfloat16)).float().square().sum()
            )
            engine.step()
        assert engine.was_step_applied()
        engine.destroy()
    except RuntimeError as error:
        assert "allocate" in str(error), error
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
        allocator.mallopt(MMAP_THRESHOLD, 1 << 25)
    return ""


@pytest.mark.slow
def test_a_model_whose_states_exceed_the_memory_of_a_process_trains(tmp_path: Path) -> None:
    """States are 16 bytes per parameter in all, and a process may take 12: on 4 ranks, or with
    masters on disk on 1.
    """
    offload = {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}
    assert run_ranks(4, capped, offload, 12.0) == [""] * 4
    assert run_ranks(
        1, capped, {**offload, "offload_optimizer": {"device": "disk"}}, 12.0, tmp_path
    ) == [""]
    assert "allocate" in run_ranks(1, capped, {"stage": 0}, 12.0)[0]
    assert "allocate" in run_ranks(1, capped, offload, 12.0)[0]


def unused_beside_a_device(monkeypatched: bool) -> float:
    """How far 16-bit weights that nobody used have moved where steps write theirs into host memory
    first.
    """
    import ds_zero.buckets.masters as masters

    from plugins.zero.tests.offload_models import make, steps, whole

    before, masters._together = masters._together, lambda shard, master: not monkeypatched
    try:
        engine = make({"stage": 2, "offload_optimizer": CPU}, dtype="bfloat16")
        for bucket in engine.partitioner.buckets if monkeypatched else ():
            if bucket.masters.staged is not None:
                bucket.masters.staged.fill_(torch.nan)  # fresh memory may hold anything
        engine_of = whole(engine)
        steps(engine, range(2))
        end = whole(engine)
        engine.destroy()
    finally:
        masters._together = before
    assert not torch.equal(engine_of["out.weight"], end["out.weight"])
    return sum(float((engine_of[n] - end[n]).abs().max()) for n in engine_of if "spare" in n)


def test_unused_weights_stay_where_steps_write_to_the_host() -> None:
    assert (
        run_ranks(1, unused_beside_a_device, True)
        == run_ranks(1, unused_beside_a_device, False)
        == [0.0]
    )
