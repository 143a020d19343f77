"""Models of transformers computed in tiles by config alone, under every stage of ZeRO; the truth
has no tiles.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from ds_testing.truth import same, start, tiny, whole_weights
from torch import nn

WORDS = 53
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "eos_token_id": None,
    "use_cache": True,
}
LLAMA = {"intermediate_size": 28, "num_attention_heads": 4, "num_key_value_heads": 4}
KEYS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied": LLAMA | {"tie_word_embeddings": True},
    "gemma2": LLAMA | {"head_dim": 4, "num_key_value_heads": 2},
    "bloom": {"num_hidden_layers": 1, "num_attention_heads": 2},
    "gpt2": {
        "num_attention_heads": 2,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
}
STEPS = 2
TILES = {"tiled_mlp": {"shards": 3}, "tiled_loss": {"shards": 4}}


def model_of(kind: str) -> Any:
    family = "llama" if kind == "tied" else kind
    return tiny(family, seed=5, **SIZES | KEYS[kind]).double().train()


def batch(step: int, rank: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(WORDS, (2, 11), generator=random)
    labels = ids.clone()
    labels[0, : 3 + rank] = -100
    return {"input_ids": ids, "labels": labels}


def losses_weights_gathers(kind: str, sections: dict[str, Any], stage: int) -> Any:
    """And how many messages gathered weights in the last step."""
    from ds_testing import Traffic

    from ds_core import comm

    model = model_of(kind)
    engine = start(
        model,
        gas=2,
        clip=0.5,
        optimizer={"type": "AdamW", "params": {"lr": 0.01}},
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
        plugins={"require": ["dscore-sequence-parallel"]},
        **sections,
    )
    losses = []
    gathered = 0
    with Traffic() as traffic:
        for step in range(STEPS):
            for micro in range(2):
                traffic.sent.clear()
                loss = engine(**batch(2 * step + micro, comm.rank())).loss
                engine.backward(loss)
                gathered = sum("gather" in one.op for one in traffic.sent)
                losses.append(loss.item())
            engine.step()
    weights = whole_weights(engine)
    engine.destroy()
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert type(model.loss_function).__name__ == "function"
    return losses, weights, gathered


@pytest.mark.fast_cases("tied-3")
@pytest.mark.parametrize(("kind", "stage"), [("tied", 3), ("gemma2", 0)])
def test_training(kind: str, stage: int) -> None:
    pytest.importorskip("transformers")
    check(kind, stage)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2", "tied", "bloom"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_of_every_stage(kind: str, stage: int) -> None:
    pytest.importorskip("transformers")
    check(kind, stage)


def check(kind: str, stage: int) -> None:
    """Equal losses and weights, and under stage 3 no more gathers than without tiles."""
    wanted = run_ranks(2, losses_weights_gathers, kind, {}, stage)
    found = run_ranks(2, losses_weights_gathers, kind, {"sequence_parallel": TILES}, stage)
    for (losses, weights, gathers), (true_losses, true_weights, most) in zip(
        found, wanted, strict=True
    ):
        # transformers computes losses in fp32
        assert losses == pytest.approx(true_losses, rel=1e-6)
        same(weights, true_weights, 1e-6)
        assert gathers <= most + (stage == 3), (gathers, most)


def one(model: Any, **section: Any) -> Any:
    return start(model, sequence_parallel=section)


@pytest.mark.usefixtures("clean_ds")
def test_logits_are_there_for_who_wants_them(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("transformers")
    model = model_of("gemma2")
    plain = model_of("gemma2")
    engine = one(model, tiled_loss={"tile_bytes": 2000})
    out = engine(**batch(0, 0))
    wanted = plain(**batch(0, 0))
    assert "not computed" in repr(out.logits)
    assert out.logits.shape == wanted.logits.shape
    assert "logits are used" not in caplog.text
    torch.testing.assert_close(out.logits.softmax(-1), wanted.logits.softmax(-1))
    assert "logits are used beside the loss (by softmax)" in caplog.text
    with torch.no_grad():
        torch.testing.assert_close(engine(**batch(0, 0)).loss, wanted.loss)
        ids = batch(0, 0)["input_ids"]
        torch.testing.assert_close(engine(input_ids=ids).logits, wanted.logits)
        torch.testing.assert_close(
            engine(**batch(0, 0), num_items_in_batch=7).loss, wanted.loss * 18 / 7
        )
    engine.destroy()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ffn(x).sum()


class Sorted(nn.Module):
    """A layer whose MLPs are given all rows in an order of its own, as those of experts are."""

    ds_rows_together = True

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x.flip(0)).sum()  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)  # type: ignore[no-any-return]


@pytest.mark.usefixtures("clean_ds")
def test_rows_that_belong_together_are_not_cut() -> None:
    from ds_core.errors import UsageError

    with pytest.raises(UsageError, match=r"tiled_mlp.modules: .*but for those of experts"):
        one(Sorted(), tiled_mlp={})
    engine = one(nn.Sequential(MLP(), Sorted()), tiled_mlp={"shards": 2})
    assert "forward" in vars(engine.module[0])
    assert "forward" not in vars(engine.module[1].mlp)
    engine.destroy()


@pytest.mark.usefixtures("clean_ds")
def test_models_that_cannot_be_tiled() -> None:
    from ds_core.errors import ConfigError, UsageError

    with pytest.raises(
        UsageError, match="no class of the model is called an MLP; name some of Plain, Sequential"
    ):
        one(Plain(), tiled_mlp={})
    with pytest.raises(
        UsageError,
        match=r"tiled_loss is for causal language models of the transformers library, and Plain has no",
    ):
        one(Plain(), tiled_loss={})
    with pytest.raises(
        UsageError, match=r"tiled_mlp.modules: no module of the model is called 'ffm'"
    ):
        one(Plain(), tiled_mlp={"modules": ["ffm"]})
    with pytest.raises(ConfigError, match=r"tiled_mlp.shards"):
        one(Plain(), tiled_mlp={"shards": 0})
    engine = one(model := Plain(), tiled_mlp={"modules": ["ffn"], "shards": 2})
    x = torch.randn(2, 5, 4)
    engine.backward(engine(x))
    engine.step()
    again = Plain()
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(engine(x), again(x))
    engine.destroy()
