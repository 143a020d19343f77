"""Training by a curriculum: as plain torch with the same samples, on any number of ranks, also
resumed on others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ds_data_sampling.batching.order import make_order
from ds_data_sampling.config import DataEfficiency
from ds_data_sampling.curricula.seqlen import truncate
from ds_testing.pytest_plugin import Ranks
from ds_testing.truth import start
from torch import Tensor, nn

import ds_core
from ds_core import comm

# an epoch has ten steps
VOCABULARY = 11
LENGTH = 12
SIZE = 40
BATCH = 4
STEPS = 13


class Data:
    """Samples of one length; sample i is as hard as RANKS says."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(
            0, VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index)
        )
        return {"ids": ids[:-1], "labels": ids[1:], "index": torch.tensor(index)}


HARDNESS = np.random.RandomState(0).permutation(SIZE)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(ids).cumsum(1)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.save(tmp_path / "samples.npy", np.argsort(HARDNESS))
    return tmp_path


def config(folder: Path, **more: Any) -> dict[str, Any]:
    easy = {
        "index_to_sample_path": str(folder / "samples.npy"),
        "difficulty_type": "percentile",
        "clustering_type": "schedule_based",
        "min_difficulty": 20,
        "max_difficulty": 100,
        "schedule_type": "fixed_root",
        "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 10, "root_degree": 2},
    }
    short = {
        "clustering_type": "single_cluster",
        "min_difficulty": 4,
        "max_difficulty": 12,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [4, 8, 12], "max_step": [3, 6]},
    }
    curriculum = {"enabled": True, "curriculum_metrics": {"easy": easy, "short": short}}
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}},
        "data_efficiency": {
            "enabled": True,
            "seed": 11,
            "data_sampling": {"enabled": True, "curriculum_learning": curriculum},
        },
        **more,
    }


def shorten(batch: dict[str, Tensor], state: dict[str, Any]) -> dict[str, Tensor]:
    """What Megatron-DeepSpeed's function does."""
    cut: dict[str, Tensor] = truncate(batch, state["current_difficulties"]["short"])
    return cut


def plainly(folder: Path) -> tuple[list[float], list[list[int]], dict[str, Tensor]]:
    """Plain torch in one process, with the samples of the order: losses, samples of steps,
    weights."""
    section = DataEfficiency.model_validate(config(folder)["data_efficiency"])
    order = make_order(section, SIZE)
    net = Net()
    data = Data()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1)
    losses = []
    taken = []
    for step in range(STEPS):
        if step % (SIZE // BATCH) == 0:
            order.start(step // (SIZE // BATCH))
        taken.append(order.take(BATCH, step))
        length = (4, 4, 4, 8, 8, 8)[step] if step < 6 else 12
        batch = torch.utils.data.default_collate([data[i] for i in taken[-1]])
        loss = net(batch["ids"][:, :length], batch["labels"][:, :length])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, taken, {name: p.detach().clone() for name, p in net.named_parameters()}


def difficulties(engine: Any) -> dict[str, float]:
    """What monitors are told."""
    answers = engine.ctx.plugins.ask("ds_metrics", ctx=engine.ctx, step=engine.global_steps - 1)
    told = {name: float(value) for answer in answers for name, value in answer.value.items()}
    return {name: value for name, value in told.items() if name.startswith("Train/Curriculum/")}


def losses_and_samples(engine: Any, count: int) -> tuple[list[float], list[list[int]]]:
    """Mean losses and samples of `count` steps, over all ranks."""
    gas = engine.gradient_accumulation_steps()
    world = comm.world_size()
    losses = []
    taken = []
    batches = ds_core.RepeatingLoader(engine.training_dataloader)
    for _ in range(count):
        total = torch.zeros(())
        seen = []
        for _ in range(gas):
            batch = next(batches)
            seen.append(int(batch.pop("index")))
            loss = engine(**batch)
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / gas
        comm.all_reduce(total)
        losses.append(total.item() / world)
        gathered = comm.all_gather_json(seen)
        taken.append(sorted(i for each in gathered for i in each))
    return losses, taken


def engine_of(folder: Path, more: dict[str, Any]) -> Any:
    engine = start(Net(), training_data=Data(), **config(folder, **more))
    engine.set_data_post_process_func(shorten)
    return engine


def weights(engine: Any) -> dict[str, Tensor]:
    from ds_zero import GatheredParameters

    with GatheredParameters(list(engine.module.parameters())):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def check(folder: Path, more: dict[str, Any]) -> None:
    losses, taken, state = plainly(folder)
    engine = engine_of(folder, more)
    found, seen = losses_and_samples(engine, STEPS)
    assert difficulties(engine) == {"Train/Curriculum/easy": 100.0, "Train/Curriculum/short": 12.0}
    assert seen == [sorted(step) for step in taken]
    assert found == pytest.approx(losses, rel=2e-5)
    for name, value in weights(engine).items():
        torch.testing.assert_close(value, state[name], rtol=1e-3, atol=1e-4)
    engine.destroy()


def stages(folder: Path, which: list[int]) -> None:
    for stage in which:
        check(folder, {"zero_optimization": {"stage": stage}})


def test_one_process_trains_as_plain_torch(folder: Path) -> None:
    stages(folder, [0])


def test_two_ranks_train_as_plain_torch(folder: Path, ranks: Ranks) -> None:
    ranks(2, stages, folder, [0, 3])


@pytest.mark.slow
def test_four_ranks_train_as_plain_torch(folder: Path, ranks: Ranks) -> None:
    ranks(4, stages, folder, [0, 1, 2, 3])


def begin(folder: Path) -> tuple[list[float], list[list[int]]]:
    engine = engine_of(folder, {"zero_optimization": {"stage": 2}})
    found = losses_and_samples(engine, 5)
    engine.save_checkpoint(str(folder / "saved"))
    engine.destroy()
    return found


def go_on(folder: Path) -> tuple[list[float], list[list[int]]]:
    engine = engine_of(folder, {"zero_optimization": {"stage": 1}})
    engine.load_checkpoint(str(folder / "saved"))
    found = losses_and_samples(engine, STEPS - 5)
    engine.destroy()
    return found


@pytest.mark.parametrize(("first", "second"), [(1, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_it_goes_on_at_another_world_size(
    folder: Path, ranks: Ranks, first: int, second: int
) -> None:
    losses, taken, _ = plainly(folder)
    begun = begin(folder) if first == 1 else ranks(first, begin, folder)[0]
    done = go_on(folder) if second == 1 else ranks(second, go_on, folder)[0]
    assert begun[1] + done[1] == [sorted(step) for step in taken]
    assert begun[0] + done[0] == pytest.approx(losses, rel=2e-5)


def bf16(folder: Path) -> tuple[list[float], list[list[int]]]:
    engine = engine_of(folder, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}})
    found = losses_and_samples(engine, STEPS)
    engine.destroy()
    return found


@pytest.mark.slow
def test_bf16(folder: Path, ranks: Ranks) -> None:
    losses, taken = bf16(folder)
    for size in (2, 4):
        found, seen = ranks(size, bf16, folder)[0]
        assert seen == taken and found == pytest.approx(losses, rel=3e-2)


def in_a_pipeline(folder: Path) -> list[float]:
    from ds_pipeline import PipelineModule

    net = Net()

    class Sum(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.cumsum(1)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def pairs(batch: dict[str, Tensor], state: dict[str, Any]) -> tuple[Tensor, Tensor]:
        batch = shorten(batch, state)
        return batch["ids"], batch["labels"]

    pipe = PipelineModule(
        [net.embed, Sum(), net.head], num_stages=2, loss_fn=loss, partition_method="uniform"
    )
    engine, *_ = ds_core.initialize(model=pipe, config=config(folder), training_data=Data())
    engine.set_data_post_process_func(pairs)
    found = [engine.train_batch().item() for _ in range(STEPS)]
    engine.destroy()
    return found


@pytest.mark.slow
def test_in_a_pipeline(folder: Path, ranks: Ranks) -> None:
    losses, _, _ = plainly(folder)
    for found in ranks(2, in_a_pipeline, folder):
        assert found == pytest.approx(losses, rel=2e-5)
