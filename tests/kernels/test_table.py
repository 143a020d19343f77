"""The kernel table: who serves, who is passed over and why, and what is said about it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from ds_core.entries import KernelEntry
from ds_core.errors import KernelError
from ds_core.kernels import Kernels, references
from ds_core.plugins import BACKENDS, Found, Plugins

Make = Callable[..., Kernels]


def entry(provider: str, priority: int = 10, why: str | None = None, **values: object) -> KernelEntry:
    values = {"op": "adam", "load": f"tables_kernels:{provider}", "available": lambda: why, **values}
    return KernelEntry(provider=provider, priority=priority, **values)  # type: ignore[arg-type]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Make:
    """entries, forced -> the table of the core and a plugin that offers `entries`."""

    def make(*entries: KernelEntry, forced: dict[str, str] | None = None) -> Kernels:
        module = ModuleType("tables_kernels")
        for each in entries:
            setattr(module, each.provider, lambda: None)
        module.ds_kernels = lambda: entries  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "tables_kernels", module)
        return Kernels(Plugins(found=[Found("tables", BACKENDS, "tables_kernels", "ds-tables", "1.0")]), forced)

    return make


def served(table: Kernels) -> str:
    table.get("adam", "cpu", "float32")
    return table.resolved()["adam/cpu/float32"]


def test_the_references_serve_where_nothing_else_does() -> None:
    table = Kernels(Plugins(found=[]))
    for op in table.ops():
        for device, dtype in (("cpu", "float64"), ("cuda", "bfloat16"), ("new", "float8_e4m3fn")):
            table.get(op, device, dtype)
    assert table.get("adam") is references.adam
    assert set(table.resolved().values()) == {"reference (ds-core)"}


def test_the_best_that_can_serve_does(table: Make) -> None:
    assert served(table(entry("slow", 5), entry("fast", 30), entry("middle", 10))) == "fast (ds-tables)"
    assert served(table(entry("slow", 5), entry("fast", 30, why="no GPU"))) == "slow (ds-tables)"
    assert (
        served(table(entry("gpu", 30, devices=("cuda",)), entry("half", dtypes=("float16",)))) == "reference (ds-core)"
    )


def test_it_is_resolved_once(table: Make) -> None:
    asked = []
    kernels = table(entry("fast", available=lambda: asked.append(1)))
    first = kernels.get("adam")
    asked.clear()
    assert kernels.get("adam") is first and not asked


def test_the_config_forces(table: Make) -> None:
    assert served(table(entry("fast"), forced={"adam": "reference"})) == "reference (ds-core)"
    with pytest.raises(KernelError, match=r"kernels.adam forces 'fast', but fast \(ds-tables\): g\+\+ not found"):
        served(table(entry("fast", why="g++ not found"), forced={"adam": "fast"}))
    with pytest.raises(KernelError, match="no provider 'fest'; installed: fast, reference"):
        table(entry("fast"), forced={"adam": "fest"}).check_forced()
    with pytest.raises(KernelError, match="did you mean 'adam'"):
        table(forced={"adan": "fast"}).check_forced()


def test_two_that_are_the_same_are_an_error(table: Make) -> None:
    with pytest.raises(KernelError, match="'fast' is offered by ds-tables and ds-tables"):
        table(entry("fast"), entry("fast")).get("adam")


def test_a_probe_that_fails_is_a_reason(table: Make) -> None:
    kernels = table(entry("fast", available="no_such_module_here:probe"))
    reason = kernels.candidates("adam", "cpu", "float32")[0].reason
    assert reason is not None and "no_such_module_here" in reason
    assert served(kernels) == "reference (ds-core)"


def test_what_is_told(table: Make) -> None:
    kernels = table(entry("fast", why="g++ not found"), entry("gpu", 30, devices=("cuda",)))
    kernels.get("adam")
    kernels.get("lion")
    assert kernels.told() == ("adam, lion by reference (ds-core)", ["adam not by fast (ds-tables): g++ not found"])
    wanted = table(entry("fast", why="g++ not found"), forced={"adam": "reference"})
    wanted.get("adam")
    assert wanted.told() == ("adam by reference (ds-core)", [])


# -- references --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_adam_is_torchs(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    mine = torch.randn(50, dtype=dtype)
    theirs = torch.nn.Parameter(mine.clone())
    grads = [torch.randn(50, dtype=dtype) for _ in range(5)]
    optimizer = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.1, fused=True)
    m, v = torch.zeros_like(mine), torch.zeros_like(mine)
    for step, grad in enumerate(grads, 1):
        theirs.grad = grad * scale
        optimizer.step()
        references.adam(
            [mine], [grad], [m], [v], step=step, lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, scale=scale
        )
    torch.testing.assert_close(mine, theirs.detach())
    assert scale != 1 or torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sgd_updates_every_element(dtype: torch.dtype) -> None:
    """torch's fused function leaves those of 16-bit parameters alone in a first step."""
    p, g, m = (torch.ones(65, dtype=dtype) for _ in range(3))
    references.sgd([p], [g], [m], lr=0.5, momentum=0.5, dampening=0.0, weight_decay=0.0, nesterov=False, first=True)
    assert torch.equal(p, torch.full_like(p, 0.5)) and torch.equal(m, torch.ones_like(m))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_quantising_is_off_by_half_a_step(bits: int, symmetric: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(1001)
    q, scales, lows = references.quantize(x, bits=bits, group=64, symmetric=symmetric)
    back = references.dequantize(q, scales, lows, bits=bits, group=64, numel=1001, dtype=torch.float32)
    steps = scales.repeat_interleave(64)[:1001]
    assert ((back - x).abs() <= steps / 2 * 1.0001).all()
    assert q.numel() * q.element_size() == (1001 if bits == 8 else 501)


@pytest.mark.parametrize(("bits", "group"), [(3, 64), (8, 0), (4, 7)])
def test_sizes_that_there_are_not(bits: int, group: int) -> None:
    with pytest.raises(ValueError, match="use 4 or 8|at least 1"):
        references.quantize(torch.ones(8), bits=bits, group=group, symmetric=True)


def test_a_tensor_without_gaps_is_known() -> None:
    x = torch.zeros(4, 6)
    dense = [
        x,
        x.t(),
        x.view(2, 2, 6).permute(2, 0, 1),
        x[:0],
        x[2],
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]
    assert all(references.is_dense(t) for t in dense)
    gaps = [x[:, ::2], x[:, :3], x[:1].expand(4, 6), x.as_strided((2, 2, 2), (1, 1, 5))]
    assert not any(references.is_dense(t) for t in gaps)
