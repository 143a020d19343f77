"""dscore-ops-cpu: against the references on every instruction set, and what callers may rely on beyond
them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_kernel_kit import build
from ds_kernel_kit.steps import STEPS
from ds_ops_cpu import kernels
from ds_ops_cpu.extension import EXTENSION
from ds_testing import KernelConformance
from torch import Tensor

from ds_core.errors import KernelError

SETS = ("avx512", "avx2", "generic")
ADAM: dict[str, Any] = {
    "step": 3,
    "lr": 0.1,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.1,
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[*(pytest.param(s, marks=pytest.mark.slow) for s in SETS[:-1]), SETS[-1]])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each that this processor can run; what it cannot is shown to be refused."""
    native = kernels.native()
    if request.param not in native.instruction_sets():
        with pytest.raises(ValueError, match=f"cannot run {request.param}"):
            native.use_instruction_set(request.param)
        yield "generic"
        return
    before = native.use_instruction_set(request.param)
    yield request.param
    native.use_instruction_set(before)


@pytest.mark.usefixtures("instruction_set")
class TestConformance(KernelConformance):
    plugin = "ds_ops_cpu.plugin"


@pytest.mark.slow
class TestWithoutExchangeTable(KernelConformance):
    """torch before 2.10: Python looks the tensors up."""

    plugin = "ds_ops_cpu.plugin"

    @pytest.fixture(autouse=True)
    def older_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "_EXCHANGE", None)


def operands(op: str, n: int) -> list[Tensor]:
    torch.manual_seed(n)
    return [
        torch.randn(n).abs_() if i == 3 or op == "adagrad" else torch.randn(n)
        for i in range(len(STEPS[op].tensors))
    ]


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("op", [op for op in STEPS if op != "lamb"])
def test_a_result_does_not_depend_on_how_tensors_are_cut(op: str) -> None:
    """So a partitioner may cut anywhere: bit for bit, on one thread and on two."""
    run: Callable[..., Any] = getattr(kernels, op)
    whole = operands(op, 100_003)
    cut = operands(op, 100_003)
    pieces = [list(t.split([1, 1023, 5000, 1025, 16, 60_000, 32_937, 1])) for t in cut]
    torch.set_num_threads(1)
    run(*[[t] for t in whole], **STEPS[op].trials[1])
    torch.set_num_threads(2)
    run(*pieces, **STEPS[op].trials[1])
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


def among_many(op: str) -> list[list[Tensor]]:
    """Lists of places of every kind that can be among the tensors of a step."""
    sizes = [0, 1, 5, 1023, 70_000, 3, 1024, 200_003]
    torch.manual_seed(5)
    rows = [operands(op, sizes[i % 8]) for i in range(200)]
    rows[20] = [t.view(64, 16).t() for t in operands(op, 1024)]  # dense, in another order
    rows[90][1] = torch.randn(3, 2)[:, 0]  # a gradient with gaps, among others without
    rows[89] = operands(op, 3)
    rows[90] = [*operands(op, 3)[:1], rows[90][1], *operands(op, 3)[2:]]
    rows[150] = [t.double() for t in operands(op, 500)]
    rows[170] = [operands(op, 300)[0], operands(op, 300)[1].bfloat16(), *operands(op, 300)[2:]]
    return [list(column) for column in zip(*rows, strict=True)]


@pytest.mark.fast_cases("adam-2", "lion-2")
@pytest.mark.parametrize("threads", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
@pytest.mark.parametrize("op", [op for op in STEPS if op != "lamb"])
def test_many_tensors_are_stepped_as_each_would_be(op: str, threads: int) -> None:
    """Where work begins before all are looked at; with copies, too."""
    run: Callable[..., Any] = getattr(kernels, op)
    whole, parts = (
        [[t.clone() for t in tensors * 2] for tensors in among_many(op)] for _ in range(2)
    )
    one, two = (
        [torch.zeros(p.shape, dtype=torch.bfloat16) for p in lists[0]] for lists in (whole, parts)
    )
    torch.set_num_threads(threads)
    run(*whole, **STEPS[op].trials[1], copies=one)
    for place, row in enumerate(zip(*parts, two, strict=True)):
        run(*([t] for t in row[:-1]), **STEPS[op].trials[1], copies=[row[-1]])
        assert all(torch.equal(a, b[place]) for a, b in zip(row, (*whole, one), strict=True)), place
    with pytest.raises(KernelError, match=r"have \[400, 399(, 400)*\] tensors"):
        run(whole[0], whole[1][1:], *whole[2:], **STEPS[op].trials[1])
    whole[1][300] = torch.ones(12345)
    with pytest.raises(
        KernelError, match=r"tensors at place 300 have \[70000, 12345(, 70000)*\] elements"
    ):
        run(*whole, **STEPS[op].trials[1])


@pytest.mark.fast_cases("adagrad-2", "sgd-2")
@pytest.mark.parametrize("threads", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
@pytest.mark.parametrize("op", [op for op in STEPS if op != "lamb"])
def test_steps_in_portions_are_the_step(op: str, threads: int) -> None:
    run: Callable[..., Any] = getattr(kernels, op)
    whole = among_many(op)
    parts = among_many(op)
    untouched = among_many(op)
    torch.set_num_threads(threads)
    run(*whole, **STEPS[op].trials[1])

    def prepare() -> None:
        for first in range(0, 200, 32):
            run(*(tensors[first : first + 32] for tensors in parts), **STEPS[op].trials[1])

    run.together(prepare)  # type: ignore[attr-defined]
    for place, (a, b, before) in enumerate(zip(whole[0], parts[0], untouched[0], strict=True)):
        assert torch.equal(a, b), place
        assert not a.numel() or not torch.equal(a, before), place
    assert all(
        torch.equal(a, b)
        for one, two in zip(whole[2:], parts[2:], strict=True)
        for a, b in zip(one, two, strict=True)
    )


def test_what_preparing_raises_is_raised_after_the_steps_that_were_asked_for() -> None:
    torch.set_num_threads(2)
    lists = operands("adam", 500_000)
    alone = operands("adam", 500_000)
    kernels.adam(*[[t] for t in alone], **ADAM)

    def fails() -> None:
        kernels.adam(*[[t] for t in lists], **ADAM)
        kernels.together(lambda: None)  # within another one it is nothing
        raise KeyboardInterrupt("stop")

    with pytest.raises(KeyboardInterrupt, match="stop"):
        kernels.together(fails)
    assert torch.equal(lists[0], alone[0])
    kernels.adam(*[[t] for t in lists], **ADAM)  # and all is as before
    assert not torch.equal(lists[0], alone[0])


def test_only_a_thread_that_prepares_hands_out_work() -> None:
    """Another one's steps, and LAMB's, whose results are wanted, are done when they return."""
    torch.set_num_threads(2)
    lists, other, lamb = (operands("adam", 300_000) for _ in range(3))
    before = other[0].clone()

    def elsewhere() -> None:
        kernels.adam(*[[t] for t in other], **ADAM)
        assert not torch.equal(other[0], before)

    def prepare() -> None:
        kernels.adam(*[[t] for t in lists], **ADAM)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(elsewhere).result()
        ratios = kernels.lamb(*[[t] for t in lamb], **STEPS["lamb"].trials[1])
        assert len(ratios) == 1 and not torch.equal(lamb[0], before)

    kernels.together(prepare)
    assert torch.equal(lists[0], other[0])
    with pytest.raises(ValueError, match="nobody to hand the work to"):
        kernels.native().adam(0, kernels._plain([[t] for t in lists]), False, *[0.5] * 9)


def test_sums_do_not_depend_on_the_number_of_threads() -> None:
    x = [torch.randn(n) for n in (70_000, 3, 150_001)]
    norms = set()
    coeffs = set()
    params = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        norms.add(float(kernels.squared_norm(x)))
        lists = [[t] for t in operands("lamb", 90_000)]
        coeffs.add(tuple(kernels.lamb(*lists, **STEPS["lamb"].trials[0])))
        params.append(lists[0][0])
    assert len(norms) == len(coeffs) == 1
    assert torch.equal(params[0], params[1]) and torch.equal(params[0], params[2])


@pytest.mark.usefixtures("instruction_set")
def test_every_16_bit_number_is_read_and_written_as_torch_does() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        every = bits.view(dtype)
        into = torch.zeros(2**16)
        kernels.accumulate([into], [every])
        torch.testing.assert_close(into, every.float(), rtol=0, atol=0, equal_nan=True)
    # halfway between two numbers of 16 bits, just above and below, over all exponents
    between = (
        torch.arange(0, 2**31, 2**11 - 3, dtype=torch.int64).to(torch.int32).view(torch.float32)
    )
    values = torch.cat(
        [
            between,
            -between,
            torch.arange(0, 2**31, 2**15, dtype=torch.int64).to(torch.int32).view(torch.float32),
        ]
    )
    for dtype in (torch.bfloat16, torch.float16):
        param = values.clone()
        copy = torch.zeros_like(values, dtype=dtype)
        kernels.sgd(
            [param],
            [torch.zeros_like(param)],
            None,
            lr=0.0,
            momentum=0.0,
            dampening=0.0,
            weight_decay=0.0,
            nesterov=False,
            first=False,
            copies=[copy],
        )
        torch.testing.assert_close(copy, values.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_large_copies_are_written_past_the_cache_alike() -> None:
    n = 5_000_001
    p, g, m, v = operands("adam", n)
    v.abs_()
    small = torch.zeros(n + 1, dtype=torch.bfloat16)
    copy = torch.zeros(n, dtype=torch.bfloat16)
    for copies in (copy, small[1:]):  # the second is off alignment
        q = p.clone()
        a = m.clone()
        b = v.clone()
        kernels.adam([q], [g], [a], [b], **ADAM, copies=[copies])
        assert torch.equal(copies, q.bfloat16())


def test_autograd_notices_that_parameters_changed() -> None:
    p = torch.nn.Parameter(torch.ones(4))
    loss = (p * p).sum()
    kernels.adam([p], [torch.ones(4)], [torch.zeros(4)], [torch.zeros(4)], **ADAM)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("older", [False, True])
def test_lists_that_do_not_fit_are_refused(older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if older:
        monkeypatch.setattr(kernels, "_EXCHANGE", None)

    def one() -> list[Tensor]:
        return [torch.ones(4)]

    p = torch.ones(4)
    with pytest.raises(KernelError, match=r"place 0 have \[4, 3, 4, 4\] elements"):
        kernels.adam([p], [torch.ones(3)], one(), one(), **ADAM)
    with pytest.raises(KernelError, match=r"have \[1, 2, 1, 1\] tensors"):
        kernels.adam([p], [*one(), *one()], one(), one(), **ADAM)
    with pytest.raises(KernelError, match=r"place 0 have \[4, 5\] elements"):
        kernels.accumulate([p], [torch.ones(5)])
    with pytest.raises(
        KernelError, match="8 elements in groups of 4 at 8 bits are 8 in q and 2 in scales"
    ):
        kernels.dequantize(
            torch.zeros(8, dtype=torch.int8),
            torch.ones(1),
            None,
            bits=8,
            group=4,
            numel=8,
            dtype=torch.float32,
        )
    assert torch.equal(p, torch.ones(4))


@pytest.mark.parametrize(
    "odd", ["sparse", "meta", "fp64 beside fp32", "transposed", "number", "None", "shorter"]
)
@pytest.mark.parametrize("place", [0, 1, 2, 17, 33, 39])
def test_whatever_is_among_the_tensors_is_noticed(odd: str, place: int) -> None:
    """Their memory is read ahead, which must not touch what is no tensor or has no memory."""
    strange: dict[str, Any] = {
        "sparse": torch.eye(4).to_sparse(),
        "meta": torch.zeros(4, 4, device="meta"),
        "fp64 beside fp32": torch.zeros(4, 4, dtype=torch.float64),
        "transposed": torch.zeros(4, 4).T[:2],
        "number": 3,
        "None": None,
        "shorter": torch.zeros(3),
    }
    tensors: list[Any] = [torch.zeros(4, 4) for _ in range(40)]
    mixed = [torch.nn.Parameter(t) if i % 3 else t for i, t in enumerate(tensors)]
    assert kernels._plain([mixed, tensors]) is not None
    tensors[place] = strange[odd]
    assert kernels._plain([mixed, tensors]) is None


def test_memory_that_was_given_back_is_not_written() -> None:
    """An offloaded tensor keeps its size and has no storage."""
    p = torch.ones(4)
    rest = [torch.ones(4) for _ in range(3)]
    rest[1].untyped_storage().resize_(0)
    with pytest.raises((KernelError, ValueError, RuntimeError)):
        kernels.adam([p], [rest[0]], [rest[1]], [rest[2]], **ADAM)
    assert torch.equal(p, torch.ones(4))


def test_nothing_is_built_at_import(tmp_path: Path) -> None:
    code = (
        "import os, sys; os.environ['DS_CORE_CACHE'] = sys.argv[1]\n"
        "import ds_ops_cpu.plugin, ds_ops_cpu.extension; assert 'torch' not in sys.modules\n"
        "assert ds_ops_cpu.extension.available() is None; import ds_ops_cpu.kernels\n"
        "assert not os.path.exists(sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "cache")], check=True, timeout=300)


@pytest.mark.slow
def test_the_whole_build_is_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured as processor time of the compilers, so that a busy machine does not count; about 14
    s.
    """
    monkeypatch.setenv("DS_CORE_CACHE", str(tmp_path))
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    build.build(EXTENSION)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 60


@pytest.mark.slow
def test_a_wheel_with_compiled_kernels_needs_no_compiler(tmp_path: Path) -> None:
    """``DS_BUILD_OPS=1``: the library is in the wheel, the wheel is for this platform, and nothing
    is compiled.
    """
    root = Path(__file__).parents[1]
    code = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    environment = {"PATH": "/usr/bin:/bin", "DS_BUILD_OPS": "1", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=root,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    name = done.stdout.split()[-1]
    assert "none-any" not in name
    subprocess.run(
        [sys.executable, "-m", "zipfile", "-e", str(tmp_path / name), str(tmp_path / "site")],
        check=True,
    )
    use = (
        "import sys; sys.path[:0] = sys.argv[1:3]; import ds_ops_cpu, torch; from ds_ops_cpu "
        "import kernels\n"
        "assert ds_ops_cpu.__file__.startswith(sys.argv[1]); "
        "print(float(kernels.squared_norm([torch.ones(9)])))\n"
    )
    repository = root.parents[1]
    bare = {"PATH": "/nowhere", "HOME": str(tmp_path / "home"), "CXX": "/no/compiler"}
    done = subprocess.run(
        [sys.executable, "-c", use, str(tmp_path / "site"), str(repository)],
        env=bare,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "9.0\n" and not (tmp_path / "home").exists()
