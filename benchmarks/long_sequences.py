"""How long a sequence fits: SmolLM2-135M in training, each rank under a limit of memory
(RLIMIT_DATA).

    python benchmarks/long_sequences.py [--limit 4] [--computed 4000] [--rows nothing tiled ...]

Each row is a config, and one process per rank. Lengths are doubled until the bytes per token of the
last two tell that less than twice the length should fit. Steps of growing length, from 0.9 of what
should, by 5 % each, then show which is the last to fit: the one after it ends the process. Where
even the first does not fit, a lower start is tried.

These steps allocate what a step allocates, and calculate nothing that is large: of an operation on
large tensors only the results are allocated (their shapes come from torch's meta device). The limit
counts memory that is mapped, written or not, so it is reached at the same length, in seconds
instead of hours. Two things check that. "real / dry" is the peak of a whole step of FIRST tokens
over the peak of such a dry one. And where the result is at most --computed tokens, whole steps are
taken of both lengths: the one must fit, the other must not.

peak: of the memory that the limit counts. The model has random weights: memory does not depend on
their values. fp32, AdamW, one sequence per step.
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
TILED = {"tiled_mlp": {"tile_bytes": 1 << 25}, "tiled_loss": {"tile_bytes": 1 << 27}}
SHARDED = {"zero_optimization": {"stage": 2}}
ROWS: dict[str, tuple[int, dict[str, Any]]] = {
    "nothing": (1, {}),
    "tiled loss": (1, {"sequence_parallel": {"tiled_loss": TILED["tiled_loss"]}}),
    "tiled": (1, {"sequence_parallel": TILED}),
    "recompute": (1, RECOMPUTE),
    "sp 2": (2, {"sequence_parallel": {"size": 2}}),
    "recompute + tiled": (1, {**RECOMPUTE, "sequence_parallel": TILED}),
    "recompute + tiled + sp 2": (2, {**RECOMPUTE, "sequence_parallel": {"size": 2, **TILED}}),
    "recompute + tiled + sp 2 + ZeRO-2": (
        2,
        {**RECOMPUTE, **SHARDED, "sequence_parallel": {"size": 2, **TILED}},
    ),
}
"""Ranks, and sections of the config."""
FIRST = 384
OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|Cannot allocate memory|\bMemoryError\b|std::bad_alloc"
)
"""Of torch's allocator, of the system, of Python and of C++; no path has one of them in it."""


def mapped() -> int:
    """Bytes that RLIMIT_DATA counts: private memory that may be written."""
    return int(Path("/proc/self/statm").read_bytes().split()[5]) * resource.getpagesize()


# -- one rank --------------------------------------------------------------------------------------


def build() -> Any:
    """SmolLM2-135M's shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "vocab_size": 49152,
    }
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 1 << 20}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, **heads, tie_word_embeddings=True, use_cache=False)
    )


LARGE = 1 << 15
"""Elements of the inputs from which on an operation is not calculated."""


def watched(dry: bool) -> Any:
    """A mode that notes the peak of `mapped`, after each operation; dry: operations on large
    tensors only allocate.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map_only

    def on_meta(tensor: Any) -> Any:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    def allocate(tensor: Any) -> Any:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    class Watched(TorchDispatchMode):
        peak = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = self.run(func, args, kwargs or {})
            self.peak = max(self.peak, mapped())
            return out

        def run(self, func: Any, args: Any, kwargs: Any) -> Any:
            if not dry or func.namespace != "aten" or func.is_view:
                return func(*args, **kwargs)
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            if (
                sum(t.numel() for t in tensors) < LARGE
                or torch.Tag.data_dependent_output in func.tags
            ):
                return func(*args, **kwargs)
            if func._schema.is_mutable:
                return args[0] if func._schema.returns else None
            if "device" in kwargs:
                kwargs = {**kwargs, "device": "meta"}
            made = func(
                *tree_map_only(torch.Tensor, on_meta, args),
                **tree_map_only(torch.Tensor, on_meta, kwargs),
            )
            return tree_map_only(torch.Tensor, allocate, made)

    return Watched()


def work(row: str, guess: int, lengths: list[int], limit: int, out: Path) -> None:
    """Steps; each leaves a line in `out` before it begins, and one when it fitted.

    lengths: of whole steps. Without them dry steps of growing length, around `guess`; 0: short
    steps tell it first.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    import torch

    import ds_core

    ranks, sections = ROWS[row]
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // ranks))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        **sections,
    }
    torch.manual_seed(0)
    engine = ds_core.initialize(model=build(), config=config)[0]

    def note(**found: Any) -> None:
        if engine.global_rank == 0:
            with out.open("a") as file:
                file.write(json.dumps(found) + "\n")

    def step(length: int, dry: bool = True) -> float:
        """The peak, of the rank that needs most."""
        note(tried=length)
        began = time.perf_counter()
        ids = torch.randint(49152, (1, length), generator=torch.Generator().manual_seed(length))
        with watched(dry) as watch:
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
        engine.step()
        del loss
        took = torch.tensor([float(watch.peak), time.perf_counter() - began], dtype=torch.float64)
        ds_core.comm.all_reduce(took, op=torch.distributed.ReduceOp.MAX)
        note(length=length, peak=took[0].item(), seconds=took[1].item())
        return took[0].item()

    step(64, dry=False)
    for length in lengths:
        step(length, dry=False)
    if lengths:
        raise SystemExit(0)
    if not guess:
        step(FIRST, dry=False)
        length = FIRST
        peaks = [step(FIRST)]
        while guess < 1 or guess > 2 * length:
            length *= 2
            peaks.append(step(length))
            guess = int(length + (limit - peaks[-1]) / (peaks[-1] - peaks[-2]) * (length / 2))
    note(guess=guess)
    for share in range(18, 60):
        step(guess * share // 20)


# -- the table -------------------------------------------------------------------------------------


def steps(row: str, guess: int, lengths: list[int], limit: int) -> list[dict[str, Any]]:
    """The lines that the processes of a row left; the last is of a length that did not fit, if one
    did not.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "steps")
        out.touch()
        task = json.dumps([row, guess, lengths, limit, str(out)])
        # Large tensors are returned to the system when they are freed, so that memory that is free
        # counts as free.
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
        command = [
            sys.executable,
            "-m",
            "ds_cli",
            "run",
            "--nproc",
            str(ROWS[row][0]),
            __file__,
            "--task",
            task,
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        text = done.stdout + done.stderr
        if done.returncode and not OUT_OF_MEMORY.search(text):
            raise SystemExit(f"{row}: {text[-4000:]}")
        found = [json.loads(line) for line in out.read_text().splitlines()]
        for line in found:
            print(f"# {row}: {line}", file=sys.stderr, flush=True)
        return found


def measure(row: str, limit: int, computed: int) -> str:
    """One row of the table."""
    lines = steps(row, 0, [], limit)
    found = [line for line in lines if "peak" in line]
    if len(found) < 3:
        raise SystemExit(f"{row}: not even {lines[-1]['tried']} tokens fit; lower FIRST")
    real, dry = found[1:3]
    guess = next((line["guess"] for line in lines if "guess" in line), lines[-1]["tried"])
    # the first of the ladder did not fit
    while "guess" in lines[-2] or not any("guess" in line for line in lines):
        guess = int(0.8 * guess)
        found += (lines := steps(row, guess, [], limit))
    fits = lines[-2]["length"]
    fails = lines[-1]["tried"]
    fitted = sorted((line["length"], line["peak"]) for line in found[2:] if "peak" in line)
    last = fitted[-1]
    before = [step for step in fitted if step[0] <= 0.6 * fitted[-1][0]][-1]
    per_token = (last[1] - before[1]) / (last[0] - before[0])
    whole = "too long"
    if fits <= computed:
        lines = steps(row, 0, [fits, fails], limit)
        done = [line["length"] for line in lines if "length" in line]
        whole = "yes" if done[-1] == fits else "both fit" if fails in done else "none fits"
    need = f"{per_token / 1024:,.0f} | {real['peak'] / dry['peak']:.3f}"
    return f"| {row} | {ROWS[row][0]} | {need} | {fits:,} | {fails:,} | {whole} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=4.0, help="GiB per rank")
    parser.add_argument(
        "--computed",
        type=int,
        default=4000,
        help="up to this length, whole steps confirm the result",
    )
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--task", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.task:
        row, guess, lengths, limit, out = json.loads(chosen.task)
        work(row, guess, lengths, limit, Path(out))
        return
    print(
        "| config | ranks | KiB per token | real / dry | fits | does not fit | whole steps agree |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in chosen.rows:
        print(measure(row, int(chosen.limit * 2**30), chosen.computed), flush=True)


if __name__ == "__main__":
    main()
