"""GPT-2, GPT-NeoX, GPT-Neo, OPT and BLOOM: decoders with layer norms and plain MLPs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ds_inference.families.description import Attention, Dense, Layer, Order, Transformer
from ds_inference.families.reading import Unknown, activation, fields, rotary


def gpt2(base: Any) -> Transformer:
    """GPT2Model: learned positions, q, k and v of one layer."""
    known = (
        "n_positions n_embd n_layer n_head n_inner activation_function resid_pdrop embd_pdrop "
        "attn_pdrop"
    )
    summary = (
        "summary_type summary_use_proj summary_activation summary_proj_to_labels "
        "summary_first_dropout"
    )
    scaling = (
        "scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn "
        "layer_norm_epsilon"
    )
    fields(base.config, f"{known} {summary} {scaling}", add_cross_attention=(False,))
    layers = [
        Layer(
            Attention(
                (block.attn.c_attn,), block.attn.c_proj, block.attn.head_dim, block.attn.scaling
            ),
            Dense(block.mlp.c_fc, block.mlp.c_proj, activation(block.mlp.act)),
            (block.ln_1, block.ln_2),
        )
        for block in base.h
    ]
    most = base.wpe.weight.shape[0]
    return Transformer(
        tokens=base.wte,
        layers=tuple(layers),
        causal=True,
        most=most,
        positions=base.wpe,
        norm=base.ln_f,
    )


def gpt_neo(base: Any) -> Transformer:
    """GPTNeoModel: some layers see `window_size` tokens; products of queries and keys are not
    scaled.
    """
    known = (
        "num_layers attention_types num_heads window_size activation_function resid_dropout "
        "embed_dropout"
    )
    fields(base.config, f"{known} layer_norm_epsilon")
    layers = []
    for block in base.h:
        if (kind := block.attn.attention_type) not in ("global", "local"):
            raise Unknown(f"attention of type {kind!r} is not served")
        mine = block.attn.attention
        window = base.config.window_size if kind == "local" else None
        qkv = mine.q_proj, mine.k_proj, mine.v_proj
        attention = Attention(qkv, mine.out_proj, mine.head_dim, 1.0, window=window)
        mlp = Dense(block.mlp.c_fc, block.mlp.c_proj, activation(block.mlp.act))
        layers.append(Layer(attention, mlp, (block.ln_1, block.ln_2)))
    most = base.wpe.weight.shape[0]
    return Transformer(
        tokens=base.wte,
        layers=tuple(layers),
        causal=True,
        most=most,
        positions=base.wpe,
        norm=base.ln_f,
    )


def gpt_neox(base: Any) -> Transformer:
    """GPTNeoXModel: a part of each head turns; attention and MLP side by side."""
    fields(
        base.config,
        "hidden_act hidden_dropout layer_norm_eps use_parallel_residual rope_parameters "
        "attention_bias is_decoder",
    )
    turn = rotary(base.rotary_emb, base.config)
    layers = []
    for block in base.layers:
        mine = block.attention
        mlp = block.mlp
        attention = Attention(
            (mine.query_key_value,),
            mine.dense,
            mine.head_size,
            mine.scaling,
            interleaved=True,
            rotary=turn,
        )
        inner = Dense(mlp.dense_h_to_4h, mlp.dense_4h_to_h, activation(mlp.act))
        order = Order.PARALLEL if block.use_parallel_residual else Order.PRE
        layers.append(
            Layer(attention, inner, (block.input_layernorm, block.post_attention_layernorm), order)
        )
    return Transformer(
        tokens=base.embed_in,
        layers=tuple(layers),
        causal=True,
        most=base.config.max_position_embeddings,
        norm=base.final_layer_norm,
    )


def opt(base: Any) -> Transformer:
    """OPTModel: positions of tokens that are not padding, from line 2 on; 350m normalises after and
    projects.
    """
    known = (
        "ffn_dim _remove_final_layer_norm word_embed_proj_dim dropout activation_function "
        "layerdrop init_std"
    )
    fields(base.config, f"{known} do_layer_norm_before enable_bias layer_norm_elementwise_affine")
    inside = base.decoder
    layers = []
    for block in inside.layers:
        mine = block.self_attn
        attention = Attention(
            (mine.q_proj, mine.k_proj, mine.v_proj), mine.out_proj, mine.head_dim, mine.scaling
        )
        mlp = Dense(block.fc1, block.fc2, activation(block.activation_fn))
        order = Order.PRE if block.do_layer_norm_before else Order.POST
        layers.append(
            Layer(attention, mlp, (block.self_attn_layer_norm, block.final_layer_norm), order)
        )
    offset = inside.embed_positions.offset
    return Transformer(
        tokens=inside.embed_tokens,
        layers=tuple(layers),
        causal=True,
        positions=inside.embed_positions,
        most=inside.embed_positions.weight.shape[0] - offset,
        offset=offset,
        counted=True,
        norm=inside.final_layer_norm,
        project_in=inside.project_in,
        project_out=inside.project_out,
    )


def bloom(base: Any) -> Transformer:
    """BloomModel: ALiBi instead of positions, a norm of the embeddings."""
    config = base.config
    fields(
        config,
        "n_layer n_head layer_norm_epsilon hidden_dropout pretraining_tp",
        apply_residual_connection_post_layernorm=(False,),
        slow_but_exact=(False,),
    )
    slopes = alibi(config.n_head).to(base.word_embeddings.weight.device)
    layers = []
    for block in base.h:
        mine = block.self_attention
        mlp = block.mlp
        attention = Attention(
            (mine.query_key_value,),
            mine.dense,
            mine.head_dim,
            mine.inv_norm_factor,
            interleaved=True,
            slopes=slopes,
        )
        inner = Dense(mlp.dense_h_to_4h, mlp.dense_4h_to_h, activation(mlp.gelu_impl))
        layers.append(
            Layer(attention, inner, (block.input_layernorm, block.post_attention_layernorm))
        )
    return Transformer(
        tokens=base.word_embeddings,
        layers=tuple(layers),
        causal=True,
        most=None,
        embedded=base.word_embeddings_layernorm,
        norm=base.ln_f,
    )


def alibi(heads: int) -> Tensor:
    """Slopes of ALiBi: powers of 2 ** (-8 / n), of the largest power of two n of heads; for the
    rest odd powers of its square root."""
    whole = 2 ** int(math.log2(heads))
    ratio = 2.0 ** (-8.0 / whole)
    rest = [ratio ** ((2 * n + 1) / 2) for n in range(heads - whole)]
    return torch.tensor([ratio ** (n + 1) for n in range(whole)] + rest, dtype=torch.float32)
