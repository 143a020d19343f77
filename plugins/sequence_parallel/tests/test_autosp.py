"""AutoSP: models that know nothing of it train as one process does, with divided by a pass over
their graph.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from ds_testing.truth import difference, plain
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent))

from ds_sequence_parallel import prepare_autosp_inputs
from sp_models import batch, make_model

AUTOSP = {"compile": {"deepcompile": True, "passes": ["autosp"]}}
LENGTH = 12
STEPS = 3
SGD = {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}


class Own(nn.Module):
    """Hand-written attention with fewer key-value heads; a pooled head; positions, masks and losses
    of all kinds.
    """

    def __init__(self, heads: int = 4, keys: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.keys = keys
        self.words = nn.Embedding(32, 8)
        self.places = nn.Embedding(16, 8)
        self.q = nn.Linear(8, 4 * heads)
        self.kv = nn.Linear(8, 8 * keys)
        self.out = nn.Linear(4 * heads, 8)
        self.norm = nn.LayerNorm(8)
        self.near = nn.Conv1d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 32)
        self.pooled = nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        size, length = input_ids.shape
        x = self.words(input_ids) + self.places(torch.arange(length, device=input_ids.device))
        q = self.q(self.norm(x)).view(size, length, self.heads, 4).transpose(1, 2)
        k, v = self.kv(x).view(size, length, 2, self.keys, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mask = (input_ids != 0)[:, None, None, :] & torch.ones(
            length, length, dtype=torch.bool
        ).tril()
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + self.out(out.transpose(1, 2).reshape(size, length, -1))
        x = x + self.near(x.transpose(1, 2)).transpose(1, 2)
        tokens = self.head(x[:, :-1]).flatten(0, 1)
        loss = functional.cross_entropy(tokens, labels[:, 1:].flatten())
        per_token = functional.cross_entropy(self.head(x).transpose(1, 2), labels, reduction="none")
        first = self.pooled(x[:, 0] + x.mean(1)).square().mean()
        result: Tensor = loss + first + x.square().mean() + per_token.sum(1).mean() + x.sum() / 100
        return result


def make(kind: str) -> Any:
    if not kind.startswith("own"):
        return make_model(kind, "sdpa")
    torch.manual_seed(0)
    return (Own(3, 1) if kind == "own-uneven" else Own()).double()


def given(kind: str, step: int) -> dict[str, Tensor]:
    if not kind.startswith("own"):
        return batch(step, LENGTH, "padded" if kind == "qwen2" else "plain") | {"use_cache": False}  # type: ignore[dict-item]
    made = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 32, (2, LENGTH), generator=made)
    return {"input_ids": ids, "labels": torch.where(ids % 5 == 0, -100, ids)}


def loss_of(output: Any) -> Tensor:
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


def truth(kind: str) -> tuple[list[float], Any]:
    model = make(kind)
    return plain(model, lambda step, _: given(kind, step), STEPS, optimizer=SGD), model


def divided(kind: str, stage: int, ranks: int) -> tuple[int, int]:
    """Trains with sequences divided over all ranks; graphs and graph breaks."""
    from torch._dynamo.utils import counters

    import ds_core

    torch._dynamo.reset()
    counters.clear()
    config = AUTOSP | {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        **({"sequence_parallel_size": ranks} if stage else {}),
        "optimizer": SGD,
        "zero_optimization": {
            "stage": stage,
            **({"param_persistence_threshold": 0} if stage == 3 else {}),
        },
    }
    # Two ways to say the size: the key, and mesh_param alone.
    engine, *_ = ds_core.initialize(
        model=make(kind), config=config, mesh_param=None if stage else (1, ranks)
    )
    assert engine.ctx.mesh.size("sp") == ranks
    engine.compile("aot_eager")
    losses = []
    for step in range(STEPS):
        inputs = given(kind, step)
        inputs["input_ids"] = prepare_autosp_inputs(
            inputs["input_ids"],
            inputs["labels"],
            inputs.get("position_ids"),
            inputs.get("attention_mask"),
        )
        loss = loss_of(engine(**inputs))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.destroy()
    wanted, model = truth(kind)
    bound = 1e-12 if kind.startswith("own") else 1e-6  # transformers' losses are in fp32
    assert difference(losses, wanted) < bound, (losses, wanted)
    assert difference(engine.module, model) < bound
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


_slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "stage", "ranks"),
    [
        ("own", 0, 2),
        *(pytest.param("llama", stage, 2, marks=_slow) for stage in (0, 1, 2, 3)),
        *(
            pytest.param(kind, 0, ranks, marks=_slow)
            for kind, ranks in (("qwen2", 2), ("own-uneven", 2), ("own", 4))
        ),
    ],
)
def test_it_trains_as_one_process(kind: str, stage: int, ranks: int) -> None:
    if not kind.startswith("own"):
        pytest.importorskip("transformers")
    for graphs, breaks in run_ranks(ranks, divided, kind, stage, ranks):
        assert (graphs, breaks) == (1, 0)


def undivided() -> None:
    """Without a size each rank has whole sequences of its own, as with DeepSpeed; the log says that
    nothing is cut.
    """
    import ds_core
    from ds_core import comm

    torch._dynamo.reset()
    said: list[str] = []
    watch = logging.Handler()
    watch.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_sequence_parallel").addHandler(watch)
    config = AUTOSP | {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}}
    engine, *_ = ds_core.initialize(model=make("own"), config=config)
    engine.compile("aot_eager")
    inputs = given("own", comm.rank())
    prepare_autosp_inputs(inputs["input_ids"], inputs["labels"])
    assert torch.allclose(engine(**inputs), make("own")(**inputs), rtol=0, atol=1e-12)
    assert len(said) == (comm.rank() == 0)
    assert all("autosp has no effect without sequence_parallel_size" in text for text in said)
    engine.destroy()


@pytest.mark.slow
def test_without_a_size_nothing_is_divided() -> None:
    run_ranks(2, undivided)


# -- errors ----------------------------------------------------------------------------------------


def test_inputs_that_do_not_fit() -> None:
    ids = torch.ones(2, 8, dtype=torch.long)
    with pytest.raises(ValueError, match="label_id is missing"):
        prepare_autosp_inputs(ids, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="input_id is missing"):
        prepare_autosp_inputs(None, ids)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seq_dim 2 is no dimension"):
        prepare_autosp_inputs(ids, ids, seq_dim=2)
    with pytest.raises(ValueError, match=r"attention_mask of shape \(2, 7\)"):
        prepare_autosp_inputs(ids, ids.clone(), attention_mask=ids[:, 1:])
    mask = torch.ones(2, 1, 8, 8)
    assert prepare_autosp_inputs(ids, ids.clone(), ids.clone(), mask) is ids


class NoAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 8)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = functional.cross_entropy(
            self.words(input_ids).flatten(0, 1), labels.flatten() % 8
        )
        return loss


def refused() -> None:
    import ds_core

    config = AUTOSP | {"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2}
    engine, *_ = ds_core.initialize(
        model=NoAttention(), config=config | {"optimizer": {"type": "SGD"}}
    )
    engine.compile("aot_eager")
    ids = torch.ones(2, 8, dtype=torch.long)
    labels = torch.ones(2, 8, dtype=torch.long)
    with pytest.raises(RuntimeError, match="no input of the graph is marked"):
        engine(ids, labels)
    with pytest.raises(ValueError, match="7 positions, which do not divide over the 2 ranks"):
        prepare_autosp_inputs(ids[:, 1:], labels[:, 1:])
    torch._dynamo.reset()
    with pytest.raises(
        RuntimeError, match="has no torch.nn.functional.scaled_dot_product_attention"
    ):
        engine(prepare_autosp_inputs(ids, labels), labels)
    engine.destroy()


def test_graphs_without_marks_or_attention() -> None:
    run_ranks(2, refused)


def recomputed() -> None:
    import ds_core

    config = AUTOSP | {
        "train_micro_batch_size_per_gpu": 2,
        "sequence_parallel_size": 2,
        "optimizer": {"type": "SGD"},
    }
    engine, *_ = ds_core.initialize(
        model=make("llama"), config=config | {"activation_checkpointing": {"modules": "auto"}}
    )
    engine.compile("aot_eager")
    inputs = given("llama", 0)
    prepare_autosp_inputs(inputs["input_ids"], inputs["labels"])
    with pytest.raises(RuntimeError, match="attention is in blocks that are computed again"):
        engine(**inputs)
    engine.destroy()


@_slow
def test_blocks_that_are_computed_again() -> None:
    pytest.importorskip("transformers")
    run_ranks(2, recomputed)
