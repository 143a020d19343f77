"""Inference programs in C++: every instruction set, any number of threads, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from ds_inference_kit import program as p
from ds_inference_kit.checks import inference_program, make_step, random, transformer
from ds_inference_kit.step import KVCache
from ds_inference_kit.weights import dequantize, quantize
from ds_ops_cpu import programs

SETS = ("avx512bf16", "avx512", "avx2", "generic")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_every_instruction_set(name: str) -> None:
    native = programs.native()
    if name not in native.instruction_sets():
        with pytest.raises(ValueError, match=f"cannot run {name}"):
            native.use_instruction_set(name)
        return
    before = native.use_instruction_set(name)
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for what, compare in inference_program(programs.load, "cpu", ()):
                try:
                    compare()
                except AssertionError as error:
                    raise AssertionError(f"{what}, {threads} threads: {error}") from error
    finally:
        native.use_instruction_set(before)


def _product(x: torch.Tensor, weight: p.Weight) -> torch.Tensor:
    """x @ weight.T by C++, in a program of bf16; what is in fp32 until the end keeps its bits."""
    rows = x.shape[0]
    out = weight.shape[0]
    code = (p.Embed(0, x, p.By.TYPES), p.Linear(0, 1, weight))
    runs = programs.load(p.Program(code, (x.shape[1], out), 1, torch.bfloat16))
    types = torch.arange(rows, dtype=torch.int32)
    return runs(make_step([(torch.arange(rows), 0)], types=types)).float()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_products_in_whole_numbers(bits: int, symmetric: bool) -> None:
    """Of several rows, on processors that multiply bytes, x is rounded to 8 bits with a scale for
    each 32.
    """
    for inner, group in ((64, 32), (576, 32), (576, 64), (1088, 32), (1024, 512)):
        weight = quantize(
            random(33, inner) / inner**0.5, bits=bits, group=group, symmetric=symmetric
        )
        for rows in (1, 3, 5, 17, 24):
            x = random(rows, inner, seed=rows)
            blocks = x.unflatten(1, (-1, 32))
            scales = blocks.abs().amax(2, keepdim=True) / 127
            rounded = ((blocks / scales).round() * scales).flatten(1)
            whole = rows > 4 and "avx512bf16" in programs.native().instruction_sets()
            expected = (rounded if whole else x).double() @ dequantize(
                weight, torch.float32
            ).double().t()
            away = (_product(x, weight).double() - expected).norm() / expected.norm()
            # the result is bf16
            assert away < 3e-3, f"{inner} in groups of {group}, {rows} rows: {away}"


def test_rows_of_bf16_of_any_length() -> None:
    for inner in (1, 15, 64, 66, 190, 576):
        weight = random(9, inner).bfloat16()
        x = random(1, inner, seed=1)
        expected = x.double() @ weight.double().t()
        assert (_product(x, weight).double() - expected).norm() < 4e-3 * expected.norm(), inner


def test_large_pages_change_nothing() -> None:
    numbers = torch.arange(3 << 20, dtype=torch.int32)
    moved = programs.native().use_large_pages(
        [(numbers.data_ptr() + 64, numbers.nbytes - 64), (4096, 1 << 22), (0, 0)]
    )
    assert moved % (2 << 20) == 0 and moved <= numbers.nbytes + (4 << 20)
    assert torch.equal(numbers, torch.arange(3 << 20, dtype=torch.int32))


@pytest.mark.parametrize("form", ["own", "int4 with lows"])
def test_results_do_not_depend_on_threads_or_neighbours(form: str) -> None:
    """A row's logits are the same bits by one thread and three, at a context that is divided into
    parts.
    """
    program = transformer(form, layers=1)
    blocks = torch.arange(12).view(1, 12)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        runs = programs.load(program)
        cache = KVCache.make(1, 12, 2, 16, torch.float32)
        for first, size in ((0, 300), (300, 1), (301, 9)):
            found.append(runs(make_step([(torch.arange(size) % 100, first)], blocks), cache)[-1])
    many, one, few = found[:3]
    torch.testing.assert_close(many, found[3])  # torch's products
    assert torch.equal(one, found[4]) and torch.equal(few, found[5])


def test_numbers_out_of_range_are_refused() -> None:
    program = transformer(layers=1)
    runs = programs.load(program)
    cache = KVCache.make(1, 2, 2, 16, torch.float32)
    blocks = torch.tensor([[0, 1]])
    one = torch.ones(1)
    for step, message in (
        (make_step([(one * 101, 0)], blocks), "token of row 0 is 101; there are 101"),
        (make_step([(one, 64)], blocks), "sequence 0 has too few blocks for its length"),
        (make_step([(one, 3)], torch.tensor([[2]])), "block 2 of sequence 0 is not in the cache"),
        (make_step([(one, 0)], blocks, wanted=torch.tensor([1])), "row 1 is wanted, which is none"),
    ):
        with pytest.raises(ValueError, match=message):
            runs(step, cache)
    step = dataclasses.replace(make_step([(one, 0)], blocks), positions=torch.tensor([512]))
    with pytest.raises(ValueError, match="position of row 0 is 512; there are 512"):
        runs(step, cache)
