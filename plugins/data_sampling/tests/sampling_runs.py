"""Training that the tests compare: a small language model under a config, and the same by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import ds_core

WORDS = 12
LENGTHS = [3 + (7 * i) % 11 for i in range(60)]


class Bigrams(nn.Module):
    """Predicts each token from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 8)
        self.out = nn.Linear(8, WORDS)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
    ) -> dict[str, Tensor]:
        found = self.out(torch.tanh(self.embed(input_ids)))[:, :-1].flatten(0, 1)
        return {"loss": nn.functional.cross_entropy(found.float(), labels[:, 1:].flatten())}


def sentence(index: int) -> Tensor:
    return torch.randint(
        0, WORDS, (LENGTHS[index],), generator=torch.Generator().manual_seed(index)
    )


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sample i has LENGTHS[i] tokens."""

    lengths = LENGTHS

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": sentence(index), "labels": sentence(index)}


class OfOneLength(Sentences):
    """Samples of 12 tokens."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value.repeat(4)[:12] for name, value in super().__getitem__(index).items()}


def config(micros: int, world: int, sampling: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A run whose steps have `micros` micro-batches of 2 samples over all ranks."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micros // world,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "scheduler": {"type": "ExponentialLR", "params": {"gamma": 0.9}},
        "data_efficiency": {
            "enabled": True,
            "seed": 3,
            "data_sampling": {"enabled": True, **sampling},
        },
        **more,
    }


Run = tuple[list[float], dict[str, Tensor]]
"""The loss of each step, and the weights after them where this rank has them whole."""


def sampled_run(
    settings: Mapping[str, Any],
    steps: int,
    *,
    save: str | None = None,
    load: str | None = None,
    data: Any = None,
) -> Run:
    """`steps` steps under a config, from the checkpoint `load`, saved to `save`."""
    engine, *_ = ds_core.initialize(
        model=Bigrams(), config=dict(settings), training_data=Sentences() if data is None else data
    )
    try:
        if load:
            engine.load_checkpoint(load)
        losses = [float(engine.train_batch()) for _ in range(steps)]
        if save:
            engine.save_checkpoint(save)
        return losses, {
            name: p.detach().float().clone() for name, p in engine.module.named_parameters()
        }
    finally:
        engine.destroy()


def by_hand(steps: Iterable[Sequence[int]], lr: Sequence[float]) -> Run:
    """Training in plain torch: each step's loss is the mean over all tokens that its samples
    predict.
    """
    model = Bigrams()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for samples, rate in zip(steps, lr, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        rows = [sentence(i) for i in samples]
        total = sum(model(row[None], row[None])["loss"] * (len(row) - 1) for row in rows)
        loss = total / sum(len(row) - 1 for row in rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def filled(tokens: int, micros: int, steps: int, seed: int) -> list[list[int]]:
    """The samples of the first steps: micro-batches filled one after the other up to `tokens` with
    padding.
    """
    order = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(seed)).tolist()
    batches: list[list[int]] = [[]]
    for index in order:
        if (
            batches[-1]
            and max(LENGTHS[i] for i in [*batches[-1], index]) * (len(batches[-1]) + 1) > tokens
        ):
            batches.append([])
        batches[-1].append(index)
    return [
        [i for batch in batches[s * micros : (s + 1) * micros] for i in batch] for s in range(steps)
    ]
