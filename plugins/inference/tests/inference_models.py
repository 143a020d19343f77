"""Small models of transformers with random weights that are the same in every process."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 66


def settings(kind: str, **more: Any) -> Any:
    """The config of a small model."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as hf

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    llama = common | {
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    }
    if kind == "gpt2":
        return hf.GPT2Config(
            **common | {"n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": 64} | more
        )
    if kind == "mixtral":
        return hf.MixtralConfig(**llama | {"num_local_experts": 4, "num_experts_per_tok": 2} | more)
    if kind == "bert":
        sizes = {
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "intermediate_size": 20,
        }
        return hf.BertConfig(**common | sizes | {"max_position_embeddings": 64} | more)
    if kind == "opt":
        sizes = {"hidden_size": 24, "ffn_dim": 20, "num_hidden_layers": 2, "num_attention_heads": 6}
        return hf.OPTConfig(
            **common | sizes | {"word_embed_proj_dim": 24, "max_position_embeddings": 64} | more
        )
    return hf.LlamaConfig(**llama | more)


def make(kind: str, **more: Any) -> Any:
    """A causal language model, or BERT with its head."""
    import transformers as hf

    config = settings(kind, **more)
    torch.manual_seed(5)
    auto = hf.AutoModelForMaskedLM if kind == "bert" else hf.AutoModelForCausalLM
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0, 0.2 if param.dim() > 1 else 0.1)
    return model


def ids(rows: int = 2, length: int = 9) -> Tensor:
    """Prompts."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(7))
