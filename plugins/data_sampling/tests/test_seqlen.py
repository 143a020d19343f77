"""The section curriculum_learning: lengths that grow, given to the model or cut from its inputs, at
any world size.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_data_sampling.curricula.seqlen import truncate
from ds_testing.pytest_plugin import Ranks
from ds_testing.truth import plain, same, start, train, whole_weights
from torch import Tensor, nn

import ds_core
from ds_core.errors import UsageError

VOCABULARY = 11
LENGTH = 16
BATCH = 4
STEPS = 5
ADAMW = {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}}
SECTION: dict[str, Any] = {
    "enabled": True,
    "min_difficulty": 4,
    "max_difficulty": 16,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 4},
}
EXPECTED = [4, 8, 12, 16, 16]  # 4 + 12 · step / 4, rounded down to a multiple of 4, at most 16


class Plain(nn.Module):
    """Each token is told from those before it; the loss is the mean over all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.head = nn.Linear(6, VOCABULARY)
        self.lengths: list[int] = []

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.lengths.append(ids.shape[1])
        hidden = self.embed(ids).cumsum(1)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Told(Plain):
    """The same, and it cuts by itself, as models for DeepSpeed do."""

    def forward(self, ids: Tensor, labels: Tensor, curriculum_seqlen: int | None = None) -> Tensor:
        return super().forward(ids[:, :curriculum_seqlen], labels[:, :curriculum_seqlen])


def samples(step: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(
        0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step)
    )
    return ids[:, :-1], ids[:, 1:]


def model(kind: type[Plain]) -> Plain:
    torch.manual_seed(3)
    return kind()


def alone() -> tuple[list[float], Plain]:
    """Plain torch in one process: losses, and the network."""
    net = model(Plain)

    def batch(step: int, _: int) -> tuple[Tensor, ...]:
        return tuple(x[:, : EXPECTED[step]] for x in samples(step))

    return plain(net, batch, STEPS, optimizer=ADAMW), net


def config(**more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": ADAMW,
        "gradient_clipping": 0.0,
        "curriculum_learning": SECTION,
        **more,
    }


def trained(
    kind: type[Plain], more: dict[str, Any]
) -> tuple[list[float], list[int], dict[str, Tensor]]:
    """Losses of steps, lengths that the model saw, and the weights at the end."""
    net = model(kind)
    engine = start(net, **config(**more))
    gas = engine.gradient_accumulation_steps()
    told = []

    def batch(step: int, index: int) -> list[Tensor]:
        told.append(engine.curriculum_seqlen())  # type: ignore[attr-defined]
        return [x[index : index + 1] for x in samples(step)]

    losses = train(engine, batch, STEPS, loss=lambda model, x: model(x[0], labels=x[1]))
    assert told[::gas] == EXPECTED
    engine.eval()
    with torch.no_grad():
        engine(*samples(0))
    assert net.lengths.pop() == LENGTH  # evaluation is not cut
    state = whole_weights(engine)
    engine.destroy()
    return losses, net.lengths[::gas], state


def check(kind: type[Plain], more: dict[str, Any]) -> None:
    losses, net = alone()
    found, lengths, state = trained(kind, more)
    assert lengths == EXPECTED
    assert found == pytest.approx(losses, rel=1e-5)
    same(state, net, 1e-4, 1e-5)


def stages(kind: str) -> None:
    for stage in (0, 1, 2, 3):
        check(Told if kind == "told" else Plain, {"zero_optimization": {"stage": stage}})


@pytest.mark.parametrize("kind", [Plain, Told])
def test_one_process_trains_as_plain_torch(kind: type[Plain]) -> None:
    check(kind, {})


@pytest.mark.parametrize("kind", ["cut", "told"])
def test_two_ranks_train_as_plain_torch(ranks: Ranks, kind: str) -> None:
    ranks(2, stages, kind)


@pytest.mark.slow
def test_four_ranks_train_as_plain_torch(ranks: Ranks) -> None:
    ranks(4, stages, "cut")


def bf16() -> list[float]:
    return trained(Plain, {"bf16": {"enabled": True}})[0]


@pytest.mark.slow
def test_bf16_has_the_same_losses_on_any_number_of_ranks(ranks: Ranks) -> None:
    alone = bf16()
    assert ranks(2, bf16)[0] == pytest.approx(alone, rel=2e-2)
    assert ranks(4, bf16)[0] == pytest.approx(alone, rel=2e-2)


# -- the length of a step --------------------------------------------------------------------------


def test_it_goes_on_after_a_checkpoint(tmp_path: Any) -> None:
    engine, *_ = ds_core.initialize(model=model(Plain), config=config())
    for step in range(2):
        for place in range(BATCH):
            ids, labels = samples(step)
            engine.backward(engine(ids[place : place + 1], labels[place : place + 1]))
            engine.step()
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    net = model(Plain)
    engine, *_ = ds_core.initialize(model=net, config=config())
    assert engine.curriculum_seqlen() == 4
    engine.load_checkpoint(str(tmp_path))
    engine(*samples(2))
    assert net.lengths == [12] and engine.curriculum_seqlen() == 12
    engine.destroy()


def test_custom_schedules_and_metrics() -> None:
    section = SECTION | {"schedule_type": "custom", "schedule_config": {}}
    net = model(Plain)
    engine, *_ = ds_core.initialize(model=net, config=config(curriculum_learning=section))
    with pytest.raises(
        UsageError, match=r"set_custom_curriculum_learning_schedule\(\{'seqlen': function\}\)"
    ):
        engine(*samples(0))
    with pytest.raises(UsageError, match="called 'length'; there are: seqlen"):
        engine.set_custom_curriculum_learning_schedule({"length": int})
    engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 3 * step})
    engine(*samples(0))
    assert net.lengths == [3]
    answers = engine.ctx.plugins.ask("ds_metrics", ctx=engine.ctx, step=4)
    assert {"Train/Curriculum/seqlen": 15.0} in [answer.value for answer in answers]
    engine.destroy()


def test_switched_off_it_does_nothing() -> None:
    net = model(Told)
    engine, *_ = ds_core.initialize(
        model=net, config=config(curriculum_learning=SECTION | {"enabled": False})
    )
    engine(*samples(0))
    assert net.lengths == [LENGTH]
    with pytest.raises(UsageError, match="curriculum_learning is switched off"):
        engine.curriculum_seqlen()
    engine.destroy()


# -- truncation ------------------------------------------------------------------------------------


def test_what_is_cut() -> None:
    ids = torch.arange(16).view(2, 8)
    hidden = torch.zeros(2, 8, 8)
    batch = {
        "extra": torch.zeros(2, 5),
        "input_ids": ids,
        "attention_mask": torch.ones(2, 8),
        "position_ids": torch.arange(8)[None],
        "inputs_embeds": hidden,
        "mask3": torch.ones(2, 8, 8, dtype=torch.bool),
        "mask4": torch.zeros(2, 1, 8, 8),
        "weights": torch.ones(8),
        "nested": [(ids, "text"), None],
    }
    found = truncate(batch, 3)
    shapes = {
        name: tuple(value.shape) for name, value in found.items() if isinstance(value, Tensor)
    }
    assert shapes == {
        "extra": (2, 5),
        "input_ids": (2, 3),
        "attention_mask": (2, 3),
        "position_ids": (1, 3),
        "inputs_embeds": (2, 3, 8),
        "mask3": (2, 3, 3),
        "mask4": (2, 1, 3, 3),
        "weights": (8,),
    }
    assert torch.equal(found["input_ids"], ids[:, :3]) and found["nested"][0][0].shape == (2, 3)
    assert truncate(batch, 8) is batch and truncate("text", 2) == "text"
    assert truncate((ids, ids.float()), 2)[1].shape == (2, 2)


@pytest.mark.slow
def test_models_of_transformers() -> None:
    hf = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
    }
    net = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_attention_heads=2))
    ids = samples(0)[0]
    expected = net(input_ids=ids[:, :4], labels=ids[:, :4]).loss
    engine, *_ = ds_core.initialize(model=net.train(), config=config())
    found = engine(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    assert found.logits.shape[1] == 4
    torch.testing.assert_close(found.loss, expected)
    engine.destroy()


def pipelines() -> list[float]:
    from ds_pipeline import PipelineModule

    net = model(Plain)

    class Sum(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.cumsum(1)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        assert logits.shape[:2] == labels.shape
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    pipe = PipelineModule(
        [net.embed, Sum(), net.head], num_stages=2, loss_fn=loss, partition_method="uniform"
    )
    engine, *_ = ds_core.initialize(model=pipe, config=config(train_micro_batch_size_per_gpu=2))
    losses = []
    for step in range(STEPS):
        ids, labels = samples(step)
        micros = ((ids[i : i + 2], labels[i : i + 2]) for i in (0, 2))
        losses.append(engine.train_batch(micros).item())
    whole = ((ids[i : i + 2], labels[i : i + 2]) for i in (0, 2))
    engine.eval_batch(whole)
    engine.destroy()
    return losses


def test_pipelines(ranks: Ranks) -> None:
    losses, _ = alone()
    for found in ranks(2, pipelines):
        assert found == pytest.approx(losses, rel=1e-5)
