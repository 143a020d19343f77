"""Inference programs in C++: every instruction set, any number of threads, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from ds_inference_kit.checks import inference_program, make_step, transformer
from ds_inference_kit.step import KVCache
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


@pytest.mark.parametrize("form", ["own", "int4 with lows"])
def test_results_do_not_depend_on_threads_or_neighbours(form: str) -> None:
    """A row's logits are the same bits by one thread and three, at a context that is divided into parts."""
    program = transformer(form, layers=1)
    blocks = torch.arange(12).view(1, 12)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        runs, cache = programs.load(program), KVCache.make(1, 12, 2, 16, torch.float32)
        for first, size in ((0, 300), (300, 1), (301, 9)):
            found.append(runs(make_step([(torch.arange(size) % 100, first)], blocks), cache)[-1])
    many, one, few = found[:3]
    torch.testing.assert_close(many, found[3])  # torch's products
    assert torch.equal(one, found[4]) and torch.equal(few, found[5])


def test_numbers_out_of_range_are_refused() -> None:
    program = transformer(layers=1)
    runs, cache = programs.load(program), KVCache.make(1, 2, 2, 16, torch.float32)
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
