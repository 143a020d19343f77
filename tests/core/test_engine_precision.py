"""The engine in 16 bits: loss scale, overflow, accumulation, clipping, autocast."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from ds_testing.truth import same
from tiny_engine import alone, data, initialized

from ds_core.errors import LossScaleError, UsageError
from ds_core.precision import LossScaler

pytestmark = pytest.mark.usefixtures("clean_ds")


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
    engine, _, _, scheduler = initialized(
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
    engine, optimizer, *_ = initialized(FP16)
    assert all(p.dtype == torch.float32 for g in optimizer.param_groups for p in g["params"])
    xs = data(20)
    for x in xs:
        engine.backward(engine(x.half()).float().square().mean())
        engine.step()
    masters = [p for g in optimizer.param_groups for p in g["params"]]
    for master, weight, truth in zip(
        masters, engine.module.parameters(), alone(xs).parameters(), strict=True
    ):
        assert torch.equal(master.half(), weight)
        assert torch.allclose(master, truth, atol=5e-3)


def test_fp16_needs_the_scale_in_a_plain_backward():
    engine, *_ = initialized(FP16)
    engine(torch.randn(2, 4).half()).float().sum().backward()
    with pytest.raises(UsageError, match=r"engine\.scale\(loss\)\.backward"):
        engine.step()
    loss = engine(torch.randn(2, 4).half()).float().sum()
    assert engine.scale(loss).item() == pytest.approx(16 * loss.item())


def test_fp16_auto_cast_casts_inputs_in_any_container():
    engine, *_ = initialized({"fp16": {"enabled": True, "auto_cast": True}})
    assert engine(torch.randn(2, 4)).dtype == torch.float16


@pytest.mark.parametrize("config", [{}, {"bf16": {"enabled": True}}])
def test_a_nonfinite_gradient_never_reaches_the_weights(config, caplog):
    engine, *_ = initialized(config)
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
    engine, *_ = initialized({"bf16": {"enabled": True, "check_grad_overflow": False}})
    engine.backward(engine(torch.full((2, 4), math.nan, dtype=torch.bfloat16)).sum())
    engine.step()
    assert engine.was_step_applied()
    assert "check_grad_overflow is off" in caplog.text


def test_a_large_but_finite_gradient_is_no_overflow():
    """Squares beyond fp32 are not infinite gradients."""
    engine, *_ = initialized({"gradient_clipping": 1.0})
    engine.backward((engine(data(1)[0]) * 1e25).sum())
    engine.step()
    assert engine.was_step_applied()
    assert math.isfinite(engine.get_global_grad_norm())
    assert engine.get_global_grad_norm() > 1e24


# -- reduction options, clipping -------------------------------------------------------------------


def test_clipping_is_the_documented_formula():
    engine, *_ = initialized({"gradient_clipping": 0.01})
    xs = data(3)
    for x in xs:
        engine.backward(engine(x).square().mean())
        engine.step()
    same(engine.module, alone(xs, clip=0.01), 1e-7)
    assert engine.get_global_grad_norm() > 0.01


def test_gradients_accumulate_in_fp32_when_asked():
    config = {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_accumulation_steps": 8,
    }
    exact, *_ = initialized(config)
    coarse, *_ = initialized({**config, "data_types": {}})
    xs = data(8, dtype=torch.bfloat16)
    for engine in (exact, coarse):
        for x in xs:
            engine.backward(engine(x).float().square().mean())
            engine.step()
    truth = alone([x.float() for x in xs], 8)

    def error(engine):
        masters = [p for g in engine.optimizer.param_groups for p in g["params"]]
        return sum(
            float((a - b).detach().abs().sum())
            for a, b in zip(masters, truth.parameters(), strict=True)
        )

    assert error(exact) < error(coarse)


# -- autocast --------------------------------------------------------------------------------------


def test_autocast_wraps_forward_and_keeps_fp32_weights():
    engine, *_ = initialized({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    assert engine(data(1)[0]).dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in engine.module.parameters())


def test_the_config_decides_over_an_outer_autocast(caplog):
    inside, *_ = initialized({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    outside, *_ = initialized()
    with caplog.at_level(logging.INFO, "ds_core"), torch.autocast("cpu", dtype=torch.float16):
        assert inside(data(1)[0]).dtype == torch.bfloat16
        assert outside(data(1)[0]).dtype == torch.float32
        outside(data(1)[0])
    assert caplog.text.count("forward runs without autocast") == 1
    assert caplog.text.count("section decides\n") == 1


def test_autocast_to_fp16_scales_the_loss():
    engine, *_ = initialized({"torch_autocast": {"enabled": True, "dtype": "float16"}})
    assert engine.loss_scale == 2.0**16
