"""An optimizer step with states on disk beside its two parts: the arithmetic alone, and the reads and writes alone.

    python benchmarks/nvme_step.py FOLDER [--layers N] [--rounds N]

One process trains a GPT (examples/gpt/model.py, width 1024) in bf16 with AdamW, ZeRO stage 3 and `offload_optimizer`.
compute: the step with states in host memory. disk: the states and gradients that a step reads and writes, in the same
order and with the same read-ahead and write-behind, and no arithmetic. step: both. Each ends when all is written.
Rounds are interleaved; ratios to the larger of both parts are taken round by round, and medians count.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parent.parent
WIDTH = 1024


def build(layers: int) -> nn.Module:
    spec = importlib.util.spec_from_file_location("gpt", ROOT / "examples/gpt/model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model: nn.Module = module.GPT(context=64, width=WIDTH, layers=layers, heads=8)
    return model


def start(layers: int, place: dict[str, Any]) -> Any:
    import ds_core

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 4 * WIDTH * WIDTH, "offload_optimizer": place},
    }
    return ds_core.initialize(model=build(layers), config=config)[0]


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
    from ds_zero.tiled_step import states_of

    store, reducer = engine.partitioner.offload.optimizer, engine.partitioner.reducer
    tiles = [b for b in reducer.buckets if b.evictable]
    grads = [[g.host] if (g := reducer.grads(b)) is not None and g.host is not None else [] for b in tiles]
    states = [states_of(b, engine.optimizer) for b in tiles]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        place = {"device": "nvme", "nvme_path": folder, "pipeline_read": True, "pipeline_write": True}
        beside, away = start(arguments.layers, {"device": "cpu"}), start(arguments.layers, place)
        rounds = []
        for number in range(arguments.rounds + 2):
            took = {"compute": step(beside), "step": step(away), "disk": disk(away)}
            if number >= 2:  # the first step makes the states
                rounds.append(took)
        moved = away.partitioner.offload.optimizer.moved
        elements = sum(b.layout.shard_numel for b in away.partitioner.reducer.buckets if b.evictable)
        beside.destroy()
        away.destroy()
    found: dict[str, Any] = {kind: round(median(r[kind] for r in rounds), 3) for kind in rounds[0]}
    found["ratio"] = round(median(r["step"] / max(r["compute"], r["disk"]) for r in rounds), 3)
    found["to the sum"] = round(median(r["step"] / (r["compute"] + r["disk"]) for r in rounds), 3)
    print(json.dumps({"parameters": elements, **found, "read": moved.read, "written": moved.written}))


if __name__ == "__main__":
    main()
