"""The interpreter: a small transformer, whole and in parts, through a paged cache with blocks in
any order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_inference_kit import program as p
from ds_inference_kit.checks import inference_program
from ds_inference_kit.reference import Interpreter, load
from ds_inference_kit.step import BLOCK, KVCache, Step
from ds_inference_kit.weights import dequantize, quantize
from torch import Tensor

HEADS = 4
KV = 2
DIM = 8
WIDTH = 32
WORDS = 50


def small(layers: int = 2, window: int | None = None) -> p.Program:
    """A pre-norm transformer with rotary embeddings, grouped keys and a gated MLP."""
    torch.manual_seed(0)

    def weight(out: int, inner: int = WIDTH) -> Tensor:
        return torch.randn(out, inner) / inner**0.5

    angles = torch.arange(200.0)[:, None] * 100.0 ** (-torch.arange(DIM / 2) / (DIM / 2))
    table = weight(WORDS)
    code: list[p.Instruction] = [p.Embed(0, table)]
    for layer in range(layers):
        code += [
            p.Normalize(0, 1, torch.rand(WIDTH) + 0.5, None, 1e-6, p.Norm.RMS),
            p.Linear(1, 2, weight(HEADS * DIM)),
            p.Linear(1, 3, weight(KV * DIM)),
            p.Linear(1, 4, weight(KV * DIM)),
            p.Rotate(2, DIM, angles.cos(), angles.sin()),
            p.Rotate(3, DIM, angles.cos(), angles.sin()),
            p.Attend(2, 3, 4, 5, HEADS, KV, DIM, DIM**-0.5, layer, window=window),
            p.Linear(5, 0, weight(WIDTH, HEADS * DIM), add=0),
            p.Normalize(0, 1, torch.rand(WIDTH) + 0.5, None, 1e-6, p.Norm.RMS),
            p.Gated(1, 6, weight(48), weight(48)),
            p.Linear(6, 0, weight(WIDTH, 48), add=0),
        ]
    code += [p.Keep(0, 7), p.Linear(7, 8, table)]
    widths = (WIDTH, WIDTH, HEADS * DIM, KV * DIM, KV * DIM, HEADS * DIM, 48, WIDTH, WORDS)
    return p.Program(tuple(code), widths, 8, torch.float32, layers, KV, DIM)


def step(parts: list[tuple[Tensor, int]], blocks: Tensor) -> Step:
    """(tokens, position of the first) of each sequence."""
    sizes = [len(tokens) for tokens, _ in parts]
    ints = torch.int32
    return Step(
        torch.cat([tokens for tokens, _ in parts]).to(ints),
        torch.cat([torch.arange(first, first + len(tokens)) for tokens, first in parts]).to(ints),
        torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=ints),
        torch.tensor([first + len(tokens) for tokens, first in parts], dtype=ints),
        blocks,
    )


@pytest.mark.parametrize("window", [None, 5])
def test_a_sequence_in_parts_equals_the_whole(window: int | None) -> None:
    program = small(window=window)
    runs = load(program)
    tokens = [torch.randint(0, WORDS, (n,)) for n in (2 * BLOCK + 7, 3)]
    blocks = torch.tensor([[3, 0, 5], [2, 1, 4]], dtype=torch.int32)

    def cache() -> KVCache:
        return KVCache.make(2, 6, KV, DIM, torch.float32)

    whole = runs(step([(t, 0) for t in tokens], blocks), cache())
    alone = runs(step([(tokens[1], 0)], blocks[1:]), cache())
    torch.testing.assert_close(whole[-3:], alone)
    kept = cache()
    long = tokens[0]
    parts = [
        runs(step([(long[:40], 0)], blocks), kept),
        runs(step([(long[40:70], 40)], blocks), kept),
    ]
    parts += [runs(step([(long[70:71], 70), (tokens[1], 0)], blocks), kept)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("bits", "symmetric"), [(8, True), (4, True), (4, False)])
def test_quantised_weights_are_off_by_half_a_step(bits: int, symmetric: bool) -> None:
    weight = torch.randn(6, 64)
    held = quantize(weight, bits=bits, group=32, symmetric=symmetric)
    assert held.shape == (6, 64)
    steps = held.scales.float().repeat_interleave(32, 1)
    # Half a step for the number; scales and lows are rounded to 11 bits.
    bound = steps * (0.5 + 2**bits * 2**-11) + weight.abs().max() * 2**-11
    assert ((dequantize(held, torch.float32) - weight).abs() <= bound).all()
    with pytest.raises(ValueError, match="groups of 48 do not divide rows of 64"):
        quantize(weight, bits=bits, group=48, symmetric=symmetric)


@pytest.mark.slow
def test_the_checks_of_providers_find_a_wrong_one() -> None:
    """`checks.inference_program` passes the reference, in fp32, and fails each kind of mistake."""

    def check(function: p.Load) -> set[str]:
        failed = set()
        for what, compare in inference_program(function, "cpu", ("float32",)):
            try:
                compare()
            except AssertionError:
                failed.add(what.split(", ", 1)[1].split()[0])
        return failed

    def without(kind: type) -> p.Load:
        def wrong(program: p.Program, collectives: p.Collectives | None = None) -> p.Runnable:
            runs = Interpreter(program, collectives)
            right = runs._actions[kind]

            def act(*operands: Any) -> None:
                right(*operands)
                registers = operands[1]
                written = operands[0].x if kind in (p.Rotate, p.Reduce) else operands[0].out
                registers[written] = registers[written] * 1.001

            runs._actions[kind] = act
            return runs

        return wrong

    assert check(load) == set()
    for kind in (
        p.Embed,
        p.Normalize,
        p.Linear,
        p.Gated,
        p.Rotate,
        p.Attend,
        p.Experts,
        p.Add,
        p.Reduce,
        p.Keep,
    ):
        assert kind.__name__ in check(without(kind)), f"a wrong {kind.__name__} passes"
