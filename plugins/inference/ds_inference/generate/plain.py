"""`generate` for modules that have none of their own: tensors of tokens in, tensors of tokens
out."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ds_core.errors import UsageError, did_you_mean
from ds_inference.generate.generator import Generator
from ds_inference.generate.requests import SamplingParams

_PARAMS = frozenset(f.name for f in fields(SamplingParams))


def plain_generate(
    generator: Generator,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    do_sample: bool = False,
    eos_token_id: int | None = None,
    pad_token_id: int = 0,
    **keywords: Any,
) -> Tensor:
    """Prompts [batch, length] and their answers [batch * num_return_sequences, longest].

    attention_mask: 0 at padding.
    do_sample: draw tokens (at temperature 1 unless it is given), else the most probable one.

    Other keywords: those of `SamplingParams`; temperature counts with do_sample alone, as in
    transformers. What ends before the longest is followed by pad_token_id.
    """
    if input_ids is None or input_ids.dim() != 2:
        raise UsageError("generate takes the tokens of prompts, a tensor [batch, length]")
    for name in keywords.keys() - _PARAMS:
        raise UsageError(
            f"generate has no keyword {name!r}. {did_you_mean(name, sorted(_PARAMS))}".strip()
        )
    # With beams a temperature of 0 takes the best candidates, and the caller's is passed on as it
    # is.
    if keywords.get("num_beams", 1) == 1:
        keywords["temperature"] = keywords.get("temperature", 1.0) if do_sample else 0.0
    if eos_token_id is not None:
        keywords["stop_token_ids"] = (*keywords.get("stop_token_ids", ()), eos_token_id)
    given = input_ids.cpu()
    keep = torch.ones_like(given) if attention_mask is None else attention_mask.cpu()
    # Rows of a step have no padding.
    prompts = [row[real != 0].tolist() for row, real in zip(given, keep, strict=True)]
    answers = generator.generate(prompts, SamplingParams(**keywords))
    rows = [
        (row, result.tokens)
        for row, results in zip(given, answers, strict=True)
        for result in results
    ]
    longest = max((len(tokens) for _, tokens in rows), default=0)
    # The prompts stay as they were given, padding included, as transformers returns them.
    out = torch.full((len(rows), given.shape[1] + longest), pad_token_id, dtype=input_ids.dtype)
    for line, (row, tokens) in zip(out, rows, strict=True):
        line[: row.numel()] = row
        line[row.numel() : row.numel() + len(tokens)] = torch.tensor(tokens, dtype=out.dtype)
    return out.to(input_ids.device)
