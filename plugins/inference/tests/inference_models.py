"""Small models of transformers with random weights that are the same in every process."""

from __future__ import annotations

from typing import Any

import torch
from ds_testing.truth import tiny
from torch import Tensor

VOCABULARY = 66


SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 2, "max_position_embeddings": 64}
KEYS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "bert": {"auto": "AutoModelForMaskedLM"},
    "opt": {"ffn_dim": 20, "word_embed_proj_dim": 24},
}


def make(kind: str, **more: Any) -> Any:
    """A causal language model, or BERT with its head."""
    model = tiny(kind, seed=5, **{"use_cache": True, **SIZES, **KEYS.get(kind, {}), **more}).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0, 0.2 if param.dim() > 1 else 0.1)
    return model


def ids(rows: int = 2, length: int = 9) -> Tensor:
    """Prompts."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(7))
