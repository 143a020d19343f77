"""What batches are made of, what the loader refuses, and how it follows the engine."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import pytest
import torch
from ds_data_sampling.batching.collate import Packer, Padder
from ds_data_sampling.batching.lengths import Lengths, tokens_of
from ds_data_sampling.loss_weights import weigh_losses
from ds_data_sampling.lr_scaling import check_optimizer
from sampling_runs import LENGTHS, Bigrams, OfOneLength, Sentences, config
from torch import nn

import ds_core
from ds_core.engine import RepeatingLoader, make_loader
from ds_core.errors import UsageError
from ds_core.undo import Undo

TOKENS = {"dynamic_batching": {"enabled": True, "max_tokens": 26}}


# -- batches ---------------------------------------------------------------------------------------


def test_padding() -> None:
    one = {"input_ids": torch.tensor([4, 5]), "labels": torch.tensor([4, 5]), "topic": 7}
    two = {
        "input_ids": [6, 7, 8],
        "labels": [6, 7, 8],
        "topic": 8,
    }
    batch = Padder(9)([one, two])
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[4, 5, 9], [6, 7, 8]],
        "labels": [[4, 5, -100], [6, 7, 8]],
        "topic": [7, 8],
        "attention_mask": [[1, 1, 0], [1, 1, 1]],
    }
    assert "attention_mask" not in Padder()([one, one])
    assert Padder()([torch.tensor([1, 2]), torch.tensor([3])]).tolist() == [[1, 2], [3, 0]]
    words, classes = Padder()([(np.array([1, 2]), 0), (np.array([3]), 1)])
    assert words.tolist() == [[1, 2], [3, 0]] and classes.tolist() == [0, 1]


def test_packing() -> None:
    rows = [
        [torch.tensor([4, 5]), {"input_ids": [6, 7, 8], "kind": [1, 1, 1]}][1:],
        [{"input_ids": [9], "kind": [2]}],
    ]
    batch = Packer(5, 3)(rows)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[6, 7, 8, 3, 3], [9, 3, 3, 3, 3]],
        "kind": [[1, 1, 1, 0, 0], [2, 0, 0, 0, 0]],
        "labels": [[-100, 7, 8, -100, -100], [-100, -100, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]],
    }
    two = Packer(5)([[torch.tensor([4, 5]), torch.tensor([6, 7, 8])]])
    assert two["labels"].tolist() == [[-100, 5, -100, 7, 8]]
    assert two["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    given = {"input_ids": [1, 2, 3], "labels": [-100, -100, 3], "attention_mask": [1, 1, 1]}
    assert Packer(2, truncate=True)([[given]])["labels"].tolist() == [[-100, -100]]


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ({"tokens": [1]}, "input_ids; one has tokens"),
        ({"input_ids": [1, 2], "topic": 3}, "'topic' of shape"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "hides tokens"),
        ([1] * 9, "9 tokens, and a row 5"),
    ],
)
def test_what_cannot_be_packed(sample: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Packer(5)([[sample]])


# -- lengths ---------------------------------------------------------------------------------------


def test_lengths() -> None:
    assert [
        tokens_of(x)
        for x in ({"labels": [1], "input_ids": [1, 2]}, {"a": [1]}, ([1, 2, 3], 0), "four")
    ] == [
        2,
        1,
        3,
        4,
    ]
    with pytest.raises(
        UsageError, match="begins with\\) a int; give the dataset an attribute `lengths`"
    ):
        tokens_of((1, 2))
    assert Lengths([[1], [1, 2]]).values.tolist() == [1, 2]
    assert (
        Lengths(torch.utils.data.ConcatDataset([Sentences(), Sentences()])).values.tolist()
        == LENGTHS * 2
    )
    with pytest.raises(UsageError, match="metrics_path has lengths of shape"):
        Lengths([[1]], lambda: np.zeros(3)).values  # noqa: B018


def test_lengths_come_from_the_files_of_an_analysis(tmp_path: Path) -> None:
    (tmp_path / "seqlen").mkdir()
    np.save(tmp_path / "seqlen" / "seqlen_sample_to_metric.npy", np.asarray(LENGTHS) * 2)
    dynamic = {**TOKENS["dynamic_batching"], "metrics_path": str(tmp_path), "max_tokens": 52}
    assert _samples({"dynamic_batching": dynamic}) == _samples(TOKENS)


def _samples(sampling: Any, data: Any = None) -> list[int]:
    """Rows of the batches of one epoch."""
    engine, *_ = ds_core.initialize(
        model=Bigrams(),
        config=config(2, 1, sampling),
        training_data=Sentences() if data is None else data,
    )
    assert engine.training_dataloader is not None
    found = [len(batch["input_ids"]) for batch in engine.training_dataloader]
    engine.destroy()
    return found


# -- loss weights ----------------------------------------------------------------------------------


class Gives(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Any) -> Any:
        return self.output


class WithLoss:
    loss = torch.tensor(2.0)


class TakesIt(nn.Module):
    def forward(self, loss_weight: Any) -> Any:
        return loss_weight


def test_losses_are_weighed_wherever_the_model_has_them() -> None:
    two = torch.tensor(2.0)
    half = torch.tensor(0.5)
    for output, of in (
        (two, lambda out: out),
        ({"loss": two}, lambda out: out["loss"]),
        ((two, "logits"), lambda out: out[0]),
        (WithLoss(), lambda out: out.loss),
    ):
        model = weigh_losses(Gives(output), Undo())
        assert of(model(x=1, loss_weight=half)) == 1
    assert weigh_losses(Gives(two), Undo())(x=1) == 2
    assert weigh_losses(TakesIt(), Undo())(loss_weight=half) == 0.5
    with pytest.raises(UsageError, match="the model gives no loss"):
        weigh_losses(Gives(torch.zeros(3)), Undo())(x=1, loss_weight=half)


# -- what is refused -------------------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


@pytest.mark.parametrize(
    ("sampling", "data", "said"),
    [
        ({}, Stream(), "is an IterableDataset"),
        ({}, [], "training_data is empty"),
        (
            {"mixing": {"weights": {"a": 1}}},
            {"a": Sentences(), "b": Sentences()},
            "names a, and training_data has a, b",
        ),
        ({"mixing": {"weights": {"a": 1}}}, Sentences(), "must be a mapping"),
        ({"mixing": {"weights": {"0": 1, "1": 1}}}, [[1], []], "dataset '1' is empty"),
        (
            {"packing": {"enabled": True, "row_tokens": 9}},
            Sentences(),
            "samples have more than 9 tokens",
        ),
        (
            {"dynamic_batching": {"enabled": True, "max_tokens": 2}},
            Sentences(),
            "60 of 60 samples have more than 2",
        ),
        (
            {"loss_weights": "samples"},
            [(torch.zeros(3), 0)] * 8,
            "gives a list; let it return a dict",
        ),
    ],
)
def test_clear_errors(sampling: Any, data: Any, said: str) -> None:
    with pytest.raises(Exception, match=said):
        _samples(sampling, data)


def test_packing_makes_the_batches_itself() -> None:
    engine, *_ = ds_core.initialize(
        model=Bigrams(),
        config=config(2, 1, {"packing": {"enabled": True, "row_tokens": 16}}),
        training_data=Sentences(),
        collate_fn=list,
    )
    with pytest.raises(UsageError, match="collate_fn is given"):
        engine.train_batch()
    engine.destroy()


def test_an_optimizer_that_cannot_be_told() -> None:
    check_optimizer(None)
    with pytest.raises(
        UsageError, match=r"needs an optimizer that is a torch\.optim\.Optimizer, not a object"
    ):
        check_optimizer(object())


def test_samples_that_do_not_fit_are_left_out(caplog: Any) -> None:
    dynamic = {"enabled": True, "max_tokens": 26, "min_batch_size": 3}
    with caplog.at_level(logging.WARNING, "ds_data_sampling"):
        rows = _samples({"dynamic_batching": dynamic})
    fit = sum(length * 3 <= 26 for length in LENGTHS)
    assert 0 < fit < len(LENGTHS) and fit <= sum(rows) <= fit + 1
    assert f"{len(LENGTHS) - fit} of 60 samples have more than 8 tokens" in caplog.text


# -- following the engine --------------------------------------------------------------------------


def test_steps_follow_the_accumulation() -> None:
    """A step that is planned after gradient accumulation has changed has as many micro-batches, of
    samples not seen.
    """
    engine, *_ = ds_core.initialize(
        model=Bigrams(), config=config(2, 1, TOKENS), training_data=Sentences()
    )
    loader: Any = engine.training_dataloader
    engine.train_batch()
    engine.set_train_batch_size(6)  # gas 3
    seen = loader.samples_seen
    engine.train_batch()
    assert len(loader.state_dict()["window"][0]) == 3 == loader.state_dict()["done"]
    assert loader.state_dict()["step"] == 1
    assert loader.samples_seen - seen == sum(map(len, loader.state_dict()["window"][0]))
    engine.set_train_micro_batch_size(4)
    assert loader.batch_size == 4
    engine.train_batch()
    assert loader.state_dict()["step"] == 2
    assert engine.global_samples == loader.samples_seen
    engine.destroy()


def test_epochs_are_numbered() -> None:
    engine, *_ = ds_core.initialize(
        model=Bigrams(), config=config(2, 1, {"num_epochs": 2, **TOKENS}), training_data=Sentences()
    )
    loader: Any = engine.training_dataloader
    assert [len(list(loader)) > 0 for _ in range(3)] == [True, True, False]
    loader.set_epoch(1)
    with pytest.raises(UsageError, match="is empty"):
        for _ in range(len(LENGTHS)):
            engine.train_batch()
    engine.destroy()


def test_another_loaders_position_begins_its_epoch_anew(caplog: Any) -> None:
    engine, *_ = ds_core.initialize(
        model=Bigrams(), config=config(2, 1, TOKENS), training_data=Sentences()
    )
    loader: Any = engine.training_dataloader
    loader.load_state_dict({"epoch": 3, "batches": 4, "samples": 8})
    assert loader.state_dict()["epoch"] == 3 and "is another loader's" in caplog.text
    engine.destroy()


def test_workers_load_the_same_batches() -> None:
    def batches(workers: int) -> list[Any]:
        engine, *_ = ds_core.initialize(
            model=Bigrams(),
            config=config(2, 1, {"num_workers": workers, **TOKENS}),
            training_data=Sentences(),
        )
        loader: Any = engine.training_dataloader
        running = iter(RepeatingLoader(loader))
        found = []
        for _ in range(3):
            next(running)
        place = loader.state_dict()  # workers are ahead of it
        found += [next(running)["input_ids"].tolist() for _ in range(4)]
        other: Any = make_loader(engine.ctx, Sentences())
        other.load_state_dict(place)
        running = iter(other)
        assert [next(running)["input_ids"].tolist() for _ in range(4)] == found
        engine.destroy()
        return found

    assert batches(2) == batches(0)


def test_other_routes_are_the_cores() -> None:
    engine, *_ = ds_core.initialize(
        model=Bigrams(), config=config(2, 1, TOKENS), training_data=Sentences()
    )
    assert type(make_loader(engine.ctx, Sentences(), route="eval")).__name__ == "DistributedLoader"
    engine.destroy()


def test_epochs_are_logged(caplog: Any) -> None:
    dynamic = {**TOKENS["dynamic_batching"], "verbose": True}
    with caplog.at_level(logging.INFO, "ds_data_sampling"):
        rows = _samples({"dynamic_batching": dynamic})
    assert (
        f"epoch 0 of the training data: {len(rows) // 2} steps of {len(rows)} micro-batches, "
        in caplog.text
    )
    assert f"{sum(rows)} samples, " in caplog.text


def test_an_elastic_run(ranks: Any) -> None:
    """The section elasticity leaves the data to this one; micro-batches of two ranks are of another
    size.
    """
    pytest.importorskip("ds_elasticity")
    wanted = _elastic()
    assert len(set(wanted)) == 4
    for losses in ranks(2, _elastic):
        assert losses == pytest.approx(wanted, rel=1e-5)


def _elastic() -> list[float]:
    settings = config(2, 1, {})
    del settings["train_micro_batch_size_per_gpu"], settings["gradient_accumulation_steps"]
    settings["elasticity"] = {
        "enabled": True,
        "max_train_batch_size": 8,
        "micro_batch_sizes": [2, 4, 8],
        "max_gpus": 2,
        "version": 0.1,
    }
    engine, *_ = ds_core.initialize(model=Bigrams(), config=settings, training_data=OfOneLength())
    losses = [float(engine.train_batch()) for _ in range(4)]
    engine.destroy()
    return losses
