"""Kernel ``inference_program`` by the CUDA sources: the kit's checks, emulated; recorded steps;
what is refused.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ds_inference_kit import checks
from ds_inference_kit import program as p
from ds_inference_kit.reference import load as reference
from ds_inference_kit.step import KVCache, Step
from ds_ops_cuda import native
from ds_ops_cuda.inference import programs
from ds_ops_cuda.inference.translate import translate

from ds_core.errors import KernelError

NAMES = ("float32", "bfloat16", "float16")
CASES = {name: list(checks.inference_program(programs.load, "cpu", (name,))) for name in NAMES}
EACH = [
    case
    for number, cases in enumerate(zip(*CASES.values(), strict=True))
    for case in cases[number % 3 : number % 3 + 1]
]
MODELS = ("a model in own", "a model in int4", "weights that move")
FAST = [case for case in EACH if "model" not in case[0]][::2] + [
    c for c in EACH if c[0].endswith(MODELS)
]


def test_a_part_of_the_kit_s_checks(device: list[str]) -> None:
    for name, case in FAST:
        try:
            case()
        except Exception as error:
            raise AssertionError(name) from error
    assert device.count("run_program") > len(FAST)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NAMES)
def test_the_kit_s_checks(dtype: str, device: list[str]) -> None:
    for name, case in CASES[dtype]:
        try:
            case()
        except Exception as error:
            raise AssertionError(name) from error


def test_kernels_take_all_of_a_model(device: list[str]) -> None:
    cpu = torch.device("cpu")
    for form in checks.FORMATS:
        program = checks.transformer(form)
        units = translate(program, cpu, 4).units
        left = {type(unit.instructions[0]) for unit in units if not unit.launches}
        assert left == ({p.Gated} if form == "columns" else set())
        # in two layers: q and k turn together; q, k and v are one product
        joined = 2 if form == "columns" else 6
        assert len(units) == len(program.instructions) - joined
    odd = dataclasses.replace(program, instructions=(p.Embed(0, torch.randn(5, 64)), p.Keep(0, 0)))
    assert [bool(unit.launches) for unit in translate(odd, cpu, 4).units] == [True, False]


class Graphs:
    """Stands in for CUDA graphs: what is recorded runs again when it is replayed, and not
    before."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def __call__(self, device: torch.device, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


def decoding(device: str, dtype: torch.dtype, load: Callable[..., Any], steps: int = 36) -> None:
    """Two sequences past the end of a block; the same step each time, changed in place; then one;
    then a prompt.
    """
    program = checks.transformer(dtype=dtype, device=device)
    wide = reference(dataclasses.replace(program, dtype=torch.float32))
    mine = load(program)
    caches = [
        KVCache.make(program.layers, 8, program.kv_heads, program.head_dim, dtype, device)
        for _ in range(2)
    ]
    blocks = torch.tensor([[5, 0, 3], [1, 6, 2]])
    bound = 4e-2 if dtype is torch.bfloat16 else 4e-5

    def compare(step: Step) -> None:
        got = mine(step, caches[0]).float()
        wanted = wide(step, caches[1])
        assert (got - wanted).abs().max() <= bound * wanted.abs().max()

    first = torch.tensor([7, 7])
    step = checks.make_step([(first[:1], 0), (first[1:], 0)], blocks, device)
    kept = mine(step, caches[0])
    again = kept.clone()
    for number in range(steps):
        step.tokens.copy_((torch.arange(2) * 13 + number * 5) % 101)
        step.positions.fill_(number)
        step.lengths.fill_(number + 1)
        compare(step)
    assert torch.equal(kept, again), "a later step has changed an earlier one's logits"
    compare(checks.make_step([(first[:1], steps)], blocks[:1], device))
    compare(checks.make_step([(first[:1], steps), (torch.arange(20), 0)], blocks[[0, 1]], device))
    mine.rebind()
    compare(checks.make_step([(first[:1], steps + 1)], blocks[:1], device))


def test_recorded_steps_equal_the_reference(
    device: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = Graphs()
    monkeypatch.setattr(native, "graph", graphs)

    def load(program: p.Program) -> p.Runnable:
        made = programs.load(program)
        assert isinstance(made, programs.CudaProgram)
        made.capture()
        return made

    decoding("cpu", torch.float32, load)
    assert (graphs.recorded, graphs.replayed) == (3, 36), (
        "two shapes, one of them anew after rebind; a prompt is not"
    )


def test_collectives_are_between_graphs(device: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs()
    sums = []
    monkeypatch.setattr(native, "graph", graphs)
    weight = torch.randn(8, 8)
    code = (p.Embed(0, torch.randn(9, 8)), p.Linear(0, 1, weight), p.Reduce(1), p.Add(1, 0, 0))
    program = p.Program(code, (8, 8), 0, torch.float32)
    together = p.Collectives(lambda x: sums.append(x.mul_(2)), lambda x: x)
    mine = programs.load(program, together)
    assert isinstance(mine, programs.CudaProgram)
    mine.capture()
    for token in (3, 4, 5):
        step = checks.make_step([(torch.tensor([token]), 0)])
        assert torch.allclose(mine(step), reference(program, together)(step))
    assert (graphs.recorded, graphs.replayed) == (2, 4)
    with pytest.raises(KernelError, match="has Reduce or Gather, and no collectives were given"):
        programs.load(program)


def changed(step: Step, **fields: Any) -> Step:
    """`step` with other fields, whose shapes are not checked as a new one's would be."""
    made = copy.copy(step)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def test_what_does_not_fit_is_an_error(device: list[str]) -> None:
    program = checks.transformer(layers=1)
    bad = p.Linear(0, 1, torch.randn(7, 64), torch.randn(3))
    with pytest.raises(
        KernelError,
        match=r"instruction 0 \(Linear\): weight is \(7, 64\), not \(64, 64\); bias is \(3,\)",
    ):
        programs.load(dataclasses.replace(program, instructions=(bad,)))
    mine = programs.load(program)
    token = torch.tensor([1])
    cache = KVCache.make(1, 2, 2, 16, torch.float32)
    step = checks.make_step([(token, 0)], torch.tensor([[0]]))
    for wrong, change in (
        (
            "a sequence of 33 tokens in 1 blocks of 32",
            {"lengths": torch.tensor([33], dtype=torch.int32)},
        ),
        ("2 tokens, 1 positions", {"tokens": torch.tensor([1, 2])}),
        ("no table of blocks for 1 sequences", {"blocks": None}),
        ("2 types for 1 tokens", {"types": torch.tensor([1, 2])}),
    ):
        with pytest.raises(KernelError, match=wrong):
            mine(changed(step, **change), cache)
    with pytest.raises(
        KernelError,
        match=r"a cache of \(1, 2, 1, 32, 16\), where the program needs \(1, 2, 2, 32, 16\)",
    ):
        mine(step, KVCache.make(1, 2, 1, 16, torch.float32))
    with pytest.raises(RuntimeError, match="sequence 0 has 1 rows and 0 tokens"):
        mine(dataclasses.replace(step, lengths=torch.tensor([0], dtype=torch.int32)), cache)
    outside = mine(dataclasses.replace(step, tokens=torch.tensor([101])), cache)
    assert outside.isnan().all(), (
        "a token that the table has not is not read from memory that follows"
    )


def test_other_devices_and_dtypes_are_the_interpreter_s(
    device: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    program = dataclasses.replace(checks.transformer(layers=1), dtype=torch.float64)
    assert not isinstance(programs.load(program), programs.CudaProgram)
    assert (
        "an inference program in torch.float64 with weights on cpu runs on plain torch"
        in caplog.text
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("captured", [False, True])
def test_decoding_on_the_gpu(dtype: torch.dtype, captured: bool) -> None:
    def load(program: p.Program) -> p.Runnable:
        made = programs.load(program)
        assert isinstance(made, programs.CudaProgram)
        made.capture(captured)
        return made

    decoding("cuda", dtype, load)
