"""BERT and DistilBERT: encoders that normalise after attention and MLP."""

from __future__ import annotations

from typing import Any

from ds_inference.families.description import Attention, Dense, Layer, Order, Transformer
from ds_inference.families.reading import activation, fields


def bert(base: Any) -> Transformer:
    """BertModel, as an encoder."""
    fields(
        base.config,
        "hidden_act hidden_dropout_prob attention_probs_dropout_prob type_vocab_size "
        "layer_norm_eps",
        is_decoder=(False,),
        add_cross_attention=(False,),
    )
    layers = []
    for block in base.encoder.layer:
        mine = block.attention.self
        out = block.attention.output
        attention = Attention(
            (mine.query, mine.key, mine.value), out.dense, mine.attention_head_size, mine.scaling
        )
        mlp = Dense(
            block.intermediate.dense,
            block.output.dense,
            activation(block.intermediate.intermediate_act_fn),
        )
        layers.append(Layer(attention, mlp, (out.LayerNorm, block.output.LayerNorm), Order.POST))
    words = base.embeddings
    return Transformer(
        tokens=words.word_embeddings,
        types=words.token_type_embeddings,
        positions=words.position_embeddings,
        embedded=words.LayerNorm,
        layers=tuple(layers),
        causal=False,
        most=words.position_embeddings.weight.shape[0],
    )


def distilbert(base: Any) -> Transformer:
    """DistilBertModel."""
    known = (
        "sinusoidal_pos_embds n_layers n_heads dim hidden_dim dropout activation qa_dropout "
        "seq_classif_dropout"
    )
    fields(base.config, known)
    layers = []
    for block in base.transformer.layer:
        mine = block.attention
        attention = Attention(
            (mine.q_lin, mine.k_lin, mine.v_lin),
            mine.out_lin,
            mine.attention_head_size,
            mine.scaling,
        )
        mlp = Dense(block.ffn.lin1, block.ffn.lin2, activation(block.ffn.activation))
        layers.append(
            Layer(attention, mlp, (block.sa_layer_norm, block.output_layer_norm), Order.POST)
        )
    words = base.embeddings
    return Transformer(
        tokens=words.word_embeddings,
        positions=words.position_embeddings,
        embedded=words.LayerNorm,
        layers=tuple(layers),
        causal=False,
        most=words.position_embeddings.weight.shape[0],
    )
