"""Serves the GPT that examples/gpt trained:

    python examples/serve/serve.py

It writes the newest checkpoint of runs/gpt to runs/gpt/hf as what it is to transformers, a GPT-2
whose tokens are bytes, and becomes `dscore serve runs/gpt/hf`, whose options may follow.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from ds_checkpoint.offline import get_fp32_state_dict_from_zero_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1] / "gpt"))
from model import GPT, VOCABULARY

LAYERS = {
    "norm1": "ln_1", "qkv": "attn.c_attn", "proj": "attn.c_proj",
    "norm2": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj",
}  # fmt: skip
TOP = {"embed": "wte", "position": "wpe", "norm": "ln_f"}


def as_gpt2(weights: Mapping[str, Tensor]) -> GPT2LMHeadModel:
    """The same model, with transformers' names.

    GPT-2 keeps the weights of its linear layers transposed.
    """
    gpt = GPT()
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=gpt.context,
        n_embd=gpt.embed.embedding_dim,
        n_layer=len(gpt.blocks),
        n_head=gpt.blocks[0].heads,
        activation_function="gelu",
        bos_token_id=None,
        eos_token_id=None,
    )
    renamed = {}
    for name, value in weights.items():
        *_, layer, kind = name.split(".")
        if name.startswith("blocks."):
            turned = layer in ("qkv", "proj", "up", "down") and kind == "weight"
            renamed[f"transformer.h.{name.split('.')[1]}.{LAYERS[layer]}.{kind}"] = (
                value.t() if turned else value
            )
        elif layer in TOP:
            renamed[f"transformer.{TOP[layer]}.{kind}"] = value
    model = GPT2LMHeadModel(config).eval()
    wrong = model.load_state_dict(renamed, strict=False)
    # that is the embedding
    assert not wrong.unexpected_keys and set(wrong.missing_keys) <= {"lm_head.weight"}, wrong
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token i is byte i.

    In a tokenizer's file a byte that cannot be printed stands as a letter from 256 on.
    """
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printed}
    letters |= {
        byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in letters)
    }
    tokenizer = Tokenizer(models.BPE({letter: byte for byte, letter in letters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--run", type=Path, default=Path("runs/gpt"), help="the folder of the checkpoint"
    )
    args, options = parser.parse_known_args()
    folder = args.run / "hf"
    if not args.run.is_dir():
        raise SystemExit(
            f"{args.run} is missing; train first: dscore run --nproc 2 examples/gpt/train.py"
        )
    with torch.no_grad():
        as_gpt2(get_fp32_state_dict_from_zero_checkpoint(args.run)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    os.execv(
        sys.executable,
        [sys.executable, "-m", "ds_cli", "serve", str(folder), "--name", "gpt", *options],
    )


if __name__ == "__main__":
    main()
