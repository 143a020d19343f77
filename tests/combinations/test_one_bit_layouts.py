"""1-bit LAMB where ranks have parts of the model: equal to one process that emulates their exchange."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import models as m
from ds_testing import run_ranks

PARAMS = {"lr": 0.01, "weight_decay": 0.1, "freeze_step": 3}
STEPS = 8
MICROS = 2
# Adam's division by small roots enlarges rounding; a scale of a part is off by 1e-3.
TOLERANCE = 1e-7


class Block(m.WrittenBlock):
    """Keys without a bias: its gradient is zero, so that of rounding alone would be exchanged."""

    def __init__(self) -> None:
        super().__init__()
        unit = m.WIDTH // m.HEADS
        self.attention.k_proj = m.ColumnParallelLinear(m.WIDTH, m.WIDTH, bias=False, unit=unit)


def written_pipeline() -> Any:
    return m.pipeline(Block)


def written_plain() -> Any:
    return m.Plain(Block)


LAYOUTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dp": (m.whole, m.whole, {}),
    "tp": (m.whole, m.whole, {"tensor_parallel": {"autotp_size": 2}}),
    "ep": (m.divided_experts, m.experts, {}),
    "ep tp": (m.divided_experts, m.experts, {"tensor_parallel": {"autotp_size": 2}}),
    "pp": (m.pipeline, m.undivided, {}),
    "pp tp": (written_pipeline, written_plain, {"tensor_parallel": {"autotp_size": 2}}),
}


def engine_of(layout: str) -> Any:
    import ds_core

    make, _, more = LAYOUTS[layout]
    config = {
        "train_micro_batch_size_per_gpu": m.MICRO,
        "gradient_accumulation_steps": MICROS,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "OneBitLamb", "params": PARAMS},
        **more,
    }
    engine, *_ = ds_core.initialize(model=make().double(), config=config)
    return engine


def go(engine: Any, layout: str, steps: range) -> None:
    place = engine.ctx.mesh.index("batch")
    for step in steps:
        if layout.startswith("pp"):
            engine.train_batch(iter([m.pipe_batch(step, micro, place) for micro in range(MICROS)]))
            continue
        for micro in range(MICROS):
            engine.backward(engine(**m.batch(step, micro, place)))
            engine.step()


def trained(layout: str) -> dict[str, Any]:
    """The weights of this rank, where they lie in the full ones, and what it tells of the layout."""
    from one_bit_lamb import told

    engine = engine_of(layout)
    rank = told(engine)
    go(engine, layout, range(STEPS))
    weights = {n: p.detach().reshape(-1).clone() for n, p in engine.module.named_parameters()}
    place = engine.ctx.mesh.index("batch")
    engine.destroy()
    return {"weights": weights, "rank": vars(rank), "place": place}


def gradients(model: Any, layout: str, step: int, place: int) -> dict[str, Any]:
    import torch

    for micro in range(MICROS):
        if layout.startswith("pp"):
            inputs, labels = m.pipe_batch(step, micro, place)
            loss = model(inputs, labels)
        else:
            loss = model(**m.batch(step, micro, place))
        (loss / MICROS).backward()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in _named(model)}
    model.zero_grad(set_to_none=True)
    return found


def _named(model: Any) -> list[tuple[str, Any]]:
    return list(model.named_parameters())


CASES = [("dp", 2), ("tp", 2), ("tp", 4), ("ep", 2), ("ep", 4), ("ep tp", 4), ("pp", 2), ("pp", 4)]
CASES += [("pp tp", 4), ("pp tp", 8)]


@pytest.mark.fast_cases("tp-4")
@pytest.mark.parametrize(
    ("layout", "world"),
    [c if c in (("tp", 4), ("pp", 4)) else pytest.param(*c, marks=pytest.mark.slow) for c in CASES],
)
def test_scales_and_trust_ratios_are_of_full_tensors(layout: str, world: int) -> None:
    import torch
    from ds_testing.truth import relative
    from one_bit_lamb import OneBitLamb, Rank

    ranks = run_ranks(world, trained, layout)
    model = LAYOUTS[layout][1]().double()
    places = [found["place"] for found in ranks]
    truth = OneBitLamb(
        dict(_named(model)), [Rank(**found["rank"]) for found in ranks], PARAMS["freeze_step"]
    )
    for step in range(STEPS):
        with torch.no_grad():
            for name, param in _named(model):
                param.copy_(truth.p[name])
        by_place = {p: gradients(model, layout, step, p) for p in set(places)}
        truth.step([by_place[p] for p in places], PARAMS["lr"], PARAMS["weight_decay"])
    for found in ranks:
        for name, weight in found["weights"].items():
            wanted = truth.p[name].reshape(-1)[found["rank"]["parts"][name]]
            assert relative(weight, wanted) <= TOLERANCE, name
