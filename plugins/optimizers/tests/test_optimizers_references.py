"""Each optimizer against torch's own, or the papers' equations, over 100 steps with its state saved
and loaded.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import ds_optimizers as ours
import papers
import pytest
import torch
from ds_kernel_kit import references
from ds_optimizers.muon import orthogonalize, split_groups
from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_core.kernels import Kernels
from ds_core.plugins import Plugins
from ds_core.plugins.registry import PluginSettings

SHAPES = ((5, 3), (7,), (), (4, 6), (2, 3, 2, 2), (9, 2), (0, 3))
RATES = (0.02, 0.01)  # of two groups
DECAY = (0.1, 0.0)
Maker = Callable[[Any], torch.optim.Optimizer]


def weights(dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    make = torch.Generator().manual_seed(3)
    found = [
        nn.Parameter(torch.randn(s, generator=make, dtype=torch.float64).to(dtype)) for s in shapes
    ]
    found[0] = nn.Parameter(found[0].detach().t().contiguous().t())  # columns first in memory
    return found


def gradient(step: int, index: int, like: Tensor) -> Tensor | None:
    if (step + index) % 7 == 5:
        return None  # not used in this step
    make = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(like.shape, generator=make, dtype=torch.float64).to(like.dtype)


def groups(params: Sequence[nn.Parameter], **extra: Any) -> list[dict[str, Any]]:
    cut = len(params) // 2
    rows = (params[:cut], params[cut:])
    return [
        {"params": list(p), "lr": lr, "weight_decay": wd, **extra}
        for p, lr, wd in zip(rows, RATES, DECAY, strict=True)
    ]


def trained(
    make: Maker, dtype: torch.dtype, steps: int = 100, shapes: Any = SHAPES, reload: bool = True
) -> list[Tensor]:
    params = weights(dtype, shapes)
    optimizer = make(groups(params))
    for step in range(steps):
        for index, param in enumerate(params):
            param.grad = gradient(step, index, param)
        optimizer.step()
        if reload and step == steps // 2:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = make(groups(params))
            optimizer.load_state_dict(state)
    return [p.detach() for p in params]


def by_hand(
    update: Callable[..., None], dtype: torch.dtype, steps: int = 100, shapes: Any = SHAPES
) -> list[Tensor]:
    params = [p.detach().clone().to(torch.float64) for p in weights(dtype, shapes)]
    states: list[dict[str, Any]] = [{} for _ in params]
    for step in range(steps):
        for index, param in enumerate(params):
            if (grad := gradient(step, index, param.to(dtype))) is not None:
                group = int(index >= len(params) // 2)
                update(param, grad.double(), states[index], lr=RATES[group], wd=DECAY[group])
    return params


def check(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        if a.numel():
            error = float(
                (a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-3)
            )
            assert error <= tolerance, f"off by {error:.3g} at shape {tuple(a.shape)}"


TORCH: dict[str, tuple[Maker, Maker]] = {
    "adamw": (lambda g: ours.AdamW(g), lambda g: torch.optim.AdamW(g, weight_decay=0)),
    "fused": (lambda g: ours.FusedAdam(g), lambda g: torch.optim.AdamW(g, weight_decay=0)),
    "cpu": (
        lambda g: ours.DeepSpeedCPUAdam(g, betas=(0.8, 0.9)),
        lambda g: torch.optim.AdamW(g, betas=(0.8, 0.9)),
    ),
    "adam": (lambda g: ours.Adam(g, adam_w_mode=False), lambda g: torch.optim.Adam(g)),
    "adagrad": (
        lambda g: ours.Adagrad(g, lr_decay=0.02, initial_accumulator_value=0.3, eps=1e-8),
        lambda g: torch.optim.Adagrad(g, lr_decay=0.02, initial_accumulator_value=0.3, eps=1e-8),
    ),
    "cpu adagrad": (lambda g: ours.DeepSpeedCPUAdagrad(g), lambda g: torch.optim.Adagrad(g)),
    "sgd": (lambda g: ours.SGD(g), lambda g: torch.optim.SGD(g)),
    "momentum": (
        lambda g: ours.SGD(g, momentum=0.9, dampening=0.3),
        lambda g: torch.optim.SGD(g, momentum=0.9, dampening=0.3),
    ),
    "nesterov": (
        lambda g: ours.SGD(g, momentum=0.9, nesterov=True),
        lambda g: torch.optim.SGD(g, momentum=0.9, nesterov=True),
    ),
}


@pytest.mark.parametrize("name", list(TORCH))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_equals_torchs_own(name: str, dtype: torch.dtype, tolerance: float) -> None:
    make, reference = TORCH[name]
    check(
        trained(make, dtype),
        trained(reference, torch.float64 if dtype is torch.float64 else dtype),
        tolerance,
    )


PAPERS: dict[str, tuple[Maker, Callable[..., None]]] = {
    "adamw": (lambda g: ours.AdamW(g), lambda *a, **k: papers.adam(*a, decoupled=True, **k)),
    "uncorrected": (
        lambda g: ours.FusedAdam(g, bias_correction=False),
        lambda *a, **k: papers.adam(*a, decoupled=True, correct=False, **k),
    ),
    "uncorrected adam": (
        lambda g: ours.CPUAdam(g, bias_correction=False, adam_w_mode=False),
        lambda *a, **k: papers.adam(*a, decoupled=False, correct=False, **k),
    ),
    "lion": (lambda g: ours.Lion(g), papers.lion),
    "cpu lion": (lambda g: ours.DeepSpeedCPULion(g), papers.lion),
    "adam-mini": (lambda g: ours.AdamMini(g), papers.adam_mini),
    "schedule-free": (
        lambda g: ours.ScheduleFreeAdamW(g, warmup_steps=10),
        lambda *a, **k: papers.schedule_free(*a, warmup=10, **k),
    ),
    "lamb": (lambda g: ours.Lamb(g), papers.lamb),
    "lamb inside": (
        lambda g: ours.FusedLamb(g, eps_inside_sqrt=True, bias_correction=False),
        lambda *a, **k: papers.lamb(*a, inside=True, correct=False, **k),
    ),
}


@pytest.mark.parametrize("name", list(PAPERS))
def test_equals_the_paper(name: str) -> None:
    make, update = PAPERS[name]
    check(trained(make, torch.float64), by_hand(update, torch.float64), 1e-11)


@pytest.mark.parametrize("name", ["adamw", "adam-mini", "schedule-free", "lamb"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_narrow_types_follow_the_paper(name: str, dtype: torch.dtype, tolerance: float) -> None:
    make, update = PAPERS[name]
    check(trained(make, dtype), by_hand(update, dtype), tolerance)


def test_states_of_16_bit_parameters_are_fp32_unless_told_otherwise() -> None:
    for wide in (True, False):
        param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        param.grad = torch.ones_like(param)
        for make in (ours.DeepSpeedCPUAdam, ours.Lion, ours.Adagrad):
            optimizer = make([param], fp32_optimizer_states=wide)
            optimizer.step()
            kinds = {v.dtype for k, v in optimizer.state[param].items() if k != "step"}
            assert kinds == {torch.float32 if wide else torch.bfloat16}


# -- Muon ------------------------------------------------------------------------------------------

MATRICES = ((5, 3), (3, 8), (4, 4), (4, 6), (2, 3, 2, 2), (9, 2))


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
def test_muon_equals_the_paper(method: str, dtype: torch.dtype, tolerance: float) -> None:
    def make(given: Any) -> torch.optim.Optimizer:
        rows = [{**g, "use_muon": True} for g in given[:1]] + [
            {**g, "use_muon": False} for g in given[1:]
        ]
        return ours.Muon(rows, ns_method=method)

    def update(p: Tensor, g: Tensor, s: dict[str, Any], *, lr: float, wd: float) -> None:
        (papers.muon if lr == RATES[0] else papers.muon_adam)(p, g, s, lr=lr, wd=wd)

    check(trained(make, dtype, shapes=MATRICES), by_hand(update, dtype, shapes=MATRICES), tolerance)


@pytest.mark.parametrize("variant", ["normuon", "adamuon"])
def test_variants_of_muon_equal_their_papers(variant: str) -> None:
    def make(given: Any) -> torch.optim.Optimizer:
        rows = [{**g, "use_muon": True} for g in given]
        return ours.Muon(rows, nesterov=False, variant=variant, beta2=0.9)

    def update(p: Tensor, g: Tensor, s: dict[str, Any], *, lr: float, wd: float) -> None:
        papers.muon_variant(p, g, s, lr=lr, wd=wd, rows=variant == "normuon")

    found = trained(make, torch.float64, shapes=MATRICES)
    check(found, by_hand(update, torch.float64, shapes=MATRICES), 1e-8)


def test_orthogonal_means_singular_values_near_one() -> None:
    for shape in ((20, 50), (50, 20), (30, 30), (1, 7), (7, 1)):
        found = orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        values = torch.linalg.svdvals(found)
        assert shape == (30, 30) or values.min() > 0.6
        assert values.max() < 1.3


def test_polar_express_comes_nearer_to_one() -> None:
    matrix = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    off = {
        method: float((torch.linalg.svdvals(orthogonalize(matrix, method)) - 1).abs().mean())
        for method in ("standard", "polar_express")
    }
    assert off["polar_express"] < 0.6 * off["standard"], off


def test_groups_are_split_by_name_shape_and_mark() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(4, 3)
            self.lm_head = nn.Linear(3, 4, bias=False)
            self.hidden = nn.Linear(3, 3)
            self.other = nn.Linear(3, 3)
            self.conv = nn.Conv2d(1, 2, 2)

    net = Net()
    net.other.weight.use_muon = False  # type: ignore[assignment]
    names = {p: n for n, p in net.named_parameters()}
    rows = [
        {"params": list(net.parameters())[:4], "weight_decay": 0.5},
        {"params": list(net.parameters())[4:], "lr": 7},
    ]
    found = split_groups(rows, names, lr=1.0, muon_lr=2.0)
    told = [
        ([names[p] for p in g["params"]], g["use_muon"], g["lr"], g.get("weight_decay"))
        for g in found
    ]
    assert told == [
        (["hidden.weight"], True, 2.0, 0.5),
        (["embed_tokens.weight", "lm_head.weight", "hidden.bias"], False, 1.0, 0.5),
        (["conv.weight"], True, 7, None),
        (["other.weight", "other.bias", "conv.bias"], False, 7, None),
    ]


# -- what kernels are given, and the clock ---------------------------------------------------------


def test_kernels_come_from_the_table_and_are_called_once_per_kind() -> None:
    calls: list[tuple[int, int]] = []

    def kernel(params: Any, grads: Any, m: Any, v: Any, *, step: int, **options: Any) -> None:
        calls.append((len(params), step))
        references.adam(params, grads, m, v, step=step, **options)

    class Table(Kernels):
        def __init__(self) -> None:
            super().__init__(Plugins(PluginSettings()))

        def ops(self) -> list[str]:
            return ["adam"]

        def get(
            self, op: str, device: str = "cpu", dtype: str = "float32", default: Any = None
        ) -> Any:
            assert (op, device) == ("adam", "cpu") and dtype in ("float32", "float64")
            return kernel

    params = [nn.Parameter(torch.ones(3)) for _ in range(4)] + [
        nn.Parameter(torch.ones(2, dtype=torch.float64))
    ]
    optimizer = ours.AdamW(params)
    optimizer.use_kernels(Table())
    for param in params[1:]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    params[0].grad = torch.ones(3)
    optimizer.step()
    assert calls == [(3, 1), (1, 1), (1, 1), (3, 2), (1, 2)]
    assert [int(optimizer.state[p]["step"]) for p in params] == [1, 2, 2, 2, 2]


class Postponing(Kernels):
    """Serves references; what is asked for within `together` is done at its end, as a kernel
    may."""

    def __init__(self) -> None:
        super().__init__(Plugins(PluginSettings()))
        self.later: list[Callable[[], None]] | None = None
        self.asked: list[int] = []

    def get(self, op: str, device: str = "cpu", dtype: str = "float32", default: Any = None) -> Any:
        def kernel(params: list[Tensor], *lists: Any, **options: Any) -> Any:
            work = functools.partial(getattr(references, op), params, *lists, **options)
            if self.later is None:
                return work()
            self.asked.append(len(params))
            self.later.append(work)
            return None

        def together(prepare: Callable[[], None]) -> None:
            self.later = []
            prepare()
            later, self.later = self.later, None
            for work in later:
                work()

        kernel.together = together  # type: ignore[attr-defined]
        return kernel


@pytest.mark.fast_cases("Lion", "SGD", "AdamMini", "Lamb", "Muon")
@pytest.mark.parametrize("name", ["Adam", "Adagrad", "Lion", "SGD", "AdamMini", "Lamb", "Muon"])
def test_many_parameters_are_handed_out_in_portions(name: str) -> None:
    """Where the kernel can begin with some while others are prepared, and an update is nothing but
    such calls.
    """
    before = torch.get_num_threads()
    shapes = [(i % 5 + 1, 3) for i in range(300)]
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            table = Postponing()

            def make(params: Any, table: Postponing = table) -> torch.optim.Optimizer:
                more = {"momentum": 0.9} if name == "SGD" else {}
                for group in params:
                    group.update({"use_muon": True} if name == "Muon" else {})
                optimizer: Any = getattr(ours, name)(params, **more)
                optimizer.use_kernels(table)
                return optimizer

            found.append(trained(make, torch.float32, 12, shapes))
            portions = name not in ("AdamMini", "Lamb", "Muon") and threads > 1
            assert bool(table.asked) is portions
            if portions:  # of 150 parameters in each group, a seventh without a gradient
                assert (
                    table.asked[0] <= 32
                    and 64 < max(table.asked) < 150
                    and len(table.asked) >= 11 * 4
                )
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


def test_a_subclass_that_does_more_is_not_handed_out_in_portions() -> None:
    class Clamped(ours.AdamW):
        def update(self, group: Any, batch: Any) -> None:
            super().update(group, batch)
            for param in batch.params:
                param.clamp_(min=0.5)

    before = torch.get_num_threads()
    table = Postponing()
    params = [nn.Parameter(torch.ones(3)) for _ in range(300)]
    optimizer = Clamped(params, lr=0.3)
    optimizer.use_kernels(table)
    try:
        torch.set_num_threads(2)
        for _ in range(4):
            for param in params:
                param.grad = torch.ones(3)
            optimizer.step()
    finally:
        torch.set_num_threads(before)
    assert not table.asked and all(float(p.detach().min()) == 0.5 for p in params)


def test_parameters_without_gradients_get_no_state() -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(200)]
    optimizer = ours.AdamW(params)
    for step in range(3):
        for param in params[step:150]:
            param.grad = torch.ones(3)
        optimizer.step()
        optimizer.zero_grad()
    assert [p in optimizer.state for p in params] == [True] * 150 + [False] * 50
    assert [int(optimizer.state[p]["step"]) for p in params[:150]] == [1, 2, *[3] * 148]


def test_the_clock_survives_new_groups_and_foreign_counters() -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    for param in params:
        param.grad = torch.ones(3)
    optimizer = ours.AdamW(params[:2])
    optimizer.step()
    optimizer.add_param_group({"params": params[2:]})
    optimizer.state[params[0]]["step"] = torch.tensor(41.0)  # as a checkpoint puts it
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == [42, 2, 1]


def test_lamb_tells_its_coefficients() -> None:
    param = nn.Parameter(torch.full((4,), 100.0))
    still = nn.Parameter(torch.zeros(4))
    for p in (param, still):
        p.grad = torch.ones(4)
    optimizer = ours.Lamb([param, still])
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == [10.0, 1.0]


def test_zero_grad_follows_the_flag_and_closures_run() -> None:
    param = nn.Parameter(torch.ones(2))
    for keep, make in ((True, ours.FusedAdam), (False, ours.FusedAdam), (False, ours.FusedLion)):
        optimizer = make([param], set_grad_none=keep)
        param.grad = torch.ones(2)
        assert float(optimizer.step(lambda: (param * 2).sum()).detach()) != 0
        optimizer.zero_grad()
        assert (param.grad is None) is keep


@pytest.mark.parametrize("name", ["adamw", "adagrad", "momentum"])
def test_complex_parameters_are_pairs_of_real_ones(name: str) -> None:
    found = []
    for make in TORCH[name]:
        param = nn.Parameter(
            torch.arange(6, dtype=torch.float64).view(2, 3).to(torch.complex128) * (1 + 2j)
        )
        optimizer = make([{"params": [param], "lr": 0.1}])
        for _ in range(5):
            param.grad = param.detach() * (1 - 1j)
            optimizer.step()
        found.append(torch.view_as_real(param.detach()))
    check(found[:1], found[1:], 1e-12)
    with pytest.raises(UsageError, match="complex"):
        ours.OneBitAdam([param]).step()
