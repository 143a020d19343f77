"""A start with many ranks on this machine: seconds to the end of the first step, and what each rank
asks of the store.

Tiny model, ZeRO-1, over gloo; beside it torch alone (DDP), which connects every rank with every
other. The ranks are forked from a process that has imported everything: 64 imports on few cores
would hide the rest. Seconds are taken without the relay that counts.

    python benchmarks/start_many.py [--ranks 8 16 32 64]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from _store_meter import Meter, address_of

LINGER = 3.0  # how long a rank stays after its step: others may still talk to it
KINDS = {"torch, DDP": "0", "ds_core, all connected": "0", "ds_core": "1"}
"""What starts, and TORCH_GLOO_LAZY_INIT."""


def start(kind: str, rank: int, ranks: int) -> None:
    """Start the process group and take the first step."""
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(1, 8)
    if kind == "torch, DDP":
        address = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=False, timeout=timedelta(minutes=5), wait_for_workers=False
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(x).square().mean().backward()
        optimizer.step()
        return
    import ds_core

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = ds_core.initialize(model=model, config=config)
    engine.backward(engine(x).square().mean())
    engine.step()


def warm() -> None:
    """Import what a start needs: the modules of a start with one rank in a process of its own."""
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\nimport start_many, json\n"
    )
    code += "start_many.start('ds_core', 0, 1)\nprint(json.dumps(list(sys.modules)))"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    extra = [
        "ds_rendezvous.meeting",
        "ds_core.comm.agreement",
        "ds_comm_gloo.two_level",
        "ds_ops_cpu.shared",
    ]
    for name in [*json.loads(said.stdout.splitlines()[-1]), *extra]:
        if name not in ("__main__", "start_many"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    kernels: Any = importlib.import_module("ds_ops_cpu.kernels")
    kernels.native()


def sockets() -> int:
    """Sockets of this process."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("socket")
    return found


def child(work: Callable[[], None]) -> int:
    """A forked process that does `work`."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def one(kind: str, ranks: int, metered: bool) -> None:
    """Run one start and print its figures as JSON."""
    warm()
    told, tell = os.pipe()
    ports, put = os.pipe()

    def serve() -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        os.close(tell)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        meter = Meter(store.port, ranks) if metered else None
        begin = time.monotonic()
        os.write(put, f"{meter.port if meter else store.port}\n".encode())
        with os.fdopen(told) as lines:
            rows = [json.loads(lines.readline()) for _ in range(ranks)]
        figures = {"seconds": max(row["at"] for row in rows) - begin}
        figures |= {name: sum(row[name] for row in rows) / ranks for name in ("cpu", "sockets")}
        if meter:
            operations = [sum(count.operations.values()) for count in meter.counts]
            traffic = [count.sent + count.received for count in meter.counts]
            figures |= {"operations": sum(operations) / ranks, "most operations": max(operations)}
            figures |= {"bytes": sum(traffic) / ranks, "most bytes": max(traffic)}
        print(json.dumps(figures), flush=True)

    server = child(serve)
    port = os.read(ports, 100).decode().strip()

    def rank_of(rank: int) -> None:
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_PORT": port,
        }
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update(
            MASTER_ADDR=address_of(rank) if metered else "127.0.0.1",
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        before = os.times()
        start(kind, rank, ranks)
        after = os.times()
        row = {
            "at": time.monotonic(),
            "cpu": sum(after[:2]) - sum(before[:2]),
            "sockets": sockets(),
        }
        os.write(tell, (json.dumps(row) + "\n").encode())
        time.sleep(LINGER)

    started = [child(lambda rank=rank: rank_of(rank)) for rank in range(ranks)]  # type: ignore[misc]
    os.close(tell)
    for pid in [server, *started]:
        os.waitpid(pid, 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        kind, ranks, metered = arguments.one
        one(kind, int(ranks), metered == "1")
        return
    print(f"{'':24s} ranks  seconds  CPU s/rank  sockets  operations (most)  bytes (most)")
    for ranks in arguments.ranks:
        for kind, lazy in KINDS.items():
            variables = {
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "TORCH_GLOO_LAZY_INIT": lazy,
            }
            found: dict[str, float] = {}
            for metered in "10":  # the second run's seconds are those without the relay
                command = [sys.executable, __file__, "--one", kind, str(ranks), metered]
                said = subprocess.check_output(
                    command, env=os.environ | variables, text=True, timeout=300
                )
                found |= json.loads(said.splitlines()[-1])
            print(
                f"{kind:24s} {ranks:5d} {found['seconds']:8.2f} {found['cpu']:11.2f} "
                f"{found['sockets']:8.0f} "
                f"{found['operations']:11.0f} ({found['most operations']:.0f}) "
                f"{found['bytes']:9.0f} ({found['most bytes']:.0f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
