"""Optimizers that look beyond one element, under every layout: losses and weights of one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import models as m
from ds_testing import run_ranks
from ds_testing.kits.matrix.covering import Row, Rules, cover
from optimizer_trials import (
    KINDS,
    LAYOUTS,
    MATRICES,
    MICROS,
    STEPS,
    TOTAL,
    config,
    half,
    optimizer_of,
    train_alone,
    trained,
)

from ds_core.errors import UsageError

IN_FP32 = "SOAP short"
"""A side that is longer than the other one has directions that gradients have not had. In fp32
rounding has a say in which they are, so that each layout, and each batch, has others."""
FEATURES = {
    "layout": tuple(LAYOUTS),
    "kind": tuple(kind for kind in KINDS if kind != IN_FP32),
    "stage": ("0", "1", "2", "3"),
    "world": ("2", "4"),
    "offload": ("", "cpu", "nvme"),
    "clip": ("0.0", "0.3"),
}


def _possible(row: Row) -> bool:
    if row.get("layout") == "ep tp" and (row.get("world") == "2" or row.get("stage") == "3"):
        return False
    # Its learning rates count updates, of which a store that frees memory would make several.
    if row.get("kind") == "ScheduleFreeAdamW" and row.get("offload") == "nvme":
        return False
    return row.get("stage") != "0" or not row.get("offload")


def every_case() -> list[tuple[str, str, int, int, str, float]]:
    """Each layout with each kind at each stage once; in turn on two and four ranks, with and
    without offload and clipping.
    """
    wanted = {
        frozenset({("layout", layout), ("kind", kind), ("stage", stage)})
        for layout in LAYOUTS
        for kind in FEATURES["kind"]
        for stage in FEATURES["stage"]
    }
    return [
        (
            row["layout"],
            row["kind"],
            int(row["world"]),
            int(row["stage"]),
            row["offload"],
            float(row["clip"]),
        )
        for row in cover(Rules(FEATURES, possible=_possible), wanted)
    ]


CASES = every_case()
SAMPLE = [
    ("dp", "Muon", 2, 1, "", 0.3),
    ("dp", "Lamb", 2, 3, "nvme", 0.0),
    ("tp", "Muon", 2, 0, "", 0.3),
    ("tp", "Lamb", 2, 1, "", 0.3),
    ("tp", "Muon", 4, 3, "nvme", 0.3),
    ("tp", "Lamb", 4, 2, "", 0.0),
    ("ep", "Muon", 2, 2, "", 0.3),
    ("ep", "Lamb", 4, 1, "cpu", 0.3),
    ("sp", "Muon", 2, 3, "", 0.0),
    ("spare", "Muon", 2, 2, "", 0.0),
    ("dp", "AdamMini", 2, 2, "nvme", 0.3),
    ("tp", "AdamMini", 4, 3, "", 0.3),
    ("ep", "AdamMini", 2, 1, "", 0.0),
    ("tp", "NorMuon", 4, 3, "", 0.3),
    ("dp", "NorMuon", 2, 1, "cpu", 0.3),
    ("tp", "AdaMuon", 4, 2, "", 0.0),
    ("tp", "ScheduleFreeAdamW", 4, 2, "cpu", 0.3),
    ("tp", "SOAP", 4, 3, "nvme", 0.3),
    ("ep", "Shampoo", 2, 2, "", 0.3),
    ("tp", "Dion", 4, 1, "cpu", 0.3),
    ("spare", "GaLore", 2, 3, "", 0.3),
]


@pytest.mark.fast_cases(
    "dp-Muon-2-1--0.3",
    "dp-Lamb-2-3-nvme-0.0",
    "tp-Muon-2-0--0.3",
    "tp-Lamb-2-1--0.3",
    "tp-Muon-4-3-nvme-0.3",
    "sp-Muon-2-3--0.0",
    "dp-AdamMini-2-2-nvme-0.3",
    "dp-NorMuon-2-1-cpu-0.3",
    "ep-Shampoo-2-2--0.3",
    "tp-Dion-4-1-cpu-0.3",
    "spare-GaLore-2-3--0.3",
)
@pytest.mark.parametrize(
    ("layout", "kind", "world", "stage", "offload", "clip"),
    [
        *SAMPLE,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case not in SAMPLE),
    ],
)
def test_every_layout_trains_as_one_process(
    layout: str, kind: str, world: int, stage: int, offload: str, clip: float
) -> None:
    for rank in run_ranks(world, trained, layout, kind, stage, offload, clip):
        worst = max(rank, key=rank.__getitem__)
        assert rank[worst] <= 1e-10, (worst, rank[worst])


def rounding(layout: str, kind: str, clip: float) -> float:
    """How far one process is from itself where weights begin a unit in the last place away."""
    import torch
    from ds_testing.truth import relative

    _, single, _ = LAYOUTS[layout]
    eps = torch.finfo(torch.float32).eps

    def moved(by: float) -> Any:
        made = single().float()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for param in made.parameters():
                signs = torch.randint(0, 2, param.shape, generator=generator) * 2 - 1
                param.mul_(1 + by * eps * signs)
        return made

    plain, *others = (
        train_alone(kind, lambda by=by: moved(by), 2, clip, "float32", range(STEPS))[0]
        for by in (0.0, 1.0, -1.0)
    )
    pairs = [zip(other.parameters(), plain.parameters(), strict=True) for other in others]
    return max(relative(x.detach().double(), y.detach().double()) for row in pairs for x, y in row)


# Newton-Schulz enlarges small singular values (3.4 times in each of its iterations), Adam's first
# steps small gradients, and SOAP divides by roots of second moments where gradients are next to
# nothing: with them the rounding of gradients.
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(
    ("layout", "stage"),
    [
        pytest.param("dp", 2, marks=pytest.mark.slow),
        pytest.param("dp", 3, marks=pytest.mark.slow),
        pytest.param("tp", 1, marks=pytest.mark.slow),
        pytest.param("ep", 2, marks=pytest.mark.slow),
    ],
)
def test_fp32_is_one_process_too(kind: str, layout: str, stage: int) -> None:
    allowed = max(1e-6, 4 * run_ranks(1, rounding, layout, kind, 0.3)[0])
    for rank in run_ranks(2, trained, layout, kind, stage, "", 0.3, "float32"):
        worst = max(rank, key=rank.__getitem__)
        assert rank[worst] <= allowed, (worst, rank[worst], allowed)


ROUTES = [
    ("Muon", ("tp", 2, 4, 2), ("dp", 3, 2, 2)),
    ("Lamb", ("dp", 3, 2, 2), ("tp", 1, 4, 2)),
    ("Muon", ("ep", 1, 2, 2), ("experts", 2, 4, 4)),
    ("Lamb", ("ep", 2, 4, 4), ("experts", 0, 1, 1)),
    ("Muon", ("dp", 0, 2, 2), ("tp", 3, 2, 1)),
    ("AdamMini", ("tp", 2, 4, 2), ("dp", 3, 2, 2)),
    ("AdamMini", ("ep", 1, 2, 2), ("experts", 2, 4, 4)),
    ("ScheduleFreeAdamW", ("tp", 2, 4, 2), ("dp", 3, 2, 2)),
    ("NorMuon", ("tp", 2, 4, 2), ("dp", 3, 2, 2)),
    ("AdaMuon", ("tp", 1, 4, 2), ("dp", 2, 2, 2)),
    ("NorMuon", ("ep", 1, 2, 2), ("experts", 2, 4, 4)),
    ("SOAP", ("tp", 2, 4, 2), ("dp", 3, 2, 2)),
    ("SOAP", ("dp", 0, 2, 2), ("tp", 3, 2, 1)),
    ("SOAP", ("ep", 1, 2, 2), ("experts", 2, 4, 4)),
    *((kind, ("tp", 1, 4, 2), ("dp", 2, 2, 2)) for kind in MATRICES),
    *((kind, ("experts", 0, 1, 1), ("ep", 2, 4, 4)) for kind in MATRICES),
]
FAST_ROUTES = (ROUTES[0], ("SOAP", ("tp", 2, 4, 2), ("dp", 3, 2, 2)))


@pytest.mark.fast_cases("SOAP-first1-then1")
@pytest.mark.parametrize(
    ("kind", "first", "then"),
    [
        *FAST_ROUTES,
        *(pytest.param(*r, marks=pytest.mark.slow) for r in ROUTES if r not in FAST_ROUTES),
    ],
)
def test_states_go_through_checkpoints_to_another_layout(
    kind: str, first: Any, then: Any, tmp_path: Path
) -> None:
    layout, stage, world, ranks = first
    run_ranks(world, half, str(tmp_path), kind, layout, stage, ranks, False)
    layout, stage, world, ranks = then
    found = run_ranks(world, half, str(tmp_path), kind, layout, stage, ranks, True)
    check_against_one_process(kind, layout, found)


@pytest.mark.parametrize(
    "kind",
    [
        "SOAP",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in KINDS
            if kind not in ("SOAP", "ScheduleFreeAdamW")
        ),
    ],
)
@pytest.mark.parametrize("stored", ["first", pytest.param("then", marks=pytest.mark.slow)])
def test_states_on_disk_go_through_checkpoints(kind: str, stored: str, tmp_path: Path) -> None:
    first, then = ("nvme", "") if stored == "first" else ("", "nvme")
    run_ranks(2, half, str(tmp_path), kind, "tp", 2, 1, False, first)
    found = run_ranks(2, half, str(tmp_path), kind, "dp", 3, 2, True, then)
    check_against_one_process(kind, "dp", found)


def check_against_one_process(kind: str, layout: str, found: list[dict[str, Any]]) -> None:
    """The weights that ranks have after `half` and the other half."""
    import torch
    from ds_testing.truth import relative

    model = LAYOUTS[layout][1]().double()
    optimizer = optimizer_of(kind, model)
    for step in range(4):
        optimizer.zero_grad()
        for index in range(TOTAL):
            (model(**m.batch(step, 0, index)) / TOTAL).backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.3)
        optimizer.step()
    for rank in found:
        for name, param in model.named_parameters():
            assert relative(rank[name], param.detach()) <= 1e-10, name


def averages(layout: str, stage: int, dtype: str) -> list[float]:
    """How far weights and loss within `averaged` are from one process, and weights afterwards from
    those before.
    """
    import torch
    from ds_optimizers import averaged
    from ds_testing.truth import relative, whole_weights

    import ds_core
    from ds_core import comm

    kind = "ScheduleFreeAdamW"
    make, single, more = LAYOUTS[layout]
    precision = {"bf16": {"enabled": True}} if dtype == "bfloat16" else {}
    model = make().to(torch.float32 if precision else torch.float64)
    settings = config(kind, stage, "", 0.0, **more, **precision)
    engine, *_ = ds_core.initialize(model=model, config=settings)
    mesh = engine.ctx.mesh
    for step in range(STEPS):
        for micro in range(MICROS):
            engine.backward(engine(**m.batch(step, micro, mesh.index("batch"))))
            engine.step()
    before = whole_weights(engine)
    with averaged(engine), torch.no_grad():
        inside = whole_weights(engine)
        losses = comm.all_gather_json(float(engine(**m.batch(9, 0, 0))))
        with pytest.raises(UsageError, match="averaged"):
            engine.optimizer.step()  # type: ignore[union-attr]
    after = whole_weights(engine)
    back = max(float((before[n] - after[n]).abs().max()) for n in before)
    moved = max(float((before[n] - inside[n]).abs().max()) for n in before)
    engine.destroy()
    if precision:
        return [0.0, 0.0, back, moved]
    plainly, _ = train_alone(kind, single, mesh.size("batch"), 0.0, dtype, range(STEPS))
    optimizer = plainly.optimizer
    with torch.no_grad():
        for param in plainly.parameters():
            param.copy_(optimizer.average(param, param, optimizer.state[param]["z"]))
        wanted = float(plainly(**m.batch(9, 0, 0)))
    weights = max(relative(inside[n], p.detach()) for n, p in plainly.named_parameters())
    return [weights, max(abs(x - wanted) for x in losses), back, moved]


@pytest.mark.fast_cases("tp-2-bfloat16")
@pytest.mark.parametrize(
    ("layout", "stage", "dtype"),
    [
        ("dp", 3, "float64"),
        ("tp", 2, "bfloat16"),
        pytest.param("tp", 0, "float64", marks=pytest.mark.slow),
        pytest.param("dp", 1, "bfloat16", marks=pytest.mark.slow),
        pytest.param("dp", 3, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_averages_are_shown_and_weights_come_back_to_the_bit(
    layout: str, stage: int, dtype: str
) -> None:
    for weights, loss, back, moved in run_ranks(2, averages, layout, stage, dtype):
        assert weights <= 1e-10
        assert loss <= 1e-10
        assert back == 0
        assert moved > 1e-4


def from_a_function(kind: str, stage: int, layout: str) -> float:
    """An optimizer that a function of the user's makes, so that ZeRO does not know it beforehand."""
    from ds_testing.truth import relative, whole_weights

    import ds_core

    settings = config(
        kind, stage, "", 0.0, zero_allow_untested_optimizer=True, **LAYOUTS[layout][2]
    )
    del settings["optimizer"]
    model = m.whole().double()
    for name, param in model.named_parameters():
        param.use_muon = param.dim() == 2 and "token" not in name and "places" not in name  # type: ignore[attr-defined]
    given: Any = [{"params": [p]} for p in model.parameters()]
    if kind == "Muon":
        given = [{"params": [p], "use_muon": p.use_muon} for p in model.parameters()]  # type: ignore[attr-defined]

    def make(groups: Any) -> Any:
        import ds_optimizers

        return getattr(ds_optimizers, kind)(groups, **KINDS[kind])

    engine, *_ = ds_core.initialize(
        model=model, model_parameters=given, optimizer=make, config=settings
    )
    ranks = engine.ctx.mesh.size("dp")
    for step in range(STEPS):
        for micro in range(MICROS):
            engine.backward(engine(**m.batch(step, micro, engine.ctx.mesh.index("dp"))))
            engine.step()
    found = whole_weights(engine)
    engine.destroy()
    single = m.whole().double()
    rows = zip(given, single.parameters(), strict=True)
    optimizer = make([{**row, "params": [p]} for row, p in rows])
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICROS):
            for place in range(ranks):
                (single(**m.batch(step, micro, place)) / (MICROS * ranks)).backward()
        optimizer.step()
    return max(relative(found[n], p.detach()) for n, p in single.named_parameters())


@pytest.mark.parametrize(
    ("kind", "stage", "layout"),
    [
        ("Muon", 2, "dp"),
        ("Muon", 0, "tp"),
        pytest.param("Lamb", 1, "dp", marks=pytest.mark.slow),
        pytest.param("Muon", 3, "dp", marks=pytest.mark.slow),
        pytest.param("Lamb", 1, "tp", marks=pytest.mark.slow),
    ],
)
def test_an_optimizer_that_a_function_makes(kind: str, stage: int, layout: str) -> None:
    assert max(run_ranks(2, from_a_function, kind, stage, layout)) <= 1e-10


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_updates_bucket_by_bucket_refuses_them(kind: str, tmp_path: Path) -> None:
    assert all(run_ranks(1, refusals, kind, str(tmp_path))[0])


def refusals(kind: str, folder: str) -> list[bool]:
    import ds_core

    cpu = {"device": "cpu"}
    sections: list[tuple[str, dict[str, Any]]] = [
        (
            "zenflow",
            {"offload_optimizer": cpu, "zenflow": {"topk_ratio": 0.2, "update_interval": 2}},
        ),
        ("super_offload", {"offload_optimizer": {**cpu, "super_offload": True}}),
    ]
    if kind == "ScheduleFreeAdamW":
        disk = {"device": "nvme", "nvme_path": folder}
        sections.append(("does not keep states in memory", {"offload_optimizer": disk}))
    said = []
    for words, section in sections:
        settings = config(kind, 2, "", 0.0)
        settings["zero_optimization"] |= section
        with pytest.raises(UsageError, match=words):
            ds_core.initialize(model=m.whole(), config=settings)
        said.append(True)
    return said
