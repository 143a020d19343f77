"""What a step brings: checks of its shapes, and its tensors as the kernels read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from ds_inference_kit import program as p
from ds_inference_kit.step import BLOCK, KVCache, Step
from torch import Tensor

from ds_core.errors import KernelError
from ds_ops_cuda import native
from ds_ops_cuda.native import TYPES


@dataclass(slots=True)
class Given:
    """A step's tensors as the kernels read them, on the device."""

    tokens: Tensor
    positions: Tensor
    # int32 [4, rows], see `Frame` in program.h.
    rows: Tensor
    blocks: Tensor | None
    wanted: Tensor | None
    types: Tensor | None
    embeds: Tensor | None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Those that there are, by the name of their field."""
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name), Tensor):
                yield field.name, value


def bring(step: Step, device: torch.device, dtype: torch.dtype) -> Given:
    """The tensors of `step` on `device`; embeddings in `dtype`, that of the program."""
    rows = step.tokens.numel()
    starts, lengths = (x.to(torch.int32).contiguous() for x in (step.starts, step.lengths))
    # Of each row its sequence, and how far it sees, worked out in C++ on the host, in one copy to
    # the device.
    described = torch.empty(4, rows, dtype=torch.int32)
    native.native().describe_rows(
        starts.data_ptr(), lengths.data_ptr(), lengths.numel(), described.data_ptr()
    )

    def ints(x: Tensor | None, dtype: torch.dtype = torch.int32) -> Tensor | None:
        return None if x is None else x.to(device, dtype).contiguous()

    tokens = ints(step.tokens)
    positions = ints(step.positions)
    assert tokens is not None and positions is not None
    embeds = None if step.embeds is None else step.embeds.to(device, dtype).contiguous()
    on_device = described.to(device, non_blocking=True)
    wanted = ints(step.wanted, torch.int64)
    return Given(tokens, positions, on_device, ints(step.blocks), wanted, ints(step.types), embeds)


def check_step(program: p.Program, device: torch.device, step: Step, cache: KVCache | None) -> None:
    """Raise KernelError where a step or a cache has not the shapes that kernels rely on."""
    rows = step.tokens.numel()
    sequences = step.lengths.numel()
    wrong = ""
    if (
        step.positions.numel() != rows
        or step.starts.numel() != sequences + 1
        or int(step.starts[-1]) != rows
    ):
        wrong = (
            f"{rows} tokens, {step.positions.numel()} positions, starts that end at "
            f"{int(step.starts[-1])}"
        )
    elif step.types is not None and step.types.numel() != rows:
        wrong = f"{step.types.numel()} types for {rows} tokens"
    elif step.embeds is not None and not any(map(_by_tokens, program.instructions)):
        wrong = "embeds for a program that has no embedding"
    elif cache is not None and program.layers:
        wrong = _cache_wrong(program, device, step, cache)
    if wrong:
        raise KernelError(f"inference step: {wrong}")


def _cache_wrong(program: p.Program, device: torch.device, step: Step, cache: KVCache) -> str:
    """What is wrong with `cache` for `program`; "" where nothing is."""
    shape = cache.keys.shape
    wanted = (program.layers, cache.blocks, program.kv_heads, BLOCK, program.head_dim)
    if shape != wanted or cache.values.shape != wanted:
        return f"a cache of {tuple(shape)}, where the program needs {wanted}"
    for arena in (cache.keys, cache.values):
        if arena.device != device or not arena.is_contiguous() or arena.dtype not in TYPES:
            return (
                f"a cache on {arena.device} in {arena.dtype}, not contiguous fp32, bf16 or "
                f"fp16 on {device}"
            )
    if cache.keys.dtype is not cache.values.dtype:
        return f"keys in {cache.keys.dtype} and values in {cache.values.dtype}"
    if (
        step.blocks is None
        or step.blocks.dim() != 2
        or step.blocks.shape[0] != step.lengths.numel()
    ):
        return f"no table of blocks for {step.lengths.numel()} sequences"
    if step.lengths.numel() and int(step.lengths.max()) > step.blocks.shape[1] * BLOCK:
        return (
            f"a sequence of {int(step.lengths.max())} tokens in {step.blocks.shape[1]} "
            "blocks "
            f"of {BLOCK}"
        )
    return ""


def _by_tokens(instruction: p.Instruction) -> bool:
    return isinstance(instruction, p.Embed) and instruction.by is p.By.TOKENS
