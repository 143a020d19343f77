from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import pytest
import torch
from sampling_runs import (
    LENGTHS,
    Bigrams,
    OfOneLength,
    Run,
    Sentences,
    by_hand,
    config,
    filled,
    sampled_run,
)

import ds_core

MICROS = 4
TOKENS = {"dynamic_batching": {"enabled": True, "max_tokens": 26}, "loss_weights": "targets"}


def close(run: Run, wanted: Run, tolerance: float = 1e-5) -> None:
    assert run[0] == pytest.approx(wanted[0], rel=tolerance)
    for name, weight in run[1].items():
        torch.testing.assert_close(weight, wanted[1][name], rtol=tolerance, atol=tolerance)


def plain_by_tokens(steps: int, method: str = "linear") -> Run:
    samples = filled(26, MICROS, steps, seed=3)
    sizes = [len(step) / (2 * MICROS) for step in samples]
    power = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[method]
    return by_hand(samples, [0.5 * 0.9**k * size**power for k, size in enumerate(sizes)])


@pytest.mark.parametrize("method", ["linear", "sqrt", "none"])
def test_batches_by_tokens_equal_training_by_hand(method: str) -> None:
    """With weighted losses, and the learning rate scaled under a schedule that goes by the last
    one.
    """
    dynamic = {**TOKENS["dynamic_batching"], "lr_scaling_method": method}  # type: ignore[dict-item]
    close(
        sampled_run(config(MICROS, 1, {**TOKENS, "dynamic_batching": dynamic}), 5),
        plain_by_tokens(5, method),
    )


@pytest.mark.parametrize(
    ("world", "stage"), [(2, 0), pytest.param(2, 1, marks=pytest.mark.slow), (4, 2), (2, 3)]
)
def test_batches_by_tokens_on_several_ranks(ranks: Any, world: int, stage: int) -> None:
    if stage:
        pytest.importorskip("ds_zero")
    more = {"zero_optimization": {"stage": stage}} if stage else {}
    settings = config(MICROS, world, TOKENS, **more)
    wanted = plain_by_tokens(4)
    for run in ranks(world, sampled_run, settings, 4):
        close(run if stage < 3 else (run[0], {}), wanted)


def test_batches_by_tokens_in_bf16(ranks: Any) -> None:
    wanted = plain_by_tokens(4)
    for run in ranks(2, sampled_run, config(MICROS, 2, TOKENS, bf16={"enabled": True}), 4):
        close(run, wanted, 0.03)


KINDS = {
    "samples": {},
    "tokens": TOKENS,
    "seqlen": {
        "dynamic_batching": {**TOKENS["dynamic_batching"], "sequence_picking_order": "seqlen"},  # type: ignore[dict-item]
        "loss_weights": "targets",
    },
    "packed": {"packing": {"enabled": True, "row_tokens": 32}, "loss_weights": "targets"},
    "mixed": {"mixing": {"weights": {"a": 1, "b": 3}}, **TOKENS},
    "curriculum": TOKENS,
}


def curriculum(folder: Path) -> dict[str, Any]:
    order = np.argsort(LENGTHS, kind="stable")
    np.save(folder / "samples.npy", order)
    np.save(folder / "metric.npy", np.asarray(LENGTHS)[order])
    metric = {
        "index_to_sample_path": str(folder / "samples.npy"),
        "index_to_metric_path": str(folder / "metric.npy"),
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": 5,
        "max_difficulty": 13,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 1},
    }
    return {"curriculum_learning": {"enabled": True, "curriculum_metrics": {"seqlen": metric}}}


FAST = ("tokens", "packed")


@pytest.mark.fast_cases("tokens")
@pytest.mark.parametrize(
    "kind", [k if k in FAST else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
def test_a_run_goes_on_at_another_number_of_ranks(ranks: Any, tmp_path: Path, kind: str) -> None:
    """In the middle of an epoch, with the samples, losses and weights of a run of one process."""
    pytest.importorskip("ds_checkpoint")
    sampling = {**KINDS[kind], **(curriculum(tmp_path) if kind == "curriculum" else {})}
    whole = _leg(config(MICROS, 1, sampling), 7, None, None, kind)
    folder = str(tmp_path / "saved")
    (first, *_) = ranks(2, _leg, config(MICROS, 2, sampling), 2, folder, None, kind)
    (second, *_) = ranks(4, _leg, config(MICROS, 4, sampling), 2, folder, folder, kind)
    third = _leg(config(MICROS, 1, sampling), 3, None, folder, kind)
    close((first[0] + second[0] + third[0], third[1]), whole)


def _leg(
    settings: dict[str, Any], steps: int, save: str | None, load: str | None, kind: str
) -> Run:
    data: Any = {"samples": OfOneLength(), "mixed": {"a": Sentences(), "b": Sentences()}}.get(kind)
    return sampled_run(settings, steps, save=save, load=load, data=data)


def test_packed_rows_equal_training_by_hand() -> None:
    """Rows have several samples, and no token is predicted from another sample's."""
    settings = config(
        MICROS, 1, {**KINDS["packed"], "packing": {"enabled": True, "row_tokens": 16}}
    )
    engine, *_ = ds_core.initialize(model=_Watching(), config=settings, training_data=Sentences())
    steps = []
    losses = []
    watching: Any = engine.module
    for _ in range(3):
        watching.seen.clear()
        losses.append(float(engine.train_batch()))
        steps.append(
            [i for i in range(len(LENGTHS)) if any(_holds(row, i) for row in watching.seen)]
        )
    weights = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    engine.destroy()
    assert sum(map(len, steps)) == len({i for step in steps for i in step})
    assert all(len(step) > 2 * MICROS for step in steps)
    close((losses, weights), by_hand(steps, [0.5 * 0.9**k for k in range(3)]))


def _holds(row: list[list[int]], index: int) -> bool:
    return Sentences()[index]["input_ids"].tolist() in row


class _Watching(Bigrams):
    """Keeps the samples of each packed row."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[list[int]]] = []

    def forward(
        self, input_ids: Any, labels: Any, attention_mask: Any = None, position_ids: Any = None
    ) -> Any:
        for ids, places in zip(input_ids.tolist(), position_ids.tolist(), strict=True):
            starts = [k for k, place in enumerate(places) if place == 0] + [len(ids)]
            self.seen.append([ids[a:b] for a, b in itertools.pairwise(starts)])
        return super().forward(input_ids, labels)


def test_states_are_json() -> None:
    engine, *_ = ds_core.initialize(
        model=Bigrams(), config=config(MICROS, 1, TOKENS), training_data=Sentences()
    )
    engine.train_batch()
    assert engine.training_dataloader is not None
    state = engine.training_dataloader.state_dict()
    assert json.loads(json.dumps(state)) == state
    engine.destroy()
