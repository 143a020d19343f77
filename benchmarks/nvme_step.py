"""An optimizer step with states on disk beside its two parts: the arithmetic alone, and the reads
and writes alone.

    python benchmarks/nvme_step.py FOLDER [--layers N] [--rounds N] [--deepspeed-python PYTHON]

One process trains a GPT (examples/gpt/model.py, width 1024) in bf16 with AdamW, ZeRO stage 3 and
`offload_optimizer`.
compute: the step with states in host memory. disk: the states and gradients that a step reads and
    writes, in the same order and with the same read-ahead and write-behind, and no arithmetic.
    step: both; unchecked: without checksums. DeepSpeed's step, with the same tiles, settings of the
    disk and pipelines, runs in a process of its own. Each ends when all is written. Rounds are
    interleaved, in random order; ratios are taken round by round, and medians count.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _other_python import answer, orders, other_python
from torch import nn

ROOT = Path(__file__).parent.parent
WIDTH = 1024
TILE = 4 * WIDTH * WIDTH


def build(layers: int) -> nn.Module:
    spec = importlib.util.spec_from_file_location("gpt", ROOT / "examples/gpt/model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model: nn.Module = module.GPT(context=64, width=WIDTH, layers=layers, heads=8)
    return model


def settings(place: dict[str, Any], aio: dict[str, Any]) -> dict[str, Any]:
    zero = {"stage": 3, "reduce_bucket_size": TILE, "offload_optimizer": place}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1, **aio},
    }


def start(layers: int, place: dict[str, Any], **aio: Any) -> Any:
    import ds_core

    return ds_core.initialize(model=build(layers), config=settings(place, aio))[0]


def step(engine: Any) -> float:
    """Seconds of one step, after a forward and a backward, until its results are on disk."""
    x = torch.randint(0, 256, (1, 65))
    engine.backward(engine(x[:, :-1], x[:, 1:]))
    store = engine.partitioner.offload.optimizer
    flush: Callable[[], None] = getattr(store, "flush", lambda: None)
    flush()
    begin = time.perf_counter()
    engine.step()
    flush()
    return time.perf_counter() - begin


def disk(engine: Any) -> float:
    """Seconds of the reads and writes of a step."""
    store = engine.partitioner.offload.optimizer
    reducer = engine.partitioner.reducer
    tiles = [b for b in reducer.buckets if b.masters.evicts is not None]
    hosts = [getattr(reducer.grads(b), "host", None) for b in tiles]
    grads = [[] if host is None else [host] for host in hosts]
    states = [b.masters.states(engine.optimizer) for b in tiles]
    begin = time.perf_counter()
    store.fetch(grads[0] + states[0])
    for index in range(len(tiles)):
        store.wait(grads[index] + states[index])
        if index + 1 < len(tiles):
            store.fetch(grads[index + 1] + states[index + 1])
        store.evict(grads[index], changed=False)
        store.evict(states[index])
    store.flush()
    return time.perf_counter() - begin


def deepspeed(python: str, layers: int, folder: str) -> Callable[[], float]:
    ask = other_python(python, __file__, [folder, "--layers", str(layers), "--serve"])
    return lambda: float(ask("step"))


def serve(layers: int, folder: str) -> None:
    """DeepSpeed: runs in its own environment.

    Fewer than 12 buffers fail an assertion of its pipeline.
    """
    import deepspeed  # type: ignore[import-not-found]

    place = {
        "device": "nvme",
        "nvme_path": folder,
        "pipeline_read": True,
        "pipeline_write": True,
        "buffer_count": 12,
    }
    config = {
        **settings(place, {"single_submit": False, "overlap_events": True}),
        "steps_per_print": 10**9,
    }
    config["zero_optimization"]["sub_group_size"] = TILE
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = build(layers)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[
        0
    ]
    for _ in orders():
        x = torch.randint(0, 256, (1, 65))
        engine.backward(engine(x[:, :-1], x[:, 1:]))
        begin = time.perf_counter()
        engine.step()
        answer(time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--deepspeed-python")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.layers, str(given.folder))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        place = {
            "device": "nvme",
            "nvme_path": folder,
            "pipeline_read": True,
            "pipeline_write": True,
        }
        beside = start(given.layers, {"device": "cpu"})
        away = start(given.layers, place, checksum=True)
        unchecked = start(given.layers, place, checksum=False)
        contestants: dict[str, Callable[[], float]] = {
            "compute": lambda: step(beside),
            "disk": lambda: disk(away),
            "step": lambda: step(away),
            "unchecked": lambda: step(unchecked),
        }
        if given.deepspeed_python:
            contestants["deepspeed"] = deepspeed(given.deepspeed_python, given.layers, folder)
        step(away)  # `disk` moves the gradients and states of a step
        rounds = []
        for number in range(given.rounds + 2):
            order = random.Random(number).sample(list(contestants), len(contestants))
            took = {name: contestants[name]() for name in order}
            if number >= 2:  # the first step makes the states
                rounds.append(took)
        moved = away.partitioner.offload.optimizer.moved
        elements = sum(
            b.layout.shard_numel
            for b in away.partitioner.reducer.buckets
            if b.masters.evicts is not None
        )
        for engine in (beside, away, unchecked):
            engine.destroy()
    show(rounds, {"parameters": elements, "read": moved.read, "written": moved.written})


def show(rounds: list[dict[str, float]], facts: dict[str, int]) -> None:
    ratios: dict[str, Callable[[dict[str, float]], float]] = {
        "step / larger part": lambda r: r["step"] / max(r["compute"], r["disk"]),
        "step / sum of parts": lambda r: r["step"] / (r["compute"] + r["disk"]),
        "step / unchecked": lambda r: r["step"] / r["unchecked"],
    }
    if "deepspeed" in rounds[0]:
        ratios["step / deepspeed"] = lambda r: r["step"] / r["deepspeed"]
    found = {kind: round(median(r[kind] for r in rounds), 3) for kind in rounds[0]}
    print(
        json.dumps(
            {**found, **{k: round(median(map(f, rounds)), 3) for k, f in ratios.items()}, **facts}
        )
    )


if __name__ == "__main__":
    main()
