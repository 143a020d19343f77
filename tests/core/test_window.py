"""The accumulation window: what it counts, what drops it, and what an engine may be asked after it
has ended.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import weakref
from typing import Any

import pytest
import torch
from ds_access import safe_get_full_grad, safe_set_full_grad, safe_update_full_grad_vectorized
from ds_testing import run_ranks
from ds_testing.truth import plain, same, start
from torch import nn

import ds_core
from ds_core.config import Batch
from ds_core.errors import UsageError

pytestmark = pytest.mark.usefixtures("clean_ds")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def engine_of(gas: int = 1, net: nn.Module | None = None, **more: Any) -> Any:
    return start(net or model(), gas=gas, **more)


def data(n: int) -> list[torch.Tensor]:
    return list(torch.randn(n, 2, 4, generator=torch.Generator().manual_seed(1)))


def run(engine: Any, xs: list[torch.Tensor]) -> list[int]:
    """`global_steps` after each micro-batch."""
    steps = []
    for x in xs:
        engine.backward(engine(x).square().mean())
        engine.step()
        steps.append(engine.global_steps)
    return steps


def alone(windows: list[list[torch.Tensor]]) -> nn.Module:
    """Plain torch, one update per window."""
    net = model()
    for xs in windows:
        plain(net, lambda _, index, xs=xs: xs[index], 1, count=len(xs))  # type: ignore[misc]
    return net


# -- counting --------------------------------------------------------------------------------------


def test_accumulation_steps_that_change_between_windows_count_from_there() -> None:
    engine = engine_of(2)
    xs = data(5)
    assert run(engine, xs[:2]) == [0, 1]
    engine.set_train_batch_size(6)
    assert run(engine, xs[2:]) == [1, 1, 2]
    same(engine.module, alone([xs[:2], xs[2:]]), 1e-6, 1e-7)
    assert engine.global_samples == 4 + 6


@pytest.mark.parametrize("after_step", [False, True])
def test_a_change_in_the_middle_of_a_window_waits_for_the_next(after_step: bool) -> None:
    engine = engine_of(2)
    xs = data(5)
    engine.backward(engine(xs[0]).square().mean())
    if not after_step:
        engine.set_train_batch_size(4)
        engine.set_train_batch_size(6)  # the last one counts
    engine.step()
    if after_step:
        engine.set_train_batch_size(6)
    assert engine.ctx.batch == Batch(4, 2, 2)
    assert run(engine, xs[1:2]) == [1]
    assert engine.ctx.batch == Batch(6, 2, 3)
    assert run(engine, xs[2:]) == [1, 1, 2]
    same(engine.module, alone([xs[:2], xs[2:]]), 1e-6, 1e-7)


def test_a_forced_boundary_begins_a_window() -> None:
    engine = engine_of(3)
    engine.set_gradient_accumulation_boundary(True)
    assert run(engine, data(1)) == [1]
    engine.set_gradient_accumulation_boundary(None)
    assert run(engine, data(3)) == [1, 1, 2]


def test_a_step_that_was_refused_can_be_made_again() -> None:
    net = model()
    xs = data(2)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0,
    }
    engine = ds_core.initialize(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        config=config,
    )[0]
    run(engine, xs[:1])
    engine.backward(engine(xs[1]).square().mean())
    with pytest.raises(UsageError, match="metrics"):
        engine.step()
    engine.step(lr_kwargs={"metrics": 1.0})
    assert (engine.global_steps, engine.micro_steps) == (1, 2)
    same(net, alone([xs]), 1e-6, 1e-7)


@pytest.mark.parametrize("how", ["engine", "plain", "recomputed"])
def test_without_managed_accumulation_samples_are_those_of_the_backwards(how: str) -> None:
    engine = engine_of(managed_gradient_accumulation=False)
    xs = data(5)
    for window in (xs[:3], xs[3:]):
        for x in window:
            if how == "engine":
                engine.backward(engine(x).square().mean())
            elif how == "plain":
                engine(x).square().mean().backward()
            else:  # the first layer's backward runs inside that of the checkpoint
                inner = torch.utils.checkpoint.checkpoint(
                    engine.module[:2], x.requires_grad_(), use_reentrant=True
                )
                engine.module[2](inner).square().mean().backward()
        engine.step()
    assert engine.global_samples == 5 * 2


# -- both ways of backward give the same gradients -------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gradients_read_and_set_are_the_same_after_a_plain_backward(precision: str) -> None:
    low = (
        {"fp16": {"enabled": True, "loss_scale": 128.0, "auto_cast": True}}
        if precision == "fp16"
        else {}
    )
    found = []
    for how in ("engine", "plain"):
        engine = engine_of(4, **low)
        weight = engine.module[0].weight
        bias = engine.module[0].bias
        for x in data(2):
            loss = engine(x).float().square().mean()
            engine.backward(loss) if how == "engine" else engine.scale(loss).backward()
            engine.step()
        grad = safe_get_full_grad(weight)
        safe_set_full_grad(weight, grad * 2)
        safe_update_full_grad_vectorized([bias], lambda g, p: g * 3)
        read = [grad, safe_get_full_grad(weight), safe_get_full_grad(bias)]
        engine.set_gradient_accumulation_boundary(True)
        loss = engine(data(1)[0]).float().square().mean()
        engine.backward(loss) if how == "engine" else engine.scale(loss).backward()
        engine.step()
        found.append([*read, *engine.module.parameters()])
        engine.destroy()
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)  # a division by 4 is exact
    assert torch.equal(found[0][1], found[0][0] * 2)


# -- dropping --------------------------------------------------------------------------------------


def test_a_dropped_micro_batch_leaves_nothing_behind() -> None:
    engine = engine_of(2, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
    xs = data(3)
    xs = [x.bfloat16() for x in xs]
    engine(xs[0]).square().mean().backward()
    engine.module.zero_grad()
    assert safe_get_full_grad(engine.module[0].weight) is None
    engine.backward(engine(xs[1]).square().mean())  # another kind of backward than what was dropped
    assert safe_get_full_grad(engine.module[0].weight) is not None
    engine.optimizer.zero_grad(set_to_none=False)
    assert safe_get_full_grad(engine.module[0].weight) is None


def test_zero_grad_of_a_copy_is_its_own() -> None:
    engine = engine_of()
    engine.backward(engine(data(1)[0]).square().mean())
    twin = copy.deepcopy(engine.module)
    file = io.BytesIO()
    torch.save(engine.module, file)
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False)):
        other.zero_grad()
    assert engine.module[0].weight.grad is not None
    net = engine.module
    optimizer = engine.optimizer
    engine.destroy()
    assert "zero_grad" not in net.__dict__
    assert "zero_grad" not in optimizer.__dict__


# -- after destroy ---------------------------------------------------------------------------------


def test_every_use_of_a_destroyed_engine_is_an_error(tmp_path: Any) -> None:
    engine = engine_of()
    loss = engine(data(1)[0]).square().mean()
    run(engine, data(2))
    step = engine.step
    engine.destroy()
    engine.destroy()
    uses: list[Any] = [
        lambda: engine(data(1)[0]),
        lambda: engine.forward(data(1)[0]),
        lambda: engine.backward(loss),
        step,
        lambda: engine.train_batch(iter([])),
        lambda: engine.eval_batch(iter([])),
        lambda: engine.save_checkpoint(str(tmp_path)),
        lambda: engine.load_checkpoint(str(tmp_path)),
        lambda: engine.zero_grad(),
        lambda: engine.no_sync().__enter__(),
        lambda: engine.train(),
        lambda: engine.optimizer,
        lambda: engine.weight,
    ]
    for use in uses:
        with pytest.raises(UsageError, match="this engine was destroyed"):
            use()
    assert (engine.global_steps, engine.global_rank) == (2, 0)
    engine.module(data(1)[0]).sum().backward()


def test_initialize_again_on_the_same_model_destroys_the_engine_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = model()
    xs = data(2)
    first = engine_of(2, net=net)
    first.backward(first(xs[0]).square().mean())
    first.step()
    with caplog.at_level(logging.WARNING, "ds_core"):
        second = engine_of(2, net=net)
    assert caplog.text.count("initialize was called again on a model whose engine is in use") == 1
    with pytest.raises(UsageError, match="this engine was destroyed"):
        first.step()
    second.zero_grad()
    run(second, xs)
    same(net, alone([xs]), 1e-6, 1e-7)


@pytest.mark.parametrize("section", [{}, {"fp16": {"enabled": True}}], ids=["fp32", "fp16"])
def test_an_engine_that_is_dropped_without_destroy_leaves_nothing(section: dict[str, Any]) -> None:
    engine = engine_of(2, **section)
    xs = data(2)
    engine.backward(engine(xs[0].to(engine.module[0].weight.dtype)).float().square().mean())
    left = [weakref.ref(o) for o in (engine, engine.module, engine.partitioner)]
    del engine
    gc.collect()
    assert [ref() for ref in left] == [None] * 3


# -- smaller promises ------------------------------------------------------------------------------


class Rotary(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("inv_freq", torch.full((2,), 1 / 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x)).float() * self.inv_freq


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_buffers_keep_their_dtype_unless_the_config_says_otherwise(mode: str) -> None:
    engine = engine_of(net=Rotary(), **{mode: {"enabled": True}})
    assert engine.module.inv_freq.dtype == torch.float32
    assert float(engine.module.inv_freq[0]) == pytest.approx(1 / 3, abs=1e-8)
    assert engine.module.norm.running_mean.dtype == engine.module.norm.weight.dtype
    engine.backward(engine(data(1)[0].to(engine.module.weight.dtype)).square().mean())
    engine.step()
    engine = engine_of(net=Rotary(), **{mode: {"enabled": True}}, data_types={"buffer_dtype": mode})
    assert engine.module.inv_freq.dtype == engine.module.weight.dtype


def test_a_parameter_that_is_thawed_without_the_optimizer_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = model()
    net[0].requires_grad_(False)
    engine = engine_of(net=net)
    with caplog.at_level(logging.WARNING, "ds_core"):
        run(engine, data(1))
        assert "will not be trained" not in caplog.text
        net[0].requires_grad_(True)
        run(engine, data(20))
    assert caplog.text.count("'0.weight', '0.bias' (2 in all) will not be trained") == 1


def test_a_memory_breakdown_is_shown_from_the_first_step_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "ds_core"):
        run(engine_of(memory_breakdown=True), data(3))
    assert caplog.text.count("memory after step") == 1


def test_alone_gradients_need_not_be_averaged() -> None:
    engine = engine_of()
    engine.backward(engine(data(1)[0]).sum(), allreduce_gradients=False)  # nobody to average with
    assert engine.module[0].weight.grad is not None


def drift() -> str:
    engine = engine_of()
    with pytest.raises(UsageError) as error:
        engine.backward(engine(data(1)[0]).sum(), allreduce_gradients=False)
    return str(error.value)


def test_gradients_that_are_not_averaged_are_refused() -> None:
    assert all("weights would drift apart" in text for text in run_ranks(2, drift))


def test_the_engine_hides_no_attribute_of_the_model() -> None:
    net = model()
    net.window = 1  # type: ignore[assignment]
    net.accumulation = 2  # type: ignore[assignment]
    net.open = 3  # type: ignore[assignment]
    engine = engine_of(net=net)
    assert (engine.window, engine.accumulation, engine.open) == (1, 2, 3)
