"""A folder in Hugging Face's format: a random llama of 60,000 parameters, and a tokenizer whose
tokens are bytes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["make"]

TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] }}{% endfor %}"
    "{% if messages[-1]['role'] == 'assistant' %}{{ raise_exception('an assistant cannot be "
    "asked') }}{% endif %}"
    "{{ '<s>assistant\n' }}"
)


def make(folder: Path, template: str | None = TEMPLATE) -> None:
    """Write it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=256,
        eos_token_id=257,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
