"""Modules that run themselves under the scheduler's steps: greedy texts equal those of plain
torch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ds_inference.run.eager import Eager
from ds_inference_kit.step import BLOCK, KVCache, Step
from ds_testing.truth import tiny
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"
WORDS = 61
NEW = 6
PROMPTS = [[7, 3, 9, 44, 5, 1, 8, 2, 60, 11, 4], [5, 6], list(range(1, 40))]


class Plain(nn.Module):
    """Causal, without a cache: each token says something of the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.head = nn.Linear(16, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        out: Tensor = self.head(
            torch.tanh(h.cumsum(1) / torch.arange(1, h.shape[1] + 1)[:, None] + h)
        )
        return out


_SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4}
_LLAMA = _SIZES | {"intermediate_size": 48, "num_key_value_heads": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA | {"max_position_embeddings": 128}),
    "window": ("mistral", _LLAMA | {"max_position_embeddings": 128, "sliding_window": 5}),
    "gpt2": ("gpt2", _SIZES | {"max_position_embeddings": 128}),
    "bloom": ("bloom", _SIZES),
    "mamba": ("mamba", {"hidden_size": 16, "intermediate_size": 32, "state_size": 4}),
}


def model_of(kind: str) -> Any:
    if kind == "plain":
        torch.manual_seed(3)
        return Plain()
    family, keys = KINDS[kind]
    keys = {"vocab_size": WORDS, "eos_token_id": None, "pad_token_id": 0, "use_cache": True} | keys
    model = tiny(family, seed=3, **keys).eval()
    for param in model.parameters():
        param.data.normal_(0, 0.3)
    return model


@torch.no_grad()
def truth(model: Any, prompt: Sequence[int]) -> list[int]:
    """One text at a time, the whole of it for each token."""
    text = list(prompt)
    for _ in range(NEW):
        out = model(torch.tensor([text]))
        text.append(int(getattr(out, "logits", out)[0, -1].argmax()))
    return text[len(prompt) :]


def step_of(texts: Sequence[list[int]], counts: Sequence[int], tables: Tensor) -> Step:
    """The last `counts` tokens of each text; of each its last row is wanted."""
    starts = [0, *itertools.accumulate(counts)]
    tokens = [t for text, n in zip(texts, counts, strict=True) for t in text[len(text) - n :]]
    positions = [
        p for text, n in zip(texts, counts, strict=True) for p in range(len(text) - n, len(text))
    ]
    return Step(
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([len(t) for t in texts], dtype=torch.int32),
        tables,
        torch.tensor(starts[1:]) - 1,
    )


def texts_of(model: Any, together: bool) -> list[list[int]]:
    """Prompts in two parts, the second one with the first tokens of another text beside it."""
    eager = Eager(model, together=together)
    p = eager.program
    cache = KVCache.make(p.layers, 8, p.kv_heads, p.head_dim, p.dtype)
    cache.keys.fill_(torch.nan)
    tables = torch.tensor([[6, 1], [3, 0], [5, 2]], dtype=torch.int32)
    assert max(map(len, PROMPTS)) + NEW <= 2 * BLOCK
    texts = [list(prompt) for prompt in PROMPTS]
    eager(step_of([texts[0][:6], texts[2][:35]], [6, 35], tables[[0, 2]]), cache)
    counts = [len(texts[0]) - 6, len(texts[1]), len(texts[2]) - 35]
    for _ in range(NEW):
        rows = eager(step_of(texts, counts, tables), cache)
        assert rows.shape == (3, WORDS)
        for text, row in zip(texts, rows, strict=True):
            text.append(int(row.argmax()))
        counts = [1, 1, 1]
    return [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]


@pytest.mark.parametrize(
    ("kind", "together"),
    [
        ("llama", False),
        ("window", False),
        *((k, True) for k in ("plain", "llama", "window", "gpt2", "bloom", "mamba")),
    ],
)
def test_texts_equal_those_of_the_module(kind: str, together: bool) -> None:
    if kind != "plain":
        pytest.importorskip("transformers")
    model = model_of(kind)
    assert texts_of(model, together) == [truth(model, prompt) for prompt in PROMPTS]


def test_all_rows_and_no_cache() -> None:
    model = model_of("plain")
    text = PROMPTS[0]
    step = Step(
        torch.tensor(text, dtype=torch.int32),
        torch.arange(11, dtype=torch.int32),
        torch.tensor([0, 11], dtype=torch.int32),
        torch.tensor([11], dtype=torch.int32),
    )
    assert torch.equal(Eager(model)(step), model(torch.tensor([text]))[0])
