"""Llama and those that follow it: RMS norms before, rotary embeddings, gated MLPs or experts."""

from __future__ import annotations

from typing import Any

from ds_inference.families.description import Attention, Dense, Layer, Sparse, Tables, Transformer
from ds_inference.families.reading import activation, fields, rotary, windows

KNOWN = "num_key_value_heads head_dim hidden_act rms_norm_eps rope_parameters"
SLIDING = f"{KNOWN} sliding_window use_sliding_window max_window_layers layer_types"


def llama(base: Any) -> Transformer:
    """LlamaModel."""
    fields(base.config, f"{KNOWN} pretraining_tp attention_bias mlp_bias")
    return _decoder(base, [None] * len(base.layers))


def mistral(base: Any) -> Transformer:
    """MistralModel: a sliding window in every layer."""
    fields(base.config, SLIDING)
    return _decoder(base, windows(base.config, len(base.layers)))


def qwen2(base: Any) -> Transformer:
    """Qwen2Model: biases of q, k and v; a sliding window in some layers."""
    fields(base.config, SLIDING)
    return _decoder(base, windows(base.config, len(base.layers)))


def qwen3(base: Any) -> Transformer:
    """Qwen3Model: norms of the heads of q and k."""
    fields(base.config, f"{SLIDING} attention_bias")
    return _decoder(base, windows(base.config, len(base.layers)))


def mixtral(base: Any) -> Transformer:
    """MixtralModel: experts. router_jitter_noise is for training."""
    known = "num_experts_per_tok num_local_experts router_aux_loss_coef router_jitter_noise"
    fields(base.config, f"{SLIDING} {known}", output_router_logits=(False,))
    return _decoder(base, windows(base.config, len(base.layers)))


def _decoder(base: Any, sliding: list[int | None]) -> Transformer:
    turn = rotary(base.rotary_emb, base.config)
    return Transformer(
        tokens=base.embed_tokens,
        layers=tuple(
            _layer(layer, turn, window) for layer, window in zip(base.layers, sliding, strict=True)
        ),
        causal=True,
        most=base.config.max_position_embeddings,
        norm=base.norm,
    )


def _layer(layer: Any, turn: Tables, window: int | None) -> Layer:
    mine = layer.self_attn
    mlp = layer.mlp
    norms = (mine.q_norm, mine.k_norm) if hasattr(mine, "q_norm") else None
    qkv = mine.q_proj, mine.k_proj, mine.v_proj
    attention = Attention(
        qkv, mine.o_proj, mine.head_dim, mine.scaling, norms=norms, rotary=turn, window=window
    )
    inner: Dense | Sparse
    if hasattr(mlp, "experts"):
        inner = Sparse(mlp.gate, mlp.experts, mlp.top_k, activation(mlp.experts.act_fn))
    else:
        inner = Dense(mlp.up_proj, mlp.down_proj, activation(mlp.act_fn), mlp.gate_proj)
    return Layer(attention, inner, (layer.input_layernorm, layer.post_attention_layernorm))
