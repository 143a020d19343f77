"""The engine in one process and over ranks: what the documents promise of forward, backward, step
and the counters.
"""

from __future__ import annotations

import argparse
import functools
import logging
import math
import re

import pytest
import torch
from ds_testing import run_ranks
from torch import nn

import ds_core
from ds_core.config import Batch
from ds_core.errors import ConfigError, DSError, LossScaleError, UsageError
from ds_core.precision import LossScaler

pytestmark = pytest.mark.usefixtures("clean_ds")

SGD = {"type": "SGD", "params": {"lr": 0.1}}
# the core's own optimizers and kernels, bit for bit
OWN = {"plugins": {"disable": ["ds-optimizers", "ds-ops-cpu"]}}
BASE = {"train_micro_batch_size_per_gpu": 2, "optimizer": SGD, "gradient_clipping": 0}


def model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)


def start(config=None, net=None, **kwargs):
    net = net if net is not None else model()
    return ds_core.initialize(model=net, config={**BASE, **OWN, **(config or {})}, **kwargs)


def data(n, seed=1, dtype=torch.float32):
    return list(
        torch.randn(n, 2, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
            dtype
        )
    )


def plain(xs, gas=1, lr=0.1, clip=0.0, net=None):
    net = net or model()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for i, x in enumerate(xs):
        (net(x).square().mean() / gas).backward()
        if (i + 1) % gas == 0:
            if clip:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return net


def same(a, b, tolerance=0.0):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=tolerance, atol=tolerance), (p - q).abs().max()


# -- one process is plain torch --------------------------------------------------------------------


@pytest.mark.parametrize("gas", [1, 3])
def test_one_process_is_bit_identical_to_plain_torch(gas):
    engine, *_ = start({"gradient_accumulation_steps": gas})
    xs = data(6)
    for x in xs:
        engine.backward(engine(x).square().mean())
        engine.step()
    same(engine.module, plain(xs, gas))
    assert (engine.micro_steps, engine.global_steps, engine.global_samples) == (6, 6 // gas, 6 * 2)


@pytest.mark.parametrize("gas", [1, 3])
def test_plain_loss_backward_gives_the_same_gradients(gas):
    engine, *_ = start({"gradient_accumulation_steps": gas, "gradient_clipping": 0.05})
    xs = data(6)
    for x in xs:
        engine.scale(engine(x).square().mean()).backward()
        engine.step()
    same(engine.module, plain(xs, gas, clip=0.05), 1e-6)


def test_backward_returns_the_loss_divided_by_accumulation_steps():
    engine, *_ = start({"gradient_accumulation_steps": 4})
    loss = engine(data(1)[0]).square().mean()
    assert engine.backward(loss).item() == pytest.approx(loss.item() / 4)
    assert engine.backward(engine(data(1)[0]).sum(), scale_wrt_gas=False).item() != 0


def test_the_caller_may_divide_by_accumulation_steps_himself():
    engine, *_ = start({"gradient_accumulation_steps": 2})
    xs = data(4)
    for x in xs:
        engine.backward(engine(x).square().mean() / 2, scale_wrt_gas=False)
        engine.step()
    same(engine.module, plain(xs, 2), 1e-7)


def test_nothing_is_talked_about_in_one_process(monkeypatch):
    """World size 1 calls no collective of torch's."""
    import torch.distributed as dist

    def refuse(*a, **k):
        raise AssertionError("a collective was called at world size 1")

    for name in (
        "all_reduce",
        "broadcast",
        "all_gather",
        "all_gather_into_tensor",
        "barrier",
        "all_to_all_single",
    ):
        monkeypatch.setattr(dist, name, refuse)
    engine, *_ = start({"gradient_clipping": 1.0})
    batches = iter(data(2))
    for x in batches:
        engine.backward(engine(x).square().mean())
        engine.step()
    assert engine.global_steps == 2


# -- boundaries ------------------------------------------------------------------------------------


def test_the_boundary_is_counted_or_forced():
    engine, *_ = start({"gradient_accumulation_steps": 2})
    seen = []
    for x in data(4):
        seen.append(engine.is_gradient_accumulation_boundary())
        engine.backward(engine(x).square().mean())
        engine.step()
    assert seen == [False, True, False, True]
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(data(1)[0]).square().mean())
    engine.step()
    assert engine.global_steps == 3
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(data(1)[0]).square().mean())
    engine.step()
    assert engine.global_steps == 3
    assert not engine.was_step_applied()


def test_unmanaged_accumulation_leaves_it_to_the_caller():
    engine, *_ = start({"managed_gradient_accumulation": False, "gradient_accumulation_steps": 1})
    x, y = data(2)
    engine.backward(engine(x).square().mean())
    engine.backward(engine(y).square().mean())
    engine.step()
    net = model()
    (net(x).square().mean() + net(y).square().mean()).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    same(engine.module, net)


def test_no_sync_rules():
    engine, *_ = start()
    with engine.no_sync():
        with pytest.raises(UsageError, match="inside no_sync"):
            engine.step()
        with pytest.raises(AssertionError, match="nested"), engine.no_sync():
            pass
    with engine.coalesce_grad_reduction():
        with pytest.raises(UsageError, match="coalesce"):
            engine.step()
        with pytest.raises(AssertionError), engine.no_sync():
            pass
        with pytest.raises(UsageError, match="nested"), engine.coalesce_grad_reduction():
            pass


def test_a_window_cannot_mix_both_backwards():
    engine, *_ = start({"gradient_accumulation_steps": 2})
    x, y = data(2)
    engine.backward(engine(x).square().mean())
    engine.step()
    engine(y).square().mean().backward()
    with pytest.raises(UsageError, match=r"found no engine\.backward"):
        engine.step()
    other, *_ = start({"gradient_accumulation_steps": 2})
    other(x).square().mean().backward()
    other.step()
    with pytest.raises(UsageError, match=r"came both from engine\.backward"):
        other.backward(other(y).square().mean())


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda e: e(data(1)[0]), r"scalar tensor, got a tensor of shape \(2, 2\)"),
        (lambda e: 3.0, "got float"),
        (lambda e: e(data(1)[0]).sum().detach(), "no graph"),
    ],
)
def test_a_loss_that_cannot_be_learnt_from_is_refused(loss, words):
    engine, *_ = start()
    with pytest.raises(UsageError, match=words):
        engine.backward(loss(engine))


# -- batch sizes -----------------------------------------------------------------------------------


def test_batch_setters_change_accumulation_or_micro():
    engine, *_ = start({"gradient_accumulation_steps": 2})
    assert engine.ctx.batch == Batch(4, 2, 2)
    engine.set_train_batch_size(8)
    assert engine.ctx.batch == Batch(8, 2, 4)
    with pytest.raises(ValueError, match="7"):
        engine.set_train_batch_size(7)
    engine.set_train_micro_batch_size(3)
    assert engine.ctx.batch == Batch(12, 3, 4)


def test_a_new_micro_batch_size_reaches_the_engines_own_loader():
    class Net(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean()

    dataset = [torch.full((4,), float(i)) for i in range(24)]
    engine, _, loader, _ = start(net=Net(4, 2), training_data=dataset)
    engine.train_batch(_losses_of(engine, loader, seen := []))
    engine.set_train_micro_batch_size(4)
    engine.train_batch(_losses_of(engine, loader, seen))
    assert [len(b) for b in seen] == [2, 4]
    assert len(loader) == 6
    engine.set_train_micro_batch_size(3)
    engine.train_batch(_losses_of(engine, loader, seen))
    assert len(torch.cat(seen)[:, 0].unique()) == 6, (
        "goes on at the same sample, rounded down: 0:2, 0:4, 3:6"
    )


def _losses_of(engine, loader, seen):
    """The loader's batches, taken note of."""
    for batch in loader:
        seen.append(batch)
        yield batch


# -- what is reported ------------------------------------------------------------------------------


def test_the_reported_loss_is_what_was_differentiated(caplog):
    xs = data(2)
    with caplog.at_level(logging.INFO, "ds_core"):
        engine, *_ = start({"steps_per_print": 1, "gradient_accumulation_steps": 2})
        total = 0.0
        for x in xs:
            for factor in (1.0, 3.0):  # two losses in each micro-batch
                loss = engine(x).square().mean() * factor
                total += loss.item() / 2
                engine.backward(loss)
            engine.step()
    assert f"loss {total:.4f}" in caplog.text


def test_zero_grad_drops_gradients_outside_the_optimizer_too():
    net = model()
    engine, *_ = start(net=net, model_parameters=list(net.parameters())[:1])
    engine.backward(engine(data(1)[0]).square().mean())
    assert all(p.grad is not None for p in net.parameters())
    engine.zero_grad()
    assert all(p.grad is None for p in net.parameters())


# -- loss scale ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("consecutive", "overflows", "expected"),
    [
        (False, "110000111000", "(16,1)(8,1)(8,1)(8,1)(16,2)(16,2)(16,1)(8,1)(4,1)(4,1)(4,1)(8,2)"),
        (
            True,
            "110000101000",
            "(16,1)(8,1)(8,2)(8,2)(16,2)(16,2)(16,1)(16,2)(16,1)(16,2)(16,2)(32,2)",
        ),
    ],
)
def test_loss_scale_golden_values(consecutive, overflows, expected):
    scaler = LossScaler(
        16, dynamic=True, window=2, hysteresis=2, consecutive_hysteresis=consecutive
    )
    seen = ""
    for o in overflows:
        scaler.update(o == "1")
        seen += f"({scaler.scale:g},{scaler.current_hysteresis})"
    assert seen == expected


def test_loss_scale_floor_ends_the_run():
    scaler = LossScaler(4, dynamic=True, hysteresis=1)
    scaler.update(True)
    scaler.update(True)
    assert scaler.scale == 1
    with pytest.raises(LossScaleError, match="minimum loss scale 1"):
        scaler.update(True)


def test_loss_scale_grows_each_window():
    scaler = LossScaler(4, dynamic=True, window=3)
    seen = []
    for _ in range(10):
        scaler.update(False)
        seen.append(scaler.scale)
    assert seen == [4, 4, 4, 8, 8, 8, 16, 16, 16, 32]


def test_loss_scale_state_round_trip():
    one = LossScaler(2**16, dynamic=True, window=2)
    for o in (True, True, False, False):
        one.update(o)
    two = LossScaler(2**16, dynamic=True, window=2)
    two.load_state_dict(one.state_dict())
    for o in (False, True, False, False, False):
        one.update(o)
        two.update(o)
        assert one.state_dict() == two.state_dict()


FP16 = {
    "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2}
}


def test_fp16_skips_an_overflowed_step_and_halves_the_scale():
    engine, _, _, scheduler = start(
        {**FP16, "scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}}
    )
    assert all(p.dtype == torch.float16 for p in engine.module.parameters())
    assert engine.loss_scale == 16
    before = [p.clone() for p in engine.module.parameters()]
    engine.backward(engine(torch.full((2, 4), 6e4, dtype=torch.float16)).sum() * float("inf"))
    engine.step()
    assert engine.skipped_steps == 1
    assert engine.global_steps == 1
    assert not engine.was_step_applied()
    assert engine.loss_scale == 8
    assert scheduler.last_epoch == 0
    assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
    engine.backward(engine(torch.randn(2, 4).half()).float().square().mean())
    engine.step()
    assert engine.was_step_applied()
    assert scheduler.last_epoch == 1


def test_fp16_masters_follow_fp32_training():
    engine, optimizer, *_ = start(FP16)
    assert all(p.dtype == torch.float32 for g in optimizer.param_groups for p in g["params"])
    xs = data(20)
    for x in xs:
        engine.backward(engine(x.half()).float().square().mean())
        engine.step()
    masters = [p for g in optimizer.param_groups for p in g["params"]]
    for master, weight, truth in zip(
        masters, engine.module.parameters(), plain(xs).parameters(), strict=True
    ):
        assert torch.equal(master.half(), weight)
        assert torch.allclose(master, truth, atol=5e-3)


def test_fp16_needs_the_scale_in_a_plain_backward():
    engine, *_ = start(FP16)
    engine(torch.randn(2, 4).half()).float().sum().backward()
    with pytest.raises(UsageError, match=r"engine\.scale\(loss\)\.backward"):
        engine.step()
    loss = engine(torch.randn(2, 4).half()).float().sum()
    assert engine.scale(loss).item() == pytest.approx(16 * loss.item())


def test_fp16_auto_cast_casts_inputs_in_any_container():
    engine, *_ = start({"fp16": {"enabled": True, "auto_cast": True}})
    assert engine(torch.randn(2, 4)).dtype == torch.float16


@pytest.mark.parametrize("config", [{}, {"bf16": {"enabled": True}}])
def test_a_nonfinite_gradient_never_reaches_the_weights(config, caplog):
    engine, *_ = start(config)
    dtype = next(engine.module.parameters()).dtype
    before = [p.clone() for p in engine.module.parameters()]
    with caplog.at_level(logging.WARNING, "ds_core"):
        engine.backward(engine(torch.full((2, 4), math.nan, dtype=dtype)).sum())
        engine.step()
    assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
    assert engine.skipped_steps == 1
    assert "inf or NaN" in caplog.text
    assert "0.weight" in caplog.text


def test_check_grad_overflow_off_lets_it_through_but_says_so(caplog):
    engine, *_ = start({"bf16": {"enabled": True, "check_grad_overflow": False}})
    engine.backward(engine(torch.full((2, 4), math.nan, dtype=torch.bfloat16)).sum())
    engine.step()
    assert engine.was_step_applied()
    assert "check_grad_overflow is off" in caplog.text


def test_a_large_but_finite_gradient_is_no_overflow():
    """Squares beyond fp32 are not infinite gradients."""
    engine, *_ = start({"gradient_clipping": 1.0})
    engine.backward((engine(data(1)[0]) * 1e25).sum())
    engine.step()
    assert engine.was_step_applied()
    assert math.isfinite(engine.get_global_grad_norm())
    assert engine.get_global_grad_norm() > 1e24


# -- reduction options, clipping -------------------------------------------------------------------


def test_clipping_is_the_documented_formula():
    engine, *_ = start({"gradient_clipping": 0.01})
    xs = data(3)
    for x in xs:
        engine.backward(engine(x).square().mean())
        engine.step()
    same(engine.module, plain(xs, clip=0.01), 1e-7)
    assert engine.get_global_grad_norm() > 0.01


def test_gradients_accumulate_in_fp32_when_asked():
    config = {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_accumulation_steps": 8,
    }
    exact, *_ = start(config)
    coarse, *_ = start({**config, "data_types": {}})
    xs = data(8, dtype=torch.bfloat16)
    for engine in (exact, coarse):
        for x in xs:
            engine.backward(engine(x).float().square().mean())
            engine.step()
    truth = plain([x.float() for x in xs], 8)

    def error(engine):
        masters = [p for g in engine.optimizer.param_groups for p in g["params"]]
        return sum(
            float((a - b).detach().abs().sum())
            for a, b in zip(masters, truth.parameters(), strict=True)
        )

    assert error(exact) < error(coarse)


# -- autocast --------------------------------------------------------------------------------------


def test_autocast_wraps_forward_and_keeps_fp32_weights():
    engine, *_ = start({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    assert engine(data(1)[0]).dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in engine.module.parameters())


def test_the_config_decides_over_an_outer_autocast(caplog):
    inside, *_ = start({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    outside, *_ = start()
    with caplog.at_level(logging.INFO, "ds_core"), torch.autocast("cpu", dtype=torch.float16):
        assert inside(data(1)[0]).dtype == torch.bfloat16
        assert outside(data(1)[0]).dtype == torch.float32
        outside(data(1)[0])
    assert caplog.text.count("forward runs without autocast") == 1
    assert caplog.text.count("section decides\n") == 1


def test_autocast_to_fp16_scales_the_loss():
    engine, *_ = start({"torch_autocast": {"enabled": True, "dtype": "float16"}})
    assert engine.loss_scale == 2.0**16


# -- initialize ------------------------------------------------------------------------------------


class _Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = model()

    def forward(self, x):
        return self.net(x).square().mean()


def test_train_batch_and_eval_batch():
    torch.manual_seed(0)
    engine, *_ = start({"gradient_accumulation_steps": 2}, net=_Squares())
    xs = data(4)
    first = engine.eval_batch(iter(xs[:2]))
    losses = [engine.train_batch(it) for it in [iter(xs)] for _ in range(2)]
    assert first.item() == pytest.approx(losses[0].item(), rel=1e-6)
    assert engine.module.training
    same(engine.module, plain(xs, 2))
    with pytest.raises(StopIteration):
        engine.train_batch(iter(xs[:1]))
    assert engine.global_steps == 2
    loss, outputs = engine.eval_batch(iter(xs), return_logits=True, num_micro_batches=3)
    assert len(outputs) == 3
    assert loss.item() == pytest.approx(sum(o.item() for o in outputs) / 3)
    with torch.no_grad(), pytest.raises(UsageError, match="no_grad"):
        engine.train_batch(iter(xs))


def test_train_batch_uses_the_engines_own_loader():
    engine, _, loader, _ = start(net=_Squares(), training_data=[torch.randn(4) for _ in range(5)])
    for _ in range(7):
        engine.train_batch()
    assert len(loader) == 3
    assert engine.global_steps == 7
    assert loader.epoch == 2


@pytest.mark.parametrize("output", [lambda x: (x, 1), lambda x: {"loss": x}, lambda x: x])
def test_the_loss_may_stand_anywhere_usual_in_the_output(output):
    class Net(_Squares):
        def forward(self, x):
            return output(super().forward(x))

    engine, *_ = start(net=Net())
    assert engine.train_batch(iter(data(1))).dim() == 0


def test_a_module_without_a_loss_is_told_so():
    engine, *_ = start()
    with pytest.raises(UsageError, match="scalar loss"):
        engine.train_batch(iter(data(1)))


def test_optimizer_and_scheduler_may_be_objects_or_functions():
    net = model()
    given = torch.optim.SGD(net.parameters(), lr=0.5)
    engine, optimizer, _, scheduler = start(
        net=net,
        optimizer=given,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    )
    assert optimizer is given
    assert scheduler.optimizer is given
    engine.backward(engine(data(1)[0]).sum())
    engine.step()
    assert engine.get_lr() == [0.25]
    _, made, *_ = start(optimizer=lambda groups: torch.optim.Adagrad(groups, lr=0.3))
    assert isinstance(made, torch.optim.Adagrad)


def test_client_optimizer_under_bf16_holds_masters():
    net = model()
    given = torch.optim.AdamW(net.parameters(), lr=0.1)
    engine, optimizer, *_ = start({"bf16": {"enabled": True}}, net=net, optimizer=given)
    engine.backward(engine(data(1)[0].bfloat16()).float().sum())
    engine.step()
    assert all(p.dtype == torch.float32 for g in optimizer.param_groups for p in g["params"])
    assert all(p.dtype == torch.bfloat16 for p in net.parameters())


def test_initialize_errors_say_what_is_missing(monkeypatch):
    with pytest.raises(UsageError, match="needs a model"):
        ds_core.initialize(config=BASE)
    with pytest.raises(UsageError, match="nn.Module"):
        ds_core.initialize(model=3, config=BASE)
    with pytest.raises(ConfigError, match="no config"):
        ds_core.initialize(model=model())
    with pytest.raises(ConfigError, match="config and config_params are both given"):
        ds_core.initialize(model=model(), config=BASE, config_params=BASE)
    with pytest.raises(UsageError, match="optimizer must be"):
        start(optimizer=7)
    with pytest.raises(UsageError, match="lr_scheduler must have"):
        start(lr_scheduler=7)
    net = model()
    with pytest.raises(UsageError, match="list it once"):
        start(
            net=net,
            model_parameters=[{"params": list(net.parameters())}, {"params": [net[0].weight]}],
        )
    with pytest.raises(UsageError, match="not a parameter of the model"):
        start(model_parameters=list(model().parameters()))
    with pytest.raises(ConfigError, match="needs an optimizer"):
        ds_core.initialize(
            model=model(),
            config={
                "train_batch_size": 1,
                "scheduler": {"type": "StepLR", "params": {"step_size": 1}},
            },
        )
    with pytest.raises(ConfigError, match="data parallel size 3"):
        start({"data_parallel_size": 3})
    with pytest.raises(ConfigError, match="data parallel size 2, but this run has 1"):
        start(mesh_param=(2, 1))
    # which mesh_param stands for
    with pytest.raises(ConfigError, match="sequence_parallel_size|sp"):
        start(mesh_param=(1, 2))
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UsageError, match=r"args.local_rank is 1"):
        start(args=argparse.Namespace(local_rank=1))
    with pytest.raises(UsageError, match=r"args.local_rank is 1"):
        start(args={"local_rank": 1})


def test_config_sources_are_equivalent(tmp_path):
    import base64
    import json

    text = json.dumps(BASE)
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    args = argparse.Namespace(deepspeed=True, deepspeed_config=str(path))
    for kwargs in (
        {"config": BASE},
        {"config": str(path)},
        {"config_params": path},
        {"config": base64.urlsafe_b64encode(text.encode()).decode()},
        {"args": args},
        {"args": {"deepspeed_config": str(path), "local_rank": 0}},
    ):
        engine, *_ = ds_core.initialize(model=model(), **kwargs)
        assert engine.ctx.batch == Batch(2, 2, 1)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"type": "Adm"}, ["optimizer.type", "'Adm'", "'Adam'"]),
        (
            {"type": "Lamb"},
            [
                "served by ds-optimizers",
                "pip install ./plugins/run_state ./ops/kernel_kit ./plugins/optimizers",
            ],
        ),
        ({"type": "no_such_package.Adam"}, ["optimizer.type", "No module named 'no_such_package'"]),
        (
            {"type": "AdamW", "params": {"lrr": 1}},
            ["optimizer.params.lrr", "did you mean 'optimizer.params.lr'"],
        ),
        ({"type": "AdamW", "params": {"lr": "fast"}}, ["optimizer.params.lr"]),
        ({"type": "AdamW", "params": {"lr": True}}, ["optimizer.params.lr"]),
        (
            {"type": "AdamW", "params": {"max_grad_norm": 1}},
            ["optimizer.params.max_grad_norm", "gradient_clipping"],
        ),
        ({"type": "RMSprop", "params": {"alhpa": 1}}, ["optimizer.params.alhpa", "'alpha'"]),
        (
            {"type": "SGD", "params": {"momentum": "much"}},
            ["optimizer.params.momentum", "not a number"],
        ),
    ],
)
def test_a_wrong_optimizer_section_names_the_key(section, words):
    with pytest.raises(ConfigError) as caught:
        start({"optimizer": section, **OWN})
    for word in words:
        assert word in str(caught.value)


def test_any_torch_optimizer_and_scheduler_serve_by_name():
    engine, optimizer, _, scheduler = start(
        {
            "optimizer": {"type": "rmsprop", "params": {"lr": 0.1, "alpha": 0.9}},
            "scheduler": {"type": "MultiplicativeLR", "params": {"lr_lambda": 1}},
        }
        | {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 5}}}
    )
    assert type(optimizer).__name__ == "RMSprop"
    assert type(scheduler).__name__ == "CosineAnnealingLR"
    assert engine.get_lr() == [0.1]


def test_adam_is_decoupled_unless_told_otherwise():
    _, decoupled, *_ = start({"optimizer": {"type": "Adam", "params": {"lr": 0.1}}, **OWN})
    _, coupled, *_ = start(
        {"optimizer": {"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": False}}, **OWN}
    )
    assert type(decoupled).__name__ == "AdamW"
    assert type(coupled).__name__ == "Adam"
    assert decoupled.defaults["fused"]


def test_several_engines_share_one_loss():
    a, *_ = start(net=model(0))
    b, *_ = start(net=model(1))
    x = data(1)[0]
    loss = (a(x) * b(x)).mean()
    loss.backward()
    for engine in (a, b):
        engine.step()
        engine.optimizer.zero_grad()
    p = model(0)
    q = model(1)
    (p(x) * q(x)).mean().backward()
    for net in (p, q):
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    same(a.module, p)
    same(b.module, q)


def test_unknown_attributes_are_the_modules():
    engine, *_ = start()
    assert [n for n, _ in engine.named_parameters()] == [n for n, _ in model().named_parameters()]
    with pytest.raises(
        AttributeError,
        match="neither the engine nor its module, a Sequential, has .*'no_such_thing'$",
    ):
        _ = engine.no_such_thing
    with pytest.raises(AttributeError, match=r"'cur_scale': it is engine.loss_scale$"):
        _ = engine.cur_scale
    with pytest.raises(
        AttributeError, match=r"'vocabulary_size': it is engine.config.core.vocabulary_size$"
    ):
        _ = engine.vocabulary_size


class Failing(nn.Linear):
    @property
    def broken(self):
        return self.inner

    def __getattr__(self, name):
        if name == "mine":
            raise AttributeError("words of the model's own")
        return super().__getattr__(name)


def test_errors_of_the_module_s_own_attributes_stay_its_own():
    engine, *_ = start(net=Failing(4, 2))
    with pytest.raises(AttributeError, match="^words of the model's own$"):
        _ = engine.mine
    with pytest.raises(AttributeError, match="^'Failing' object has no attribute"):
        _ = engine.broken


def test_what_replaces_deepspeed_s_names_is_there():
    from ds_core.catalogue import _catalogue

    engine, *_ = start({"scheduler": {"type": "WarmupLR"}})
    for name, instead in _catalogue()["engine"].items():
        with pytest.raises(AttributeError, match=f"'{name}': "):
            getattr(engine, name)
        for path in re.findall(r"\bengine\.([\w.]*\w)", instead):
            functools.reduce(getattr, path.split("."), engine)


@pytest.mark.parametrize("how", ["object", "function", "config"])
def test_an_optimizer_whose_step_needs_a_closure_is_refused(how):
    net = model()
    given = {
        "object": torch.optim.LBFGS(net.parameters()),
        "function": torch.optim.LBFGS,
        "config": None,
    }[how]
    config = {"optimizer": {"type": "torch.optim.LBFGS"}} if how == "config" else {}
    with pytest.raises(
        (UsageError, ConfigError), match="LBFGS.* needs a? ?closure.*, (and|which) .* give"
    ):
        start(config, net, optimizer=given)


def test_an_optimizer_that_has_a_schedule_of_torchs_is_accepted():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    # puts a function into optimizer.step
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    engine, *_ = start({}, net, optimizer=optimizer, lr_scheduler=schedule)
    assert engine.lr_scheduler is schedule


def test_vocabulary_log_level_dump_and_progress(caplog):
    with caplog.at_level(logging.INFO, "ds_core"):
        switches = dict.fromkeys(("dump_state", "memory_breakdown", "wall_clock_breakdown"), True)
        engine, *_ = start({"vocabulary_size": 50257, "steps_per_print": 2, **switches})
        for x in data(4):
            engine.backward(engine(x).square().mean())
            engine.step()
    assert "50264" in caplog.text
    assert caplog.text.count("samples/s") == 2
    assert "ms: forward" in caplog.text
    assert caplog.text.count("memory after backward_inner") == 2
    assert "GiB at peak" in caplog.text
    assert "mesh {'dp': 1}" in caplog.text


def test_every_error_of_ours_is_a_dserror():
    from ds_core import errors

    for name in errors.__all__:
        value = getattr(errors, name)
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, DSError)


# -- over ranks ------------------------------------------------------------------------------------


def _multi(how):
    from ds_core import comm

    rank = comm.rank()
    world = comm.world_size()
    engine, *_ = start(net=model(rank, torch.float64))
    xs = [data(4, seed=10 + r, dtype=torch.float64) for r in range(world)]
    for i in range(0, 4, 2):
        x, y = xs[rank][i : i + 2]
        losses = [engine(x).square().mean(), engine(y).square().mean()]
        if how == "two backwards":
            engine.backward(losses[0])
            engine.backward(losses[1])
        elif how == "two plain backwards":
            losses[0].backward()
            losses[1].backward()
        elif how == "no_sync":
            with engine.no_sync():
                engine.backward(losses[0])
            engine.backward(losses[1])
        elif how == "coalesce":
            with engine.coalesce_grad_reduction():
                engine.backward(losses[0])
                engine.backward(losses[1])
        engine.step()
    net = model(0, torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for i in range(0, 4, 2):
        for r in range(world):
            for x in xs[r][i : i + 2]:
                (net(x).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return max(
        float((p - q).detach().abs().max())
        for p, q in zip(net.parameters(), engine.module.parameters(), strict=True)
    )


@pytest.mark.parametrize("how", ["two backwards", "two plain backwards", "no_sync", "coalesce"])
def test_several_backwards_before_one_step(how):
    assert max(run_ranks(2, _multi, how)) < 1e-12


def _unfreeze():
    from ds_core import comm

    rank = comm.rank()
    world = comm.world_size()
    net = model(0, torch.float64)
    net[0].weight.requires_grad_(False)
    engine, *_ = start(net=net, model_parameters=list(net.parameters()))
    truth = model(0, torch.float64)
    truth[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(truth.parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            net[0].weight.requires_grad_(True)
            truth[0].weight.requires_grad_(True)
        xs = [data(4, seed=20 + r, dtype=torch.float64)[step] for r in range(world)]
        engine.backward(engine(xs[rank]).square().mean())
        engine.step()
        for x in xs:
            (truth(x).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return max(
        float((p - q).detach().abs().max())
        for p, q in zip(truth.parameters(), net.parameters(), strict=True)
    )


def test_parameters_may_be_unfrozen_while_training():
    assert max(run_ranks(2, _unfreeze)) < 1e-12


def _sum_op():
    from ds_core import comm

    engine, *_ = start({"gradient_allreduce_op": "sum"}, net=model(0, torch.float64))
    xs = [data(1, seed=30 + r, dtype=torch.float64)[0] for r in range(comm.world_size())]
    engine.backward(engine(xs[comm.rank()]).square().mean())
    engine.step()
    truth = model(0, torch.float64)
    for x in xs:
        truth(x).square().mean().backward()
    torch.optim.SGD(truth.parameters(), lr=0.1).step()
    return max(
        float((p - q).detach().abs().max())
        for p, q in zip(truth.parameters(), engine.module.parameters(), strict=True)
    )


def test_gradients_may_be_summed_instead_of_averaged():
    assert max(run_ranks(2, _sum_op)) < 1e-12


def test_gradients_travel_in_the_wire_dtype():
    answers = run_ranks(2, _wire_error)
    assert max(answers) > 1e-9
    assert max(answers) < 1e-2


def _wire_error():
    from ds_core import comm

    grads = []
    for dtype in ("bf16", "fp32"):
        engine, *_ = start({"communication_data_type": dtype})
        engine.backward(engine(data(1, seed=comm.rank())[0]).square().mean())
        grads.append(engine.module[0].weight.grad.clone())
        engine.destroy()
    return float((grads[0] - grads[1]).abs().max())


def _disagree(what):
    import os

    from ds_core import comm

    config = {"steps_per_print": 1 + comm.rank()} if what == "config" else {}
    if what == "secret":
        os.environ["X"] = "1"
    try:
        start(config)
    except DSError as error:
        return str(error)
    return ""


def test_ranks_with_different_configs_all_stop_and_name_the_key():
    for message in run_ranks(2, _disagree, "config"):
        assert "config.steps_per_print" in message
        assert "1" in message
        assert "2" in message


def _interrupted():
    """A forward that fails on every rank alike; training goes on as if that batch had not been."""
    from ds_core import comm

    net = _Squares().double()
    engine, *_ = start({"gradient_accumulation_steps": 2}, net=net)
    xs = data(4, seed=comm.rank(), dtype=torch.float64)
    with pytest.raises(RuntimeError, match="shape"):
        engine.train_batch(iter([xs[0], torch.ones(2, 9, dtype=torch.float64)]))
    engine.train_batch(iter(xs[:2]))
    loss = engine(xs[2])
    loss.register_hook(lambda g: (_ for _ in ()).throw(ValueError("stop")))
    with pytest.raises(ValueError, match="stop"):
        engine.backward(loss)
    engine.zero_grad()
    engine.train_batch(iter(xs[2:]))
    truth = _Squares().double()
    optimizer = torch.optim.SGD(truth.parameters(), lr=0.1)
    world = comm.world_size()
    for pair in range(2):
        for rank in range(world):
            for x in data(4, seed=rank, dtype=torch.float64)[2 * pair : 2 * pair + 2]:
                (truth(x) / 2 / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return max(
        float((p - q).detach().abs().max())
        for p, q in zip(truth.parameters(), net.parameters(), strict=True)
    )


@pytest.mark.parametrize("world", [1, 2])
def test_an_interrupted_batch_leaves_nothing_behind(world):
    assert max(run_ranks(world, _interrupted)) < 1e-12


# -- what a review found ---------------------------------------------------------------------------


class _Shared(nn.Module):
    """One block used twice under re-entrant recomputation: its hooks fire for each use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(4, 4).double()
        self.block = nn.Linear(4, 4).double()

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        h = self.inp(x)
        for _ in range(2):
            h = torch.tanh(checkpoint(self.block, h, use_reentrant=True))
        return h.square().mean()


def _reentrant(direct, limit):
    from ds_core import buckets, comm

    old, buckets.BUCKET_BYTES = buckets.BUCKET_BYTES, limit
    try:
        engine, *_ = start(net=_Shared())
        truth = _Shared()
        optimizer = torch.optim.SGD(truth.parameters(), lr=0.1)
        for step in range(3):
            xs = [data(3, seed=50 + r, dtype=torch.float64)[step] for r in range(comm.world_size())]
            loss = engine(xs[comm.rank()])
            loss.backward() if direct else engine.backward(loss)
            engine.step()
            for x in xs:
                (truth(x) / len(xs)).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        buckets.BUCKET_BYTES = old
    pairs = zip(truth.parameters(), engine.module.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


@pytest.mark.parametrize("limit", [1, 10**9])
@pytest.mark.parametrize("direct", [False, True])
def test_a_shared_block_under_reentrant_recomputation(direct, limit):
    assert max(run_ranks(2, _reentrant, direct, limit)) < 1e-12


def _channels_last(folder):
    from ds_core import comm

    def net():
        torch.manual_seed(0)
        return nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)

    def images(step, rank):
        generator = torch.Generator().manual_seed(10 * step + rank)
        return torch.randn(1, 3, 5, 5, dtype=torch.float64, generator=generator)

    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    engine, *_ = start(adam, net=net())
    truth = net()
    optimizer = torch.optim.AdamW(truth.parameters(), lr=0.01, weight_decay=0.0)
    for step in range(4):
        if step == 2:  # and through a checkpoint
            engine.save_checkpoint(folder)
            engine, *_ = start(adam, net=net())
            engine.load_checkpoint(folder)
        engine.backward(engine(images(step, comm.rank())).square().mean())
        engine.step()
        for rank in range(comm.world_size()):
            (truth(images(step, rank)).square().mean() / comm.world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(truth.parameters(), engine.module.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


@pytest.mark.parametrize("world", [1, 2])
def test_strides_of_parameters_are_kept(world, tmp_path):
    assert max(run_ranks(world, _channels_last, str(tmp_path))) < 1e-12


def _broken_plain_backward():
    from ds_core import comm

    net = _Squares().double()
    engine, *_ = start(net=net)
    xs = data(3, seed=comm.rank(), dtype=torch.float64)
    loss = engine(xs[0])
    net.net[0].bias.register_hook(
        lambda g: (_ for _ in ()).throw(ValueError("stop")) if engine.global_steps == 0 else g
    )
    with pytest.raises(ValueError, match="stop"):
        loss.backward()
    engine.zero_grad()
    engine.global_steps = 1
    engine(xs[1]).backward()
    engine.step()
    truth = _Squares().double()
    for rank in range(comm.world_size()):
        (truth(data(3, seed=rank, dtype=torch.float64)[1]) / comm.world_size()).backward()
    torch.optim.SGD(truth.parameters(), lr=0.1).step()
    return max(
        float((p - q).detach().abs().max())
        for p, q in zip(truth.parameters(), net.parameters(), strict=True)
    )


def test_a_plain_backward_that_broke_off_leaves_nothing_behind():
    assert max(run_ranks(2, _broken_plain_backward)) < 1e-12


def test_parameters_added_to_the_optimizer_later_are_refused():
    engine, optimizer, *_ = start()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    engine.backward(engine(data(1)[0]).sum())
    with pytest.raises(UsageError, match="added to the optimizer after initialize"):
        engine.step()


def test_loading_in_mid_window_drops_half_a_gradient(tmp_path):
    engine, *_ = start({"gradient_accumulation_steps": 2})
    engine.save_checkpoint(str(tmp_path))
    engine.backward(engine(data(1)[0]).sum())
    engine.step()
    engine.load_checkpoint(str(tmp_path))
    assert all(p.grad is None for p in engine.module.parameters())
    engine(data(1)[0]).sum().backward()
    engine.step()
    assert engine.micro_steps == 1


def test_evaluation_restores_the_mode_of_every_module():
    net = _Squares()
    net.net[1].eval()
    engine, *_ = start(net=net)
    engine.eval_batch(iter(data(1)))
    assert [net.training, net.net[0].training, net.net[1].training] == [True, True, False]


def test_nothing_to_train_is_an_error():
    with pytest.raises(UsageError, match="nothing to train"):
        start(model_parameters=[])
    frozen = model().requires_grad_(False)
    with pytest.raises(UsageError, match="nothing to train"):
        start(net=frozen)
    net = model()
    with pytest.raises(UsageError, match="other tensors than it was given"):
        start(
            {"bf16": {"enabled": True}},
            net=net,
            optimizer=lambda _: torch.optim.SGD(net.parameters(), lr=1),
        )


def test_a_state_dict_loaded_into_the_module_reaches_the_masters():
    engine, *_ = start({"bf16": {"enabled": True}})
    engine.module.load_state_dict(
        {k: torch.full_like(v, 3.0) for k, v in engine.module.state_dict().items()}
    )
    engine.backward(engine(data(1)[0].bfloat16()).float().sum() * 0)
    engine.step()
    assert all(torch.all(p == 3.0) for p in engine.module.parameters())


def test_model_parameters_in_any_usual_shape():
    net = model()
    _, optimizer, *_ = start(net=net, model_parameters=[{"params": net.named_parameters()}])
    assert len(optimizer.param_groups[0]["params"]) == 4
    for wrong in ({"params": []}, next(model().parameters())):
        with pytest.raises(UsageError, match="give a list"):
            start(model_parameters=wrong)


def test_a_schedule_that_needs_a_metric_is_given_one_or_says_so():
    config = {"scheduler": {"type": "ReduceLROnPlateau", "params": {"patience": 0, "factor": 0.5}}}
    engine, *_ = start(config)
    for _ in range(3):
        engine.backward(engine(data(1)[0]).sum())
        engine.step(lr_kwargs={"metrics": 1.0})
    assert engine.get_lr()[0] < 0.1
    before = [p.clone() for p in engine.module.parameters()]
    engine.backward(engine(data(1)[0]).sum())
    with pytest.raises(UsageError, match="needs metrics"):
        engine.step()
    assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))


@pytest.mark.parametrize("name", ["LBFGS", "sparseadam"])
def test_optimizers_that_cannot_work_are_refused_at_once(name):
    with pytest.raises(ConfigError, match=r"optimizer\.type"):
        start({"optimizer": {"type": name}})
