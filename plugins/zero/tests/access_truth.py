"""Engines whose states are accessed, and the same training in one process of plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ds_testing.models import Case, build_model, make_optimizer, micro_batch, param_groups
from ds_testing.truth import start
from torch import Tensor, nn

STAGES = [0, 1, 2, 3]
WORLDS = [1, 2, pytest.param(4, marks=pytest.mark.slow)]
LOSS_SCALE = 128.0
CASES = {
    "fp64": Case(gas=2, clip=0.5),
    "fp32 frozen": Case(dtype="float32", model="frozen"),
    "shared": Case(model="shared"),
    "groups": Case(model="groups", gas=2),
    "unused": Case(model="unused", optimizer="SGD"),
    "partly": Case(model="partly"),
    "bf16": Case(dtype="bfloat16", clip=0.3),
    "fp16": Case(dtype="float16", clip=0.3),
}
LOW = ("bfloat16", "float16")


STORE = "plugins.zero.tests.disk_store"


def accessed(case: Case, stage: int, place: str = "", folder: str = "") -> Any:
    """An engine whose states are at `place`: "" for the device, "cpu" or "disk"."""
    from ds_core import comm

    sections = case.config(comm.world_size())
    extra: dict[str, Any] = {"offload_optimizer": {"device": place}} if place else {}
    if stage == 3 and place:
        extra["offload_param"] = {"device": place, "max_in_cpu": 0}
    if place == "disk":
        sections |= {"plugins": {"load": [f"disk={STORE}"]}, "disk": {"path": folder}}
    if case.dtype == "float16":
        sections["fp16"] = {"enabled": True, "loss_scale": LOSS_SCALE}
    if stage:
        small = {
            "reduce_bucket_size": 100,
            "param_persistence_threshold": 6,
            "leaf_module": {"classes": "_Net"},
        }
        sections["zero_optimization"] = {"stage": stage, **small, **extra}
    model = net(case, seed=comm.rank())
    return start(model, model_parameters=param_groups(case, model), **sections)


def net(case: Case, seed: int = 0) -> nn.Module:
    return build_model(replace(case, dtype="float32") if case.dtype in LOW else case, seed=seed)


def tolerance(case: Case) -> float:
    if case.dtype in LOW:  # a last digit of a master may round a weight the other way, and so on
        return 3e-2
    return 1e-12 if case.dtype == "float64" else 1e-6


def backward(engine: Any, case: Case, step: int, micro: int) -> None:
    from ds_core import comm

    engine.backward(engine(**micro_batch(case, step, micro, comm.rank())))


def far(ours: Tensor, truth: Tensor) -> float:
    assert ours.shape == truth.shape, (ours.shape, truth.shape)
    if not truth.numel():
        return 0.0
    return float((ours.double() - truth.double()).abs().max()) / max(
        float(truth.double().abs().max()), 1e-3
    )


class Truth:
    """The same training in one process of plain torch, that sees what `dp` ranks see."""

    def __init__(self, case: Case, dp: int) -> None:
        self.case = case
        self.dp = dp
        self.model = net(case)
        self.scale = LOSS_SCALE if case.dtype == "float16" else 1.0
        low = case.dtype in LOW
        self.masters = {
            n: nn.Parameter(p.detach().clone(), p.requires_grad) if low else p
            for n, p in self.model.named_parameters()
        }
        groups = param_groups(case, self.model)
        names = {p: n for n, p in self.model.named_parameters()}
        own = [{**g, "params": [self.masters[names[p]] for p in g["params"]]} for g in groups]
        self.optimizer = make_optimizer(case, own)
        if low:
            self.model.to(case.torch_dtype)
        self.params = dict(self.model.named_parameters())

    def backward(self, step: int, micro: int) -> None:
        for index in range(self.dp):
            loss = self.model(**micro_batch(self.case, step, micro, index))
            (loss * (self.scale / self.case.gas / self.dp)).backward()

    def step(self) -> None:
        for name, param in self.params.items():
            if param.grad is not None:
                grad = param.grad.to(self.masters[name].dtype) / self.scale
                param.grad = None
                self.masters[name].grad = grad
        if self.case.clip:
            torch.nn.utils.clip_grad_norm_(
                [m for m in self.masters.values() if m.grad is not None], self.case.clip
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        for name, param in self.params.items():
            param.copy_(self.masters[name])

    def state(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state.get(self.masters[name], {})
        return found


def check_states(errors: dict[str, float], engine: Any, truth: Truth) -> None:
    import ds_access as access

    trained = {p for g in param_groups(truth.case, engine.module) for p in g["params"]}
    for name, param in engine.module.named_parameters():
        master = access.safe_get_full_fp32_param(param)
        if param not in trained:
            assert master is None
            assert access.safe_get_full_optimizer_state(param, "step") is None
            continue
        assert master is not None
        assert master.dtype == truth.masters[name].dtype
        errors[f"{name} master"] = far(master, truth.masters[name].detach())
        state = truth.state(name)
        for key, value in state.items():
            found = access.safe_get_full_optimizer_state(param, key)
            assert found is not None
            errors[f"{name} {key}"] = far(found, value)
        with pytest.raises(
            ValueError, match=r"'momentum_buffer'|'exp_avg', 'exp_avg_sq', 'step'|before its first"
        ):
            access.safe_get_full_optimizer_state(param, "exp_average")


def check_grads(errors: dict[str, float], engine: Any, truth: Truth, when: str) -> None:
    import ds_access as access

    for name, param in engine.module.named_parameters():
        grad = access.safe_get_full_grad(param)
        wanted = truth.params[name].grad
        assert (grad is None) == (wanted is None), (name, when)
        if grad is not None and wanted is not None:
            assert grad.dtype in (wanted.dtype, engine.ctx.precision.master)
            errors[f"{name} grad {when}"] = far(grad, wanted)


def new_value(name: str, what: str, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(len(name) + 100 * len(what))
    return (
        torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype).abs_()
        * 0.1
    )
