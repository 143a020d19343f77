"""The kernel table: who serves, who is passed over and why, and what is said about it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

import ds_core
from ds_core.entries import KernelEntry
from ds_core.errors import KernelError
from ds_core.kernels import Kernels
from ds_core.plugins import Plugins
from ds_core.plugins.discovery import BACKENDS, Found

Make = Callable[..., Kernels]


def entry(
    provider: str, priority: int = 10, why: str | None = None, **values: object
) -> KernelEntry:
    values = {
        "op": "adam",
        "load": f"tables_kernels:{provider}",
        "available": lambda: why,
        **values,
    }
    return KernelEntry(provider=provider, priority=priority, **values)  # type: ignore[arg-type]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Make:
    """entries, forced -> the table of the core and a plugin that offers `entries` and a reference
    of two operations.
    """

    def make(
        *entries: KernelEntry, forced: dict[str, str] | None = None, reference: bool = True
    ) -> Kernels:
        if reference:
            entries += tuple(entry("reference", 0, op=op) for op in ("adam", "lion"))
        module = ModuleType("tables_kernels")
        for each in entries:
            setattr(module, each.provider, lambda: None)
        module.ds_kernels = lambda: entries  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "tables_kernels", module)
        return Kernels(
            Plugins(found=[Found("tables", BACKENDS, "tables_kernels", "ds-tables", "1.0")]), forced
        )

    return make


def served(table: Kernels) -> str:
    table.get("adam", "cpu", "float32")
    return table.resolved()["adam/cpu/float32"]


def test_plain_torch_serves_where_nothing_is_installed(table: Make) -> None:
    def plain() -> None: ...

    bare = Kernels(Plugins(found=[]))
    assert (
        bare.get("adam", "cpu", "float64", plain) is plain
        and bare.get("lion", default=plain) is plain
    )
    assert "adam" not in bare.ops() and not any(key.startswith("adam") for key in bare.resolved())
    with pytest.raises(
        KernelError,
        match="kernel 'adam' is served by dscore-kernel-kit, which is not installed; install",
    ):
        bare.get("adam")
    with pytest.raises(KernelError, match="no kernel is called 'adan'"):
        bare.get("adan")
    gpu = table(entry("gpu", 30, devices=("cuda",)), entry("off", 20, why="no"), reference=False)
    assert gpu.get("adam", "cpu", "float32", plain) is plain
    with pytest.raises(
        KernelError, match="no provider can serve 'adam': gpu .ds-tables.: serves cuda only; off"
    ):
        gpu.get("adam", "cpu", "bfloat16")
    with pytest.raises(KernelError, match="kernels.adam forces 'off', but off"):
        table(entry("off", 20, why="no"), forced={"adam": "off"}).get("adam", default=plain)


def test_sums_of_two_dtypes_by_plain_torch() -> None:
    into = torch.zeros(1 << 14)
    added = torch.ones(1 << 14, dtype=torch.bfloat16)
    Kernels(Plugins(found=[])).accumulate(into, added)
    assert torch.equal(into, torch.ones_like(into))


def test_the_best_that_can_serve_does(table: Make) -> None:
    assert (
        served(table(entry("slow", 5), entry("fast", 30), entry("middle", 10)))
        == "fast (ds-tables)"
    )
    assert served(table(entry("slow", 5), entry("fast", 30, why="no GPU"))) == "slow (ds-tables)"
    assert (
        served(table(entry("gpu", 30, devices=("cuda",)), entry("half", dtypes=("float16",))))
        == "reference (ds-tables)"
    )


def test_it_is_resolved_once(table: Make) -> None:
    asked = []
    kernels = table(entry("fast", available=lambda: asked.append(1)))
    first = kernels.get("adam")
    asked.clear()
    assert kernels.get("adam") is first and not asked


def test_the_config_forces(table: Make) -> None:
    assert served(table(entry("fast"), forced={"adam": "reference"})) == "reference (ds-tables)"
    with pytest.raises(
        KernelError, match=r"kernels.adam forces 'fast', but fast \(ds-tables\): g\+\+ not found"
    ):
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
    assert served(kernels) == "reference (ds-tables)"


def test_what_the_log_says(table: Make) -> None:
    kernels = table(entry("fast", why="g++ not found"), entry("gpu", 30, devices=("cuda",)))
    kernels.get("adam")
    kernels.get("lion")
    assert kernels.summary() == (
        "adam, lion by reference (ds-tables)",
        ["adam not by fast (ds-tables): g++ not found"],
    )
    wanted = table(entry("fast", why="g++ not found"), forced={"adam": "reference"})
    wanted.get("adam")
    assert wanted.summary() == ("adam by reference (ds-tables)", [])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_core_trains_without_any_kernel(dtype: str) -> None:
    out = [
        "dscore-kernel-kit",
        "dscore-ops-cpu",
        "dscore-ops-cuda",
        "dscore-optimizers",
        "dscore-moe",
    ]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "bf16": {"enabled": dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "plugins": {"disable": out},
    }
    engine, *_ = ds_core.initialize(model=torch.nn.Linear(200, 200), config=config)
    losses = []
    for _ in range(8):
        loss = engine(torch.ones(2, 200, dtype=getattr(torch, dtype))).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and not any("adam" in op for op in engine.ctx.kernels.resolved())
    engine.destroy()
