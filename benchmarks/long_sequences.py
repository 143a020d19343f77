"""How long a sequence fits: SmolLM2-135M in training, each rank under a limit of memory (RLIMIT_DATA).

    python benchmarks/long_sequences.py [--limit 4] [--seconds 150] [--rows nothing tiled ...]

Each row is a config. A process per rank makes the optimizer states in a short step, and then takes steps of growing
length, each a quarter longer, until one does not fit; then steps of 5 % from the last that did. Where a step would take
longer than `--seconds`, the length that the peaks of resident memory promise is given, marked with ~.

The model has random weights: memory does not depend on their values. fp32, AdamW, one sequence per step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
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
LADDER = [int(256 * 1.25**i) for i in range(30)]
"""Lengths to try."""
OUT_OF_MEMORY = re.compile(r"can't allocate memory|Cannot allocate memory|\bMemoryError\b|std::bad_alloc")
"""Of torch's allocator, of the system, of Python and of C++; no path has one of them in it."""


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


def work(row: str, lengths: list[int], limit: int, seconds: float, out: Path) -> None:
    """Steps of these lengths, until one takes `seconds`; each one that fits leaves a line in `out`."""
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
        took = torch.tensor([float(resident_peak()), time.perf_counter() - began], dtype=torch.float64)
        ds_core.comm.all_reduce(took, op=torch.distributed.ReduceOp.MAX)
        if engine.global_rank == 0 and length in lengths:
            with out.open("a") as file:
                file.write(json.dumps({"length": length, "peak": took[0].item(), "seconds": took[1].item()}) + "\n")
        if took[1].item() > seconds:
            break
    engine.destroy()


# -- the table ---------------------------------------------------------------------------------------------------


def steps(row: str, lengths: list[int], limit: int, seconds: float) -> tuple[list[dict[str, Any]], bool]:
    """What fitted of these lengths, in order; and whether one did not fit."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "steps")
        out.touch()
        task = json.dumps([row, lengths, limit, seconds, str(out)])
        # Large tensors are returned to the system when they are freed, so that memory that is free counts as free.
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
        command = [sys.executable, "-m", "ds_cli", "run", "--nproc", str(ROWS[row][0]), __file__, "--task", task]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        found = [json.loads(line) for line in out.read_text().splitlines()]
        text = done.stdout + done.stderr
        if done.returncode and not OUT_OF_MEMORY.search(text):
            raise SystemExit(f"{row}: {text[-4000:]}")
        return found, done.returncode != 0


def measure(row: str, limit: int, seconds: float) -> str:
    """One row of the table."""
    found, full = steps(row, LADDER, limit, seconds)
    if len(found) < 2:
        return f"| {row} | {ROWS[row][0]} | | | under {LADDER[1]} | |"
    before, last = found[-2:]
    if full:
        finer = [int(last["length"] * share / 100) for share in (105, 110, 115, 120)]
        last = [last, *steps(row, finer, limit, seconds)[0]][-1]
    per_token = (last["peak"] - before["peak"]) / (last["length"] - before["length"])
    length = last["length"] if full else last["length"] + (limit - last["peak"]) / per_token
    need = f"{per_token / 1024:,.0f} | {last['peak'] / 2**30:.2f} GiB at {last['length']:,}"
    return f"| {row} | {ROWS[row][0]} | {need} | {'' if full else '~'}{int(length):,} | {last['seconds']:.0f} s |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=4.0, help="GiB per rank")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="nothing longer is tried after a step that took longer"
    )
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--task", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.task:
        row, lengths, limit, seconds, out = json.loads(chosen.task)
        work(row, lengths, limit, seconds, Path(out))
        return
    print(
        "| config | ranks | KiB per token | peak | longest sequence | its step |\n| --- | --- | --- | --- | --- | --- |"
    )
    for row in chosen.rows:
        print(measure(row, int(chosen.limit * 2**30), chosen.seconds), flush=True)


if __name__ == "__main__":
    main()
