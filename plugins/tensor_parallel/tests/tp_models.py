"""Small models of transformers, and one process of plain torch that trains them."""

from __future__ import annotations

from typing import Any

import torch
from ds_testing.truth import tiny
from torch import Tensor, nn

BATCH = 2
LENGTH = 8
VOCABULARY = 66
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}}
FEW = {"hidden_size": 20, "num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 4}
"""Of three ranks the second has queries of both key heads, of one more than of the other."""
FAMILIES = ("llama", "gpt2", "bloom", "qwen2", "phi3", "mixtral", "deepseek_v2")
"""Grouped queries, fused and tied weights, alibi, biases, fused and unequal matrices, experts,
latent attention.
"""


# 4 key heads; others have 3, uneven for 2 ranks.
_GROUPED = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4}

_LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 12,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 6,
    "topk_method": "greedy",
}


_KEYS: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "few": FEW,
    "gpt2": {
        "hidden_size": 16,
        "num_attention_heads": 4,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
    "bloom": {},
    "qwen2": {"tie_word_embeddings": True},
    "phi3": _GROUPED,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    "deepseek_v2": _LATENT,
    "qwen3": FEW,
    "t5": {
        "d_model": 16,
        "hidden_size": 16,
        "d_kv": 4,
        "d_ff": 20,
        "num_layers": 2,
        "dropout_rate": 0.0,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "tie_word_embeddings": True,
    },
    "mpt": {"expansion_ratio": 2, "max_seq_len": 16},
}


def hugging_face(kind: str, **more: Any) -> Any:
    """A causal language model in fp64, with random weights that are the same in every process."""
    auto = "AutoModelForSeq2SeqLM" if kind == "t5" else "AutoModelForCausalLM"
    family = "llama" if kind == "few" else kind
    # The library's fast kernel of experts takes no fp64.
    model = tiny(family, seed=5, auto=auto, experts="eager", **_KEYS[kind] | more).double().train()
    for name, param in model.named_parameters():
        if param.dim() == 1:
            param.data.add_(torch.randn_like(param) * 0.1)  # zeros and ones would hide mistakes
        elif "gate.weight" in name:
            param.data.normal_(std=0.5)  # some are made as zeros, with which all experts would tie
    return model


def ids(step: int, rank: int) -> Tensor:
    """The batch of a data-parallel rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)


def settings(tp: int, stage: int = 0, **keys: Any) -> dict[str, Any]:
    """A config."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": ADAMW,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": tp, **keys},
    }


def texts(step: int, rank: int) -> dict[str, Tensor]:
    """The arguments of the model."""
    tokens = ids(step, rank)
    return {"input_ids": tokens, "labels": tokens}


def weights_off(engine: Any, truth: nn.Module) -> float:
    """The largest difference of this rank's parts of the weights from those of one process."""
    from ds_run_state.slices import SLICES

    slices = engine.ctx.stash.get(SLICES) or {}
    wholes = dict(truth.named_parameters())
    off = 0.0
    for name, param in engine.module.named_parameters():
        full = wholes[name].detach()
        mine = slices[name].take(full) if name in slices else full
        assert mine.shape == param.shape, f"{name}: {tuple(param.shape)}, not {tuple(mine.shape)}"
        off = max(off, float((param.detach() - mine).abs().max()))
    return off
