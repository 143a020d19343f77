"""Small models of transformers, and one process of plain torch that trains them."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 2
LENGTH = 8
VOCABULARY = 66
ADAM = {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}
FEW = {"hidden_size": 20, "num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 4}
"""Of three ranks the second has queries of both key heads, of one more than of the other."""
FAMILIES = ("llama", "gpt2", "bloom", "qwen2", "phi3", "mixtral", "deepseek_v2")
"""Grouped queries, fused and tied weights, alibi, biases, fused and unequal matrices, experts,
latent attention.
"""


_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_LLAMA = _COMMON | {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "pad_token_id": None,
}
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


def hugging_face(kind: str, **more: Any) -> Any:
    """A causal language model in fp64, with random weights that are the same in every process."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as hf

    torch.manual_seed(5)
    config = _config(kind, more)
    config._experts_implementation = "eager"  # the library's fast kernel takes no fp64
    auto: Any = hf.AutoModelForSeq2SeqLM if kind == "t5" else hf.AutoModelForCausalLM
    model: Any = auto.from_config(config).double().train()
    for name, param in model.named_parameters():
        if param.dim() == 1:
            param.data.add_(torch.randn_like(param) * 0.1)  # zeros and ones would hide mistakes
        elif "gate.weight" in name:
            param.data.normal_(std=0.5)  # some are made as zeros, with which all experts would tie
    return model


def _config(kind: str, more: dict[str, Any]) -> Any:
    import transformers as hf

    if kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
        drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return hf.GPT2Config(**_COMMON | sizes | drop | more)
    if kind == "bloom":
        return hf.BloomConfig(**_COMMON | {"hidden_size": 24, "n_layer": 2, "n_head": 6} | more)
    if kind == "qwen2":
        return hf.Qwen2Config(**_LLAMA | {"tie_word_embeddings": True} | more)
    if kind == "phi3":
        return hf.Phi3Config(**_LLAMA | _GROUPED | more)
    if kind == "mixtral":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        return hf.MixtralConfig(**_LLAMA | experts | {"output_router_logits": True} | more)
    if kind == "deepseek_v2":
        return hf.DeepseekV2Config(**_LLAMA | _LATENT | more)
    if kind == "qwen3":
        return hf.Qwen3Config(**_LLAMA | FEW | more)
    if kind == "t5":
        sizes = {
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 20,
            "num_layers": 2,
            "num_heads": 6,
            "dropout_rate": 0.0,
        }
        return hf.T5Config(
            **_COMMON | sizes | {"decoder_start_token_id": 0, "tie_word_embeddings": True} | more
        )
    if kind == "mpt":
        sizes = {
            "d_model": 24,
            "n_heads": 6,
            "n_layers": 2,
            "expansion_ratio": 2,
            "max_seq_len": 16,
        }
        return hf.MptConfig(**_COMMON | sizes | more)
    if kind == "few":
        return hf.LlamaConfig(**_LLAMA | FEW | more)
    return hf.LlamaConfig(**_LLAMA | _GROUPED | more)


def ids(step: int, rank: int) -> Tensor:
    """The batch of a data-parallel rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)


def settings(tp: int, stage: int = 0, **keys: Any) -> dict[str, Any]:
    """A config."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": tp, **keys},
    }


def plain(model: nn.Module, dp: int, steps: int, clip: float = 0.0) -> list[float]:
    """Losses of one process that sees the batches of all data-parallel ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses = []
    for step in range(steps):
        total = 0.0
        for rank in range(dp):
            batch = ids(step, rank)
            loss = model(input_ids=batch, labels=batch).loss / dp
            loss.backward()
            total += loss.item()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def train(engine: Any, steps: int, first: int = 0) -> list[float]:
    """Losses of this rank's batches."""
    losses = []
    rank = engine.ctx.mesh.index("dp")
    for step in range(first, first + steps):
        batch = ids(step, rank)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


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
