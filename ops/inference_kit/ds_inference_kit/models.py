"""Whole models over several steps, which a provider and the reference run side by side."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from ds_inference_kit import program as p
from ds_inference_kit.comparing import (
    BOUNDS,
    FORMATS,
    check_close,
    make_step,
    make_weight,
    move_to,
    random,
)
from ds_inference_kit.reference import load as reference
from ds_inference_kit.step import KVCache, Step
from ds_inference_kit.weights import Quantized


def transformer(
    form: str = "own",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    layers: int = 2,
    width: int = 64,
    inner: int = 96,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 101,
    positions: int = 512,
) -> p.Program:
    """A model like llama with random weights, all projections in `form`."""
    dim = width // heads
    seeds = itertools.count()

    def weight(out: int, inner: int, form: str = form) -> p.Weight:
        made = make_weight(out, inner, form, next(seeds) * 1000)
        return (
            made
            if isinstance(made, Quantized)
            else made.to(dtype if made.dtype == torch.float64 else made.dtype)
        )

    def ones() -> Tensor:
        return (1 + random(width, seed=next(seeds)) / 8).to(dtype)

    angles = torch.arange(float(positions))[:, None] * 1e4 ** (-torch.arange(dim / 2) / (dim / 2))
    table = (random(vocab, width) / 4).to(dtype)
    code: list[p.Instruction] = [p.Embed(0, table)]
    for layer in range(layers):
        code += [
            p.Normalize(0, 1, ones(), None, 1e-5, p.Norm.RMS),
            p.Linear(1, 2, weight(width, width)),
            p.Linear(1, 3, weight(kv_heads * dim, width)),
            p.Linear(1, 4, weight(kv_heads * dim, width)),
            p.Rotate(2, dim, angles.cos(), angles.sin()),
            p.Rotate(3, dim, angles.cos(), angles.sin()),
            p.Attend(2, 3, 4, 5, heads, kv_heads, dim, dim**-0.5, layer),
            p.Linear(5, 0, weight(width, width), add=0),
            p.Normalize(0, 1, ones(), None, 1e-5, p.Norm.RMS),
            p.Gated(1, 6, weight(inner, width), weight(inner, width)),
            p.Linear(6, 0, weight(width, inner), add=0),
        ]
    code += [p.Keep(0, 7), p.Normalize(7, 7, ones(), None, 1e-5, p.Norm.RMS), p.Linear(7, 8, table)]
    widths = (width, width, width, kv_heads * dim, kv_heads * dim, width, inner, width, vocab)
    moved = tuple(move_to(i, device, dtype) for i in code)
    return p.Program(moved, widths, 8, dtype, layers, kv_heads, dim, embeds=0)


def _conversation(program: p.Program, device: str) -> tuple[list[Step], int]:
    """Prompts, one in two parts, decoding of one and of three, and a prompt beside decoding; blocks
    it takes.
    """
    words = [torch.arange(200) * 7 % 101, torch.arange(9) * 5 % 101, torch.arange(70) * 3 % 101]
    # Blocks are in no order, and 9 fills the places where a sequence has none.
    blocks = torch.tensor([[5, 1, 7, 0], [3, 2, 9, 9], [8, 6, 4, 9]])
    one = torch.ones(1)
    steps = [
        make_step([(words[0][:50], 0)], blocks[:1], device, wanted=torch.tensor([49])),
        make_step(
            [(words[0][50:90], 50), (words[1], 0)],
            blocks[:2],
            device,
            wanted=torch.tensor([39, 48]),
        ),
        make_step([(words[0][90:91], 90)], blocks[:1], device),
        make_step(
            [(one * 4, 91), (words[2], 0)],
            blocks[[0, 2]],
            device,
            wanted=torch.tensor([], dtype=torch.int64),
        ),
        make_step([(one * 8, 92), (one * 9, 9), (one * 2, 70)], blocks, device),
        make_step(
            [(one * 3, 71), (one * 6, 93)], blocks[[2, 0]], device, wanted=torch.tensor([1, 0])
        ),
    ]
    embeds = random(1, program.widths[0], seed=2).to(program.dtype)
    steps.append(make_step([(one, 72)], blocks[2:], device, embeds=embeds))
    return steps, 10


def _follow(program: p.Program, function: p.Load, device: str, dtype: torch.dtype) -> None:
    """Compare logits after every step, each provider with its own cache."""
    # The reference runs in fp32 on the same weights.
    wide = dataclasses.replace(program, dtype=torch.float32)
    steps, blocks = _conversation(program, device)
    caches = [
        KVCache.make(program.layers, blocks, program.kv_heads, program.head_dim, dtype, device)
        for _ in range(2)
    ]
    mine = function(program)
    theirs = reference(wide)
    for number, step in enumerate(steps):
        got = mine(step, caches[0])
        wanted = theirs(step, caches[1])
        assert got.dtype == dtype, f"{got.dtype} instead of {dtype}"
        try:
            check_close(got, wanted, 2 * BOUNDS[dtype])
        except AssertionError as error:
            raise AssertionError(f"step {number}: {error}") from error


def _whole(form: str, function: p.Load, device: str, dtype: torch.dtype) -> None:
    _follow(transformer(form, dtype, device), function, device, dtype)


def _rebound(function: p.Load, device: str, dtype: torch.dtype) -> None:
    """Weights move and change between steps, as a gather leaves them; each run returns new
    memory."""
    program = transformer("own", dtype, device)
    steps, blocks = _conversation(program, device)
    caches = [
        KVCache.make(program.layers, blocks, program.kv_heads, program.head_dim, dtype, device)
        for _ in range(2)
    ]
    runs = function(program)
    first = runs(steps[0], caches[0])
    kept = first.clone()
    for instruction in program.instructions:
        if isinstance(instruction, p.Linear) and isinstance(instruction.weight, Tensor):
            # Another memory with other values, under the same parameter.
            instruction.weight.data = instruction.weight * 1.5
    runs.rebind()
    wanted = reference(dataclasses.replace(program, dtype=torch.float32))
    for step in steps[:2]:
        check_close(runs(step, caches[0]), wanted(step, caches[1]), 2 * BOUNDS[dtype])
    assert bool(torch.equal(first, kept)), "a later run has changed what an earlier one returned"


WHOLE: dict[str, Callable[[p.Load, str, torch.dtype], None]] = {
    **{f"a model in {form}": functools.partial(_whole, form) for form in FORMATS},
    "weights that move": _rebound,
}
