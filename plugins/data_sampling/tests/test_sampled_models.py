"""Sampled batches with pipelines and with transformers' models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from ds_data_sampling.batching.collate import Packer
from ds_data_sampling.batching.packed_models import leave_out_cache
from sampling_runs import LENGTHS, WORDS, Run, Sentences, config, filled, sentence
from torch import Tensor, nn

import ds_core
from ds_core.undo import Undo


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Embedding(WORDS, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, WORDS)]


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def pairs(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """A pipeline's micro-batch: the tokens, and those that follow."""
    fill: dict[str, Any] = {"batch_first": True}
    inputs = [s["input_ids"][:-1] for s in samples]
    labels = [s["labels"][1:] for s in samples]
    padded = nn.utils.rnn.pad_sequence(labels, padding_value=-100, **fill)
    return nn.utils.rnn.pad_sequence(inputs, **fill), padded


DYNAMIC = {"dynamic_batching": {"enabled": True, "max_tokens": 26}}


def staged(stages: int) -> list[float]:
    """Losses of four steps; the learning rate follows the batch on all stages, of which the middle
    reads no data.
    """
    from ds_pipeline import PipelineModule

    model = PipelineModule(layers(), num_stages=stages, loss_fn=loss_fn, partition_method="uniform")
    settings = config(4, 1, DYNAMIC)
    engine, *_ = ds_core.initialize(
        model=model, config=settings, training_data=Sentences(), collate_fn=pairs
    )
    losses = [float(engine.train_batch()) for _ in range(4)]
    engine.destroy()
    return losses


def by_hand() -> list[float]:
    model = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for number, micros in enumerate(_micros(4)):
        found = []
        for micro in micros:
            inputs, labels = pairs(
                [{"input_ids": sentence(i), "labels": sentence(i)} for i in micro]
            )
            found.append(loss_fn(model(inputs), labels))
        loss = torch.stack(found).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.5 * 0.9**number * sum(map(len, micros)) / 8
        optimizer.step()
        losses.append(loss.item())
    return losses


def _micros(steps: int) -> list[list[list[int]]]:
    """The samples of `filled`, micro-batch by micro-batch."""
    return [filled(26, 1, steps * 4, seed=3)[k * 4 : k * 4 + 4] for k in range(steps)]


def test_the_learning_rate_follows_in_a_pipeline(ranks: Any) -> None:
    pytest.importorskip("ds_pipeline")
    for losses in ranks(3, staged, 3):
        assert losses == pytest.approx(by_hand(), rel=1e-5)


def test_loss_weights_are_refused_in_a_pipeline() -> None:
    PipelineModule = pytest.importorskip("ds_pipeline").PipelineModule

    model = PipelineModule(layers(), num_stages=1, loss_fn=loss_fn)
    engine, *_ = ds_core.initialize(
        model=model,
        config=config(4, 1, {**DYNAMIC, "loss_weights": "tokens"}),
        training_data=Sentences(),
    )
    with pytest.raises(Exception, match=r"data_sampling\.loss_weights: .*; set it to none"):
        engine.train_batch()
    engine.destroy()


# -- transformers ----------------------------------------------------------------------------------


def small(family: str) -> Any:
    import transformers

    torch.manual_seed(1)
    shape = {"vocab_size": WORDS, "max_position_embeddings": 64}
    if family == "gpt2":
        made = transformers.GPT2Config(
            vocab_size=WORDS,
            n_positions=64,
            n_embd=16,
            n_layer=2,
            n_head=2,
            attn_pdrop=0,
            embd_pdrop=0,
            resid_pdrop=0,
        )
        return transformers.GPT2LMHeadModel(made)
    made = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, **shape
    )
    return transformers.LlamaForCausalLM(made)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_packed_rows_are_samples_of_their_own(family: str) -> None:
    """Logits and losses of packed rows are those of each sample alone."""
    pytest.importorskip("transformers")
    model = leave_out_cache(small(family).eval(), Undo())
    rows = [[0, 1, 4], [2, 3]]
    batch = Packer(40)([[Sentences()[i] for i in row] for row in rows])
    out = model(**batch)
    total = 0.0
    for row, indices in enumerate(rows):
        first = 0
        for index in indices:
            tokens = sentence(index)[None]
            alone = model(input_ids=tokens, labels=tokens)
            part = out.logits[row, first : first + LENGTHS[index]]
            torch.testing.assert_close(part, alone.logits[0], rtol=1e-4, atol=1e-5)
            total += alone.loss.item() * (LENGTHS[index] - 1)
            first += LENGTHS[index]
    assert out.loss.item() == pytest.approx(
        total / sum(LENGTHS[i] - 1 for row in rows for i in row), rel=1e-5
    )


def tuned(settings: dict[str, Any]) -> Run:
    engine, *_ = ds_core.initialize(
        model=small("llama"), config=settings, training_data=Sentences()
    )
    losses = [float(engine.train_batch()) for _ in range(3)]
    engine.destroy()
    return losses, {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packing", "packing with sequence parallel", "tokens"])
def test_transformers_on_two_ranks(ranks: Any, kind: str) -> None:
    """An unchanged Llama: losses of one process, with the mean over all tokens that are
    predicted."""
    pytest.importorskip("transformers")
    pytest.importorskip("ds_sequence_parallel" if kind.endswith("parallel") else "ds_zero")
    packing = {"packing": {"enabled": True, "row_tokens": 32}}
    sampling = {**(DYNAMIC if kind == "tokens" else packing), "loss_weights": "targets"}
    wanted, _ = tuned(config(4, 1, sampling))
    if kind.endswith("parallel"):
        settings = config(4, 1, sampling, sequence_parallel_size=2)
    else:
        settings = config(4, 2, sampling, zero_optimization={"stage": 3})
    for losses, _ in ranks(2, tuned, settings):
        assert losses == pytest.approx(wanted, rel=1e-4)
