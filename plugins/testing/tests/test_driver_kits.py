"""The kits for optimizers, schedules, stores, transforms and launchers find planted faults, and
pass what is right.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ds_state_stores import HostStore, StateStore, is_evicted
from ds_testing import (
    LauncherConformance,
    OptimizerConformance,
    SchedulerConformance,
    StateStoreConformance,
    TransformConformance,
)
from torch import Tensor, nn

from ds_core.entries import OptimizerEntry, Phase, SchedulerEntry, Transform

Plant = Callable[..., str]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Names and values -> the name of a module that has them."""

    def make(**values: Any) -> str:
        module = ModuleType("planted_kit_subject")
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return module.__name__

    return make


# -- what the core offers passes -------------------------------------------------------------------


@pytest.mark.fast_cases(
    test_every_layout_trains_as_one_process=(), test_a_checkpoint_is_resumed_in_another_layout=()
)
class TestCoreOptimizers(OptimizerConformance):
    plugin = "ds_core.setup.builtin"
    params = {name: {"lr": 0.01} for name in ("Adam", "AdamW", "SGD", "Adagrad")}


class TestHostStore(StateStoreConformance):
    def make_store(self, ctx: Any, tmp_path: Path) -> StateStore:
        return HostStore(ctx, {})


# -- optimizers ------------------------------------------------------------------------------------


class Momentum(torch.optim.Optimizer):
    """SGD with momentum, right as it stands; a subclass overrides one line."""

    takes_inputs = False

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.lr = lr

    def rate(self, group: dict[str, Any]) -> float:
        return float(group["lr"])

    def buffer(self, param: Tensor) -> Tensor:
        kept: Tensor = self.state[param].setdefault("momentum", torch.zeros_like(param))
        return kept

    def change(self, grad: Tensor) -> Tensor:
        return grad

    @torch.no_grad()
    def step(self, closure: Any = None, *, inputs: Any = None) -> None:  # type: ignore[override]
        given = None if inputs is None or inputs.grads is None else iter(inputs.grads)
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad if given is None else next(given).to(p.dtype)
                if grad is not None:
                    p.sub_(self.buffer(p).mul_(0.9).add_(self.change(grad)), alpha=self.rate(group))


class KeepsTheFirstRate(Momentum):
    def rate(self, group: dict[str, Any]) -> float:
        return self.lr


class HidesItsState(Momentum):
    def buffer(self, param: Tensor) -> Tensor:
        self.hidden = getattr(self, "hidden", {})
        return self.hidden.setdefault(param, torch.zeros_like(param))  # type: ignore[no-any-return]


class Normalizes(Momentum):
    def change(self, grad: Tensor) -> Tensor:
        return grad / grad.norm()


class ForgetsTheScale(Momentum):
    takes_inputs = True


class DecaysAll(Momentum):
    @torch.no_grad()
    def step(self, closure: Any = None, *, inputs: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - 0.1 * self.rate(group))
        super().step()


OPTIMIZERS = {
    KeepsTheFirstRate: ("learning_rate", "a step with lr 0 changed a parameter"),
    HidesItsState: ("states_are_in", "an optimizer with the loaded state_dict.. steps differently"),
    Normalizes: ("grain", "declares grain 'element', but its parts are off"),
    ForgetsTheScale: ("inputs", "a step with inputs differs"),
    DecaysAll: ("nothing_else", "a parameter without a gradient was changed"),
}


def run_kit(kit: Any, only: str = "", *arguments: Any) -> None:
    tests = [
        name
        for name in dir(kit)
        if name.startswith("test_") and only in name
        # Over ranks: see test_layouts_kit.py.
        if len(inspect.signature(getattr(kit, name)).parameters) == len(arguments)
    ]
    assert tests, only
    for name in tests:
        getattr(kit, name)(*arguments)


@pytest.mark.parametrize("fault", [Momentum, *OPTIMIZERS], ids=lambda f: f.__name__)
def test_optimizers(plant: Plant, fault: type) -> None:
    load = f"{fault.__module__}:{fault.__name__}"
    sys.modules.setdefault(fault.__module__, sys.modules[__name__])
    kit = type("Kit", (OptimizerConformance,), {})()
    kit.plugin = plant(ds_optimizers=lambda: {"Planted": OptimizerEntry(load)})
    kit.load = (kit.plugin,)
    if fault is Momentum:
        run_kit(kit)
        return
    only, why = OPTIMIZERS[fault]
    with pytest.raises(AssertionError, match=f"Planted.*{why}"):
        run_kit(kit, only)


# -- schedules -------------------------------------------------------------------------------------


class Halving:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.count = 0

    def step(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups[: self.reach()]:
            group["lr"] = 0.1 * 0.5**self.count

    def reach(self) -> int:
        return 9

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class OneGroup(Halving):
    def reach(self) -> int:
        return 1


class NoState(Halving):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class NotJson(Halving):
    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "optimizer": self.optimizer}


class BelowZero(Halving):
    def step(self) -> None:
        super().step()
        for group in self.optimizer.param_groups:
            group["lr"] -= 0.01


SCHEDULES = {
    OneGroup: ("rates", "the rate of group 1 is 0.1 in all"),
    NoState: ("goes_on", "after 1 steps, a schedule that was loaded gives other rates"),
    NotJson: ("goes_on", "state_dict.. is not JSON"),
    BelowZero: ("rates", "rates in step"),
}


@pytest.mark.parametrize("fault", [Halving, *SCHEDULES], ids=lambda f: f.__name__)
def test_schedules(plant: Plant, fault: type) -> None:
    kit = type("Kit", (SchedulerConformance,), {})()
    kit.plugin = plant(
        ds_schedulers=lambda: {"Planted": SchedulerEntry("planted_kit_subject:Made")}, Made=fault
    )
    kit.load = (kit.plugin,)
    if fault is Halving:
        run_kit(kit)
        return
    only, why = SCHEDULES[fault]
    with pytest.raises(AssertionError, match=f"Planted: {why}"):
        run_kit(kit, only)


# -- stores ----------------------------------------------------------------------------------------


class Attic(HostStore):
    resident = False

    def __init__(self, ctx: Any, options: Any) -> None:
        super().__init__(ctx, options)
        self.kept: dict[int, Any] = {}

    def fetch(self, tensors: Sequence[Tensor]) -> None:
        for storage in (t.untyped_storage() for t in tensors if is_evicted(t)):
            kept = self.kept[storage._cdata]
            storage.resize_(kept.nbytes())
            storage.copy_(kept)

    def evict(self, tensors: Sequence[Tensor], *, changed: bool = True) -> None:
        for storage in (t.untyped_storage() for t in tensors):
            if changed:
                self.kept[storage._cdata] = storage.clone()
            storage.resize_(0)

    def discard(self, tensors: Sequence[Tensor]) -> None:
        for t in tensors:
            self.kept.pop(t.untyped_storage()._cdata, None)


class KeepsMemory(Attic):
    def evict(self, tensors: Sequence[Tensor], *, changed: bool = True) -> None:
        pass


class KeepsTheFirst(Attic):
    def evict(self, tensors: Sequence[Tensor], *, changed: bool = True) -> None:
        for t in tensors:
            super().evict([t], changed=t.untyped_storage()._cdata not in self.kept)


class DropsStrictly(Attic):
    def discard(self, tensors: Sequence[Tensor]) -> None:
        for t in tensors:
            del self.kept[t.untyped_storage()._cdata]


class PlacesWithoutACopy(Attic):
    def copy_in(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return tensor.reshape(-1)


STORES: dict[type, tuple[str, type[Exception], str | None]] = {
    KeepsMemory: ("come_back", AssertionError, "its memory is there"),
    KeepsTheFirst: ("changes", AssertionError, "changes are lost"),
    DropsStrictly: ("forgotten", KeyError, None),
    PlacesWithoutACopy: ("copy_in", AssertionError, None),
}


@pytest.mark.parametrize("fault", [Attic, *STORES], ids=lambda f: f.__name__)
def test_stores(tmp_path: Path, fault: Any) -> None:
    kit = type(
        "Kit", (StateStoreConformance,), {"make_store": lambda self, ctx, path: fault(ctx, {})}
    )()
    if fault is Attic:
        run_kit(kit, "", tmp_path)
        return
    only, error, why = STORES[fault]
    with pytest.raises(error, match=why):
        run_kit(kit, only, tmp_path)


# -- transforms ------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def scaled(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda module, given, output: output * 1.01)
    return model


def noisy(model: nn.Module) -> nn.Module:
    model.register_buffer("chance", torch.rand(1))
    return model


def forgetful(model: nn.Module) -> nn.Module:
    model.register_forward_pre_hook(lambda module, given: None)
    return model


def listening(model: nn.Module) -> nn.Module:
    next(model.parameters()).register_post_accumulate_grad_hook(lambda param: None)
    return model


TRANSFORMS: dict[Callable[[nn.Module], nn.Module], tuple[str, str]] = {
    Wrapped: ("stay", "parameters are"),
    scaled: ("calculates", "loss"),
    nn.Module.eval: ("stay", "in eval mode"),
    forgetful: ("given_back", "_forward_pre_hooks: .* came"),
    listening: ("given_back", "hook after accumulation .* came"),
    noisy: ("equal", "chance differs between two runs"),
}


@pytest.mark.parametrize("apply", [lambda model: model, *TRANSFORMS])
def test_transforms(plant: Plant, apply: Any) -> None:
    kit = type("Kit", (TransformConformance,), {})()
    kit.plugin = plant(ds_transforms=lambda ctx: [Transform(Phase.SUBSTITUTE, apply)])
    kit.load = (kit.plugin,)
    if apply not in TRANSFORMS:
        run_kit(kit)
        return
    only, why = TRANSFORMS[apply]
    with pytest.raises(AssertionError, match=why):
        run_kit(kit, only)


def test_a_plugin_without_a_transform_is_found(plant: Plant) -> None:
    kit = TransformConformance()
    kit.plugin = plant(ds_transforms=lambda ctx: [])
    kit.load = (kit.plugin,)  # type: ignore[misc]
    with pytest.raises(AssertionError, match="gives no transform"):
        kit.test_it_takes_part()


# -- launchers -------------------------------------------------------------------------------------

LAUNCHER = """
import ctypes, os, subprocess, sys, time

def die_with_us():
    if {dies}:
        ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)

def start(request):
    script = ["-m", request.script] if request.is_module and not {modules!r} else [request.script]
    ranks = []
    for rank in range(request.nproc):
        names = dict(RANK=str({rank}), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        sizes = dict(WORLD_SIZE=str(request.nproc), LOCAL_WORLD_SIZE=str(request.nproc))
        arguments = [sys.executable, *script, *{arguments}]
        ranks.append(subprocess.Popen(arguments, env={{**os.environ, **names, **sizes}}, preexec_fn=die_with_us))
    code = 0
    ended = []
    while len(ended) < len(ranks) and not code:
        ended = [r.returncode for r in ranks if r.poll() is not None]
        code = next(filter(None, ended), 0)
        time.sleep(0.01)
    for r in ranks if {ends} else ():
        r.kill()
        r.wait()
    return {code}
"""
RIGHT = {
    "modules": False,
    "rank": "rank",
    "arguments": "request.arguments",
    "ends": True,
    "code": "code",
    "dies": True,
}
LAUNCHERS = {
    "right": ({}, "", ""),
    "one rank for all": ({"rank": "0"}, "every_rank", "processes had RANK"),
    "arguments through a shell": (
        {"arguments": "' '.join(request.arguments).split()"},
        "every_rank",
        "arguments were",
    ),
    "always 0": ({"code": "0"}, "fails", "the launcher with 0"),
    "leaves others": ({"ends": False, "dies": False}, "fails", "1 processes were still running"),
    "no modules": ({"modules": True}, "module", "no process ran"),
    "leaves orphans": (
        {"dies": False},
        "killed",
        "2 processes were still running after the launcher was killed",
    ),
}


@pytest.mark.fast_cases(
    "arguments through a shell", "leaves others", "no modules", "leaves orphans"
)
@pytest.mark.parametrize("what", LAUNCHERS)
def test_launchers(tmp_path: Path, what: str) -> None:
    changed, only, why = LAUNCHERS[what]
    (tmp_path / "planted_launcher.py").write_text(LAUNCHER.format(**RIGHT | changed))
    kit = LauncherConformance()
    kit.load = "planted_launcher:start"  # type: ignore[misc]
    kit.patience = 1.0  # type: ignore[misc]
    if not only:
        for number, name in enumerate(n for n in dir(kit) if n.startswith("test_")):
            (place := tmp_path / str(number)).mkdir()
            (place / "planted_launcher.py").write_text(LAUNCHER.format(**RIGHT))
            getattr(kit, name)(place)
        return
    with pytest.raises(AssertionError, match=why):
        run_kit(kit, only, tmp_path)
