"""Pipelines train exactly as one process of plain torch: schedules x ZeRO x micro-batches x stages
x data ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from ds_testing import RemoteError, Traffic, run_ranks
from pipe_models import MICRO, Plain, batch, pipeline

SCHEDULES = [("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2)]


def make_config(schedule: str, zero: int, gas: int, **more: Any) -> dict[str, Any]:
    section = {"schedule": schedule, **more.pop("pipeline", {})}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "pipeline": section,
        **more,
    }
    if zero:
        config["zero_optimization"] = {
            "stage": zero,
            "reduce_bucket_size": 300,
            "param_persistence_threshold": 8,
        }
    return config


def make_engine(stages: int, chunks: int, config: dict[str, Any], **more: Any) -> Any:
    import ds_core

    return ds_core.initialize(model=pipeline(stages, chunks, **more), config=config)[0]


def errors_of_cases(stages: int, cases: list[list[Any]]) -> list[list[Any]]:
    """Per case (schedule, chunks, zero, gas, reduce, interval): the worst errors of losses and
    weights.
    """
    return [[*case, *_errors_of(stages, *case)] for case in cases]


def _errors_of(
    stages: int, schedule: str, chunks: int, zero: int, gas: int, reduce: str, interval: int
) -> list[float]:
    from ds_testing.truth import relative, whole_weights

    section = {"reduce": reduce, "activation_checkpoint_interval": interval}
    engine = make_engine(stages, chunks, make_config(schedule, zero, gas, pipeline=section))
    mesh = engine.ctx.mesh
    dp = mesh.size("dp")
    index = mesh.index("dp")
    truth = Plain()
    optimizer = torch.optim.AdamW(truth.parameters(), lr=0.01, weight_decay=0.1)
    worst = norms = 0.0
    for step in range(3):
        length = 5 if step < 2 else 4  # shapes change between batches
        ours = engine.train_batch(iter([batch(step, m, index, length) for m in range(gas)])).item()
        theirs = 0.0
        for micro in range(gas):
            for i in range(dp):
                loss = truth(*batch(step, micro, i, length)) / gas / dp
                loss.backward()
                theirs += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(truth.parameters(), 0.4).item()
        optimizer.step()
        optimizer.zero_grad()
        worst = max(worst, abs(ours - theirs) / abs(theirs))
        norms = max(norms, abs(engine.get_global_grad_norm() - norm) / norm)
    mine = whole_weights(engine)
    weights = dict(truth.named_parameters())
    answer = [
        worst,
        norms,
        max([relative(mine[n], weights[n].detach()) for n in mine], default=0.0),
    ]
    engine.destroy()
    return answer


def check(answers: list[list[list[Any]]]) -> None:
    for rank, rows in enumerate(answers):
        for *case, loss, norm, weight in rows:
            assert max(loss, norm, weight) <= 1e-12, (
                f"rank {rank}, {case}: loss {loss}, norm {norm}, weights {weight}"
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "stages"),
    [
        (2, 2),
        pytest.param(4, 2, marks=pytest.mark.slow),
        pytest.param(4, 4, marks=pytest.mark.slow),
    ],
)
def test_adamw_recompute_and_early_reduction(world: int, stages: int) -> None:
    """What the conformance kit does not vary: the optimizer, `reduce`, recomputation, shapes that
    change.
    """
    cases = [
        [name, chunks, zero, 3, reduce, interval]
        for name, chunks in SCHEDULES
        for zero, reduce, interval in [
            (0, "batch", 1),
            (1, "batch", 0),
            (2, "micro_batch", 2),
            (3, "micro_batch", 0),
        ]
        if stages < world or zero in (0, 3)  # with one data rank there is little to reduce
    ]
    check(run_ranks(world, errors_of_cases, stages, cases))


@pytest.mark.fast_cases("2-2")
@pytest.mark.parametrize(("world", "stages"), [(2, 2), (4, 4)])
def test_a_schedule_of_ones_own_trains(world: int, stages: int) -> None:
    cases = [["own_schedule:GPipe", 1, zero, gas, "batch", 0] for zero, gas in [(0, 5), (2, 8)]]
    check(run_ranks(world, errors_of_cases, stages, cases))


def runs_a_wrong_schedule() -> None:
    config = make_config("own_schedule:Forgetful", 0, 2)
    make_engine(2, 1, config).train_batch(iter([batch(0, m, 0) for m in range(2)]))


def test_a_wrong_schedule_does_not_run() -> None:
    with pytest.raises(
        RemoteError,
        match=r"pipeline.schedule: Forgetful is wrong: stage 0: no backward of micro-batch 0",
    ):
        run_ranks(2, runs_a_wrong_schedule)


def sends(zero: int, reduce: str, gas: int, section: dict[str, Any]) -> float:
    """Elements that this rank sends to its replicas per batch, in units of P(W-1)/W (README, ZeRO
    inside stages).
    """
    from ds_pipeline import PipelineModule

    import ds_core

    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16, bias=False) for _ in range(4)]
    model = PipelineModule(
        layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform"
    )
    config = make_config("1f1b", zero, gas, pipeline={"reduce": reduce})
    config["zero_optimization"] = {"stage": zero, "param_persistence_threshold": 0, **section}
    engine = ds_core.initialize(model=model, config=config)[0]
    data = [(torch.ones(MICRO, 16), torch.ones(MICRO, 16)) for _ in range(gas)]
    engine.train_batch(iter(data))
    with Traffic() as traffic:
        engine.train_batch(iter(data))
    total = 0.0
    for row in traffic.sent:
        if row.bytes > 200 and row.op not in ("isend", "irecv"):  # less is what ranks agree upon
            total += row.bytes * (2 if row.op == "all_reduce" else 1)
    engine.destroy()
    return total / (2 * 16 * 16 * 4)


def sends_all(cases: list[Any]) -> list[float]:
    return [sends(*case) for case in cases]


@pytest.mark.slow
def test_what_zero_sends_inside_stages() -> None:
    m = 3
    cases: list[tuple[int, str, float, float]] = [
        (0, "batch", 2, 2),
        (1, "batch", 2, 2),
        (2, "batch", 2, 2),
        (2, "micro_batch", m + 1, m + 1),
        # of two layers, the one that is used twice in a row stays
        (3, "batch", 1.5 * m + 1, 2 * m + 1),
        (3, "micro_batch", 2.5 * m, 3 * m),
    ]
    for told in run_ranks(
        4, sends_all, [[*case[:2], m, {"max_reuse_distance": 0}] for case in cases]
    ):
        for sent, (zero, reduce, least, most) in zip(told, cases, strict=True):
            assert least <= sent <= most + 0.01, (zero, reduce, sent)
