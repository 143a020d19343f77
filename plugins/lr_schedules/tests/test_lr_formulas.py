"""The schedules against the documents' formulas, written down here a second time and in floating
point.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from ds_lr_schedules.schedules import (
    LRRangeTest,
    OneCycle,
    Schedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from hypothesis import given, settings
from hypothesis import strategies as st

rates = st.floats(0, 10, allow_nan=False)
lengths = st.integers(1, 60)
stairs = st.integers(0, 12)
kinds = st.sampled_from(["log", "linear"])
times = st.integers(-1, 200)


def lr_at(
    cls: type[Schedule], t: int, base: float = 1.0, **arguments: object
) -> tuple[float, float]:
    """Learning rate and first beta after step t."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=base, betas=(0.5, 0.5))
    schedule = cls(optimizer, **arguments)  # type: ignore[arg-type]
    if t >= 0:
        schedule.step(t)
    group = optimizer.param_groups[0]
    return group["lr"], group["betas"][0]


def close(seen: float, expected: float) -> bool:
    return math.isclose(seen, expected, rel_tol=1e-9, abs_tol=1e-9)


def gamma(t: int, w: int, kind: str) -> float:
    if t >= w:
        return 1.0
    return t / w if kind == "linear" else math.log(t + 1) / math.log(w)


@settings(deadline=None)
@given(low=rates, size=lengths, rate=rates, staircase=st.booleans(), t=times)
def test_range_test(low: float, size: int, rate: float, staircase: bool, t: int) -> None:
    x = Fraction(t + 1, size)
    expected = low * (1 + rate * (math.floor(x) if staircase else float(x)))
    seen, _ = lr_at(
        LRRangeTest,
        t,
        lr_range_test_min_lr=low,
        lr_range_test_step_size=size,
        lr_range_test_step_rate=rate,
        lr_range_test_staircase=staircase,
    )
    assert close(seen, expected)


@settings(deadline=None)
@given(low=rates, high=rates, steps=lengths, kind=kinds, t=times)
def test_warm_up(low: float, high: float, steps: int, kind: str, t: int) -> None:
    expected = low if t < 0 else low + (high - low) * gamma(t, max(2, steps), kind)
    seen, _ = lr_at(
        WarmupLR, t, warmup_min_lr=low, warmup_max_lr=high, warmup_num_steps=steps, warmup_type=kind
    )
    assert close(seen, expected)


@settings(deadline=None)
@given(low=rates, high=rates, steps=lengths, total=lengths, kind=kinds, t=times)
def test_warm_up_and_decay(
    low: float, high: float, steps: int, total: int, kind: str, t: int
) -> None:
    w = max(2, steps)
    share = (
        0.0 if t < 0 else gamma(t, w, kind) if t < w else max(0.0, (total - t) / max(1, total - w))
    )
    seen, _ = lr_at(
        WarmupDecayLR,
        t,
        total_num_steps=total,
        warmup_min_lr=low,
        warmup_max_lr=high,
        warmup_num_steps=steps,
        warmup_type=kind,
    )
    assert close(seen, low + (high - low) * share)


@settings(deadline=None)
@given(
    base=rates,
    low=st.floats(0, 1),
    final=st.floats(0, 1),
    steps=lengths,
    total=lengths,
    kind=kinds,
    t=times,
)
def test_warm_up_and_cosine(
    base: float, low: float, final: float, steps: int, total: int, kind: str, t: int
) -> None:
    w = max(2, steps)
    if t < 0:
        ratio = 0.0
    elif t < w:
        ratio = low + (1 - low) * gamma(t, w, kind)
    else:
        p = min(1.0, (t - w + 1) / max(1, total - w))
        ratio = max(0.0, final + (1 - final) * (1 + math.cos(math.pi * p)) / 2)
    seen, _ = lr_at(
        WarmupCosineLR,
        t,
        base,
        total_num_steps=total,
        warmup_min_ratio=low,
        warmup_num_steps=steps,
        cos_min_ratio=final,
        warmup_type=kind,
    )
    assert close(seen, base * ratio)


def cycle_position(t: int, first: int, second: int, up: int, down: int) -> float:
    """The documents' x, r and s in exact fractions."""
    total = first + second
    r = Fraction(first, first + second)
    x = 1 + Fraction(t + 1, total)
    x -= math.floor(x)
    s, count = (x / r, up) if x <= r else ((x - 1) / (r - 1), down)
    return float(Fraction(math.floor(s * count), count)) if count else float(s)


@settings(max_examples=300, deadline=None)
@given(
    low=rates,
    high=rates,
    first=lengths,
    second=st.integers(0, 60),
    up=stairs,
    down=stairs,
    lr_decay=rates,
    mom_decay=rates,
    every=st.integers(0, 20),
    t=times,
)
def test_one_cycle(
    low: float,
    high: float,
    first: int,
    second: int,
    up: int,
    down: int,
    lr_decay: float,
    mom_decay: float,
    every: int,
    t: int,
) -> None:
    total = first + second
    if t < 0:
        lr = low
        mom = 0.8
    elif t < total:
        s = cycle_position(t, first, second, up, down)
        lr = low + (high - low) * s
        mom = 0.9 - (0.9 - 0.8) * s
    else:
        intervals = (t - total + 1) / every if every else 0.0
        lr = low / (1 + lr_decay * intervals)
        mom = 0.9 * (1 + mom_decay * intervals)
    seen = lr_at(
        OneCycle,
        t,
        cycle_min_lr=low,
        cycle_max_lr=high,
        decay_lr_rate=lr_decay,
        cycle_first_step_size=first,
        cycle_second_step_size=second,
        cycle_first_stair_count=up,
        cycle_second_stair_count=down,
        decay_step_size=every,
        decay_mom_rate=mom_decay,
    )
    assert close(seen[0], lr)
    assert close(seen[1], mom)
