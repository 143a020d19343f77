"""What `train_batch` and `eval_batch` of a pipeline take and give, beyond numbers of plain
batches."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from ds_testing import run_ranks
from ds_testing.pool import RemoteError
from pipe_models import Plain, batch, pipeline
from pipe_runs import SCHEDULES, batches, close, numbers, pipeline_engine, plain_loss, squares

from ds_core.engine import RepeatingLoader
from ds_core.errors import DSError, UsageError

# -- evaluation ------------------------------------------------------------------------------------


def evaluates(chunks: int) -> None:
    engine = pipeline_engine(pipeline(2, chunks))
    truth = Plain()
    last = engine.is_last_stage()
    assert close(engine.eval_batch(batches(2)), plain_loss(truth, 2))
    assert close(
        engine.eval_batch(batches(5), num_micro_batches=5, reduce_output=None), plain_loss(truth, 5)
    )
    for block in (engine.no_sync, engine.coalesce_grad_reduction):
        with (
            pytest.raises(
                UsageError, match=r"cannot be called explicitly: .* use engine\.train_batch"
            ),
            block(),
        ):
            pass
    loss, logits = engine.eval_batch(batches(3), return_logits=True, num_micro_batches=3)
    assert close(loss, plain_loss(truth, 3))
    wanted = [truth.outputs(inputs).detach() for inputs, _ in batches(3)]
    assert (
        [close(a, b) for a, b in zip(logits, wanted, strict=True)] == [True] * 3
        if last
        else logits is None
    )
    unlabelled = iter([inputs for inputs, _ in batches(1)])
    outputs = engine.eval_batch(
        iter([(b, None) for b in unlabelled]), compute_loss=False, num_micro_batches=1
    )
    assert close(outputs, wanted[0]) if last else outputs is None
    assert close(engine.eval_batch(batches(1), num_micro_batches=1), plain_loss(truth, 1))
    kept = engine.eval_batch(batches(2), bcast_loss=False)
    assert close(kept, plain_loss(truth, 2)) if last else kept is None
    with pytest.raises(StopIteration):
        engine.eval_batch(batches(1))
    assert close(engine.train_batch(batches(2)), plain_loss(truth, 2))
    with pytest.raises(UsageError, match="reduce_output"):
        engine.eval_batch(batches(2), reduce_output="sum")
    engine.destroy()


@pytest.mark.fast_cases("1")
@pytest.mark.parametrize("chunks", [1, 2])
def test_evaluation(chunks: int) -> None:
    run_ranks(2, evaluates, chunks)


# -- data ------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of a fixed table, as the model does not take them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        (tokens, mask), labels = batch(0, index, 0)
        return {"tokens": tokens[0], "mask": mask[0], "labels": labels[0]}


def arranged(row: dict[str, Tensor]) -> Any:
    return (row["tokens"], row["mask"]), row["labels"]


def takes_data() -> None:
    engine = pipeline_engine(pipeline(2))
    truth = Plain()
    engine.set_dataiterator(batches(4))
    assert close(engine.train_batch(), plain_loss(truth, 2))
    engine.train_batch()
    with pytest.raises(StopIteration):
        engine.train_batch()
    assert engine.global_steps == 2
    engine.set_dataiterator(RepeatingLoader(list(batches(2))))
    for _ in range(3):
        engine.train_batch()
    engine.destroy()

    engine = pipeline_engine(pipeline(2), training_data=Numbers())
    rows: list[Any] = []
    engine.set_batch_fn(lambda row: rows.append(arranged(row)) or rows[-1])
    assert close(engine.train_batch(), sum(truth(*row).item() for row in rows) / 2)
    assert len(rows) == 2
    engine.set_batch_fn(None)
    with pytest.raises(UsageError, match=r"\(inputs, labels\), got a dict of 3; .*set_batch_fn"):
        engine.train_batch()
    assert engine.global_steps == 1
    engine.set_batch_fn(arranged if engine.is_first_stage() else None)
    with pytest.raises(
        UsageError, match="a peer failed" if engine.is_first_stage() else "got a dict of 3"
    ):
        engine.train_batch()
    engine.set_batch_fn(arranged)
    engine.train_batch()
    engine.destroy()


class Explodes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("boom")


def fails_half_way() -> None:
    from ds_pipeline import PipelineModule

    from ds_core import comm

    engine = pipeline_engine(
        PipelineModule([nn.Linear(6, 6), Explodes()], num_stages=2, loss_fn=squares).double(), gas=1
    )
    if engine.is_last_stage():
        with pytest.raises(RuntimeError, match="boom"):
            engine.train_batch(iter([numbers(0, 0)]))
        with pytest.raises(UsageError, match="failed in its middle on this rank"):
            engine.train_batch(iter([numbers(0, 0)]))
        assert comm.rank() == 1
        raise RuntimeError("and the other rank waits")
    engine.train_batch(iter([numbers(0, 0)]))


def test_a_batch_that_failed_half_way_is_not_mixed_with_the_next() -> None:
    with pytest.raises(RemoteError, match="rank 1 raised RuntimeError"):
        run_ranks(2, fails_half_way)


def test_where_batches_come_from() -> None:
    run_ranks(2, takes_data)


def runs_out_on_one() -> None:
    from ds_core import comm

    engine = pipeline_engine(pipeline(2))
    with pytest.raises(StopIteration):  # rank 3 alone is short of one
        engine.train_batch(batches(1 if comm.rank() == 3 else 2))
    engine.train_batch(batches(2))
    assert engine.global_steps == 1
    engine.destroy()


def test_when_one_rank_runs_out_all_stop() -> None:
    run_ranks(4, runs_out_on_one)


# -- shapes ----------------------------------------------------------------------------------------


class Shorten(nn.Module):
    """Gives as many columns as the values say, and an integer that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 7.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        columns = int(x[0, 0].abs() * 10) % 5 + 1
        return (x * self.weight)[:, :columns], torch.tensor(columns)


def widen(pair: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.pad(pair[0], (0, 6 - int(pair[1])))


def trains_with_shapes(schedule: str, chunks: int) -> None:
    from ds_pipeline import PipelineModule

    layers = (
        [Shorten(), widen, nn.Linear(6, 6), nn.Linear(6, 6)] if chunks > 1 else [Shorten(), widen]
    )
    torch.manual_seed(5)
    for layer in layers[2:]:
        nn.init.normal_(layer.weight)  # type: ignore[union-attr, arg-type]
        nn.init.zeros_(layer.bias)  # type: ignore[union-attr, arg-type]
    truth = [
        copy.deepcopy(layer).double() if isinstance(layer, nn.Module) else layer for layer in layers
    ]
    options: dict[str, Any] = {"loss_fn": squares, "partition_method": "uniform", "chunks": chunks}
    model = PipelineModule(layers, num_stages=2, dynamic_shape=True, **options).double()
    engine = pipeline_engine(model, gas=4, schedule=schedule)
    optimizer = torch.optim.AdamW(
        [p for t in truth if isinstance(t, nn.Module) for p in t.parameters()], lr=0.01
    )
    for step in range(2):
        rows = [2, 3, 2, 4]  # and inputs whose shapes differ inside a batch
        ours = engine.train_batch(iter([numbers(step, m, rows[m]) for m in range(4)]))
        total = 0.0
        for m in range(4):
            x, y = numbers(step, m, rows[m])
            for layer in truth:
                x = layer(x)
            loss = squares(x, y) / 4
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.4)
        optimizer.step()
        optimizer.zero_grad()
        assert close(ours, total), (step, ours, total)
    engine.destroy()


@pytest.mark.fast_cases("zero_bubble-1", "interleaved-2")
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_shapes_that_depend_on_values(schedule: str, chunks: int) -> None:
    run_ranks(2, trains_with_shapes, schedule, chunks)


def shapes_change_unasked() -> None:
    from ds_pipeline import PipelineModule

    model = PipelineModule(
        [Shorten(), widen], num_stages=2, loss_fn=squares, partition_method="uniform"
    ).double()
    engine = pipeline_engine(model, gas=1)
    inputs = torch.ones(2, 6).double()
    labels = torch.zeros(2, 6).double()
    engine.train_batch(iter([(inputs * 0.1, labels)]))
    engine.train_batch(iter([(inputs * 0.3, labels)]))


def test_a_shape_that_changes_unasked_is_an_error() -> None:
    with pytest.raises(
        Exception,
        match=r"gives float64\[2, 4\]\*, int64\[\], and gave float64\[2, 2\]\*, int64\[\]",
    ):
        run_ranks(2, shapes_change_unasked)


# -- what is refused -------------------------------------------------------------------------------


def refuses() -> list[str]:
    from ds_pipeline import LayerSpec, PipelineModule

    linear = nn.Linear(2, 2)
    attempts = [
        lambda: PipelineModule([linear]),
        lambda: PipelineModule([], num_stages=2),
        lambda: PipelineModule(
            [linear, torch.tanh, linear], num_stages=2, partition_method="uniform"
        ),
        lambda: PipelineModule([linear], num_stages=2, chunks=2),
        lambda: LayerSpec(torch.tanh),  # type: ignore[arg-type]
        lambda: PipelineModule([linear, torch.tanh], num_stages=2, partition_method="type:Conv"),
        lambda: PipelineModule([linear, torch.tanh], num_stages=2, partition_method="profile"),
        lambda: pipeline_engine(linear, pipeline={}),
        lambda: pipeline_engine(pipeline(2), pipeline={"stages": 4}),
        lambda: pipeline_engine(pipeline(2), schedule="interleaved"),
        lambda: pipeline_engine(pipeline(2, 2), schedule="zero_bubble"),
        lambda: pipeline_engine(pipeline(2), schedule="gpipe"),
    ]
    told = []
    for attempt in attempts:
        with pytest.raises(DSError) as caught:
            attempt()
        told.append(str(caught.value))
    return told


REFUSED = [
    "needs num_stages or topology",
    "was given no layers",
    r"layer 2 \(Linear\) on stage 1 shares a weight with a layer on stage 0; use TiedLayerSpec",
    "1 layers cannot make 2 chunks on each of 2 stages",
    "LayerSpec needs a class of torch.nn.Module, got",
    "matches no layer; there are Linear, tanh",
    "needs example=",
    "the model is a Linear; give a PipelineModule",
    "pipeline.stages.*4.*2|2.*4",
    "chunks=2 or more",
    "is for one chunk per stage, the model has 2",
    "no pipeline schedule is called 'gpipe'",
]


def test_what_cannot_be_says_why() -> None:
    for told in run_ranks(2, refuses):
        for text, wanted in zip(told, REFUSED, strict=True):
            assert re.search(wanted, text), (text, wanted)
