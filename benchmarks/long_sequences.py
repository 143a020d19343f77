"""How long a sequence fits: SmolLM2-135M in training, each rank under a limit of memory (RLIMIT_DATA).

    python benchmarks/long_sequences.py [--limit 4] [--seconds 150] [--rows nothing tiled ...]

Each row is a config. A process per rank makes the optimizer states in a short step, and then takes steps of growing
length. From their peaks of resident memory comes the need per token, and from that the length that should fit. It is
then tried, in steps of 5 %, until one does not fit; where one such step would take longer than `--seconds`, the table
has the length that the line promises, marked with ~.

The model has random weights: memory does not depend on their values. fp32, AdamW, one sequence per step.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RECOMPUTE = {"activation_checkpointing": {"modules": "auto"}}
TILED = {"tiled_mlp": {"tile_bytes": 33554432}, "tiled_loss": {"tile_bytes": 33554432}}
SHARDED = {"zero_optimization": {"stage": 2}}
ROWS: dict[str, tuple[int, dict[str, Any]]] = {
    "nothing": (1, {}),
    "tiled loss": (1, {"sequence_parallel": {"tiled_loss": TILED["tiled_loss"]}}),
    "tiled": (1, {"sequence_parallel": TILED}),
    "recompute": (1, RECOMPUTE),
    "sp 2": (2, {"sequence_parallel": {"size": 2}}),
    "recompute + tiled": (1, {**RECOMPUTE, "sequence_parallel": TILED}),
    "recompute + tiled + sp 2": (2, {**RECOMPUTE, "sequence_parallel": {"size": 2, **TILED}}),
    "recompute + tiled + sp 2 + ZeRO-2": (2, {**RECOMPUTE, **SHARDED, "sequence_parallel": {"size": 2, **TILED}}),
}
"""Ranks, and sections of the config."""
FIRST = (256, 512, 1024)
"""Lengths from which the need per token is taken."""


def resident_peak() -> int:
    """Bytes of the peak of resident memory since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def forget_peak() -> None:
    """Begin a new peak."""
    Path("/proc/self/clear_refs").write_text("5")


# -- one rank ----------------------------------------------------------------------------------------------------


def build() -> Any:
    """SmolLM2-135M's shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 1 << 20}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True, use_cache=False))


def work(row: str, lengths: list[int], limit: int, out: Path) -> None:
    """Steps of these lengths; each one that fits leaves a line in `out`."""
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    import torch

    import ds_core

    ranks, sections = ROWS[row]
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // ranks))
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}, **sections}
    torch.manual_seed(0)
    engine = ds_core.initialize(model=build(), config=config)[0]
    for length in (64, *lengths):
        forget_peak()
        began = time.perf_counter()
        ids = torch.randint(49152, (1, length), generator=torch.Generator().manual_seed(length))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        del loss
        peak = torch.tensor([resident_peak()], dtype=torch.long)
        ds_core.comm.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
        if engine.global_rank == 0 and length in lengths:
            line = {"length": length, "peak": int(peak), "seconds": time.perf_counter() - began}
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    engine.destroy()


# -- the table ---------------------------------------------------------------------------------------------------


def steps(row: str, lengths: list[int], limit: int) -> list[dict[str, Any]]:
    """What fitted of these lengths, in order."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "steps")
        out.touch()
        task = json.dumps([row, lengths, limit, str(out)])
        # Large tensors are returned to the system when they are freed, so that memory that is free counts as free.
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
        command = [sys.executable, "-m", "ds_cli", "run", "--nproc", str(ROWS[row][0]), __file__, "--task", task]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        found = [json.loads(line) for line in out.read_text().splitlines()]
        text = done.stdout + done.stderr
        if len(found) < len(lengths) and "memory" not in text.lower():
            raise SystemExit(f"{row}: {text[-4000:]}")
        return found


def measure(row: str, limit: int, seconds: float) -> dict[str, Any]:
    """One row of the table."""
    first = steps(row, list(FIRST), limit)
    if len(first) < 2:
        return {"row": row, "length": first[0]["length"] if first else 0, "tried": True, "per_token": 0, "base": 0}
    low, high = first[0], first[-1]
    per_token = (high["peak"] - low["peak"]) / (high["length"] - low["length"])
    base = low["peak"] - per_token * low["length"]
    promised = int((limit - base) / per_token)
    found = {"row": row, "per_token": per_token, "base": base, "seconds": high["seconds"]}
    if high["seconds"] * (promised / high["length"]) ** 2 > seconds:
        return {**found, "length": promised, "tried": False}
    fitted = steps(row, [int(promised * share / 100) for share in range(70, 131, 5)], limit)
    length = fitted[-1]["length"] if fitted else high["length"]
    return {**found, "length": length, "tried": True, "seconds": fitted[-1]["seconds"] if fitted else high["seconds"]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=4.0, help="GiB per rank")
    parser.add_argument("--seconds", type=float, default=150.0, help="lengths whose step takes longer are not tried")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--task", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.task:
        row, lengths, limit, out = json.loads(chosen.task)
        work(row, lengths, limit, Path(out))
        return
    print("| config | ranks | KiB per token | without tokens | longest sequence |\n| --- | --- | --- | --- | --- |")
    for row in chosen.rows:
        one = measure(row, int(chosen.limit * 2**30), chosen.seconds)
        length = f"{'' if one['tried'] else '~'}{one['length']:,}"
        need = f"{one['per_token'] / 1024:,.0f} | {one['base'] / 2**30:.2f} GiB"
        print(f"| {row} | {ROWS[row][0]} | {need} | {length} |", flush=True)


if __name__ == "__main__":
    main()
