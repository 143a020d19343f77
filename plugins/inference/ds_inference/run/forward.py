"""One forward pass of a batch [b, t] through a program: sequences without their padding, outputs
put back.

What a program cannot serve is for the model itself; `refusal` says what that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from ds_inference_kit.program import By, Embed, Runnable
from ds_inference_kit.step import Step
from torch import Tensor
from torch.nn import functional as F

from ds_inference.families import Lowered

SERVED = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "inputs_embeds",
    "token_type_ids",
    "logits_to_keep",
)
FINISHED = (
    "labels",
    "return_dict",
    "num_items_in_batch",
    "start_positions",
    "end_positions",
    "mc_labels",
    "mc_token_ids",
)
"""What `Lowered.finish` takes.

A call with use_cache=True is for the model, as no cache is given back here.
"""


def refusal(lowered: Lowered, keywords: Mapping[str, Any]) -> str | None:
    """What is in the way of `forward` with these keywords of a model's forward; None: nothing
    is."""
    for name, value in keywords.items():
        if name not in SERVED and name not in FINISHED and value is not None and value is not False:
            return f"{name} is not served"
    # Shapes and values that cannot be packed as rows without padding.
    tokens, mask, positions = (
        keywords.get(name) for name in ("input_ids", "attention_mask", "position_ids")
    )
    if tokens is not None and tokens.dim() != 2:
        return "input_ids are not [b, t]"
    given = tokens if tokens is not None else keywords.get("inputs_embeds")
    if given is not None and (wrong := _find_misshapen(given.shape[:2], keywords)) is not None:
        return wrong
    if mask is not None:
        if mask.dim() != 2 or bool(((mask != 0) & (mask != 1)).any()):
            return "an attention_mask that is not [b, t] of 0 and 1 is not served"
        # More than one rise from 0 to 1 in a row: tokens with a hole between them would lose it.
        if bool((F.pad(mask.int(), (1, 0)).diff(dim=1).eq(1).sum(1) > 1).any()):
            return "padding between the tokens of a sequence is not served"
        if lowered.first and not bool(mask[:, 0].all()):
            return "padding in the first column, which the model's head reads, is not served"
    if positions is not None:
        # Attention counts tokens; positions that jump would mean another sequence. At padding they
        # may be anything.
        steps = positions.diff(dim=-1) == 1
        if not bool((steps if mask is None else steps | (mask[:, 1:] * mask[:, :-1] == 0)).all()):
            return "position_ids that do not count up by one are not served"
    types = any(isinstance(i, Embed) and i.by is By.TYPES for i in lowered.program.instructions)
    if keywords.get("token_type_ids") is not None and not types:
        return "token_type_ids are not served"
    keep = keywords.get("logits_to_keep")
    return (
        None
        if keep is None or isinstance(keep, int)
        else "logits_to_keep as a tensor is not served"
    )


def _find_misshapen(shape: Any, keywords: Mapping[str, Any]) -> str | None:
    """Which keyword is not of the shape [b, t]: what that means is for the model to say."""
    for name in ("attention_mask", "position_ids", "token_type_ids"):
        value = keywords.get(name)
        if (
            value is None
            or value.shape == shape
            or (name == "position_ids" and value.shape == (1, shape[1]))
        ):
            continue
        return f"{name} of shape {tuple(value.shape)} is not [b, t] of the inputs"
    return None


def forward(
    lowered: Lowered,
    runnable: Runnable,
    input_ids: Tensor | None = None,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    logits_to_keep: int = 0,
) -> Tensor:
    """[b, t, width]: logits, or the last hidden states where the program ends there; zeros at
    padding.

    logits_to_keep: of the last so many columns only (0: all), as in transformers.
    """
    given = input_ids if input_ids is not None else inputs_embeds
    if given is None or (input_ids is not None and inputs_embeds is not None):
        raise ValueError("give either input_ids or inputs_embeds")
    batch, columns = given.shape[:2]
    width = (
        None if lowered.program.embeds is None else lowered.program.widths[lowered.program.embeds]
    )
    if inputs_embeds is not None and inputs_embeds.shape != (batch, columns, width):
        raise ValueError(
            f"inputs_embeds of shape {tuple(inputs_embeds.shape)} are not [b, t, {width}]"
        )
    mask = torch.ones(batch, columns, dtype=torch.bool, device=given.device)
    if attention_mask is not None:
        mask = attention_mask.to(given.device).bool()
    # Places of real tokens in the flat batch: the program's rows.
    where = mask.flatten().nonzero().squeeze(1)
    positions = _positions(lowered, mask, position_ids).flatten()[where].int()
    tokens = torch.zeros_like(positions) if input_ids is None else input_ids.flatten()[where].int()
    _check(lowered, tokens, positions)
    sizes = mask.sum(1).cpu()
    # A sequence that is all padding has no rows.
    sizes = sizes[sizes > 0].int()
    # What follows `Keep`, above all the output head, runs only for the requested columns.
    first = columns - logits_to_keep if 0 < logits_to_keep < columns else 0
    wanted = (where % columns >= first).nonzero().squeeze(1) if first else None
    step = Step(
        tokens,
        positions,
        starts=F.pad(sizes.cumsum(0), (1, 0)).int(),
        lengths=sizes,
        wanted=wanted,
        types=None if token_type_ids is None else token_type_ids.flatten()[where].int(),
        embeds=None if inputs_embeds is None else inputs_embeds.flatten(0, 1)[where],
    )
    width = lowered.program.widths[lowered.program.output]
    out = torch.zeros(batch * columns, width, dtype=lowered.program.dtype, device=given.device)
    if where.numel() and (wanted is None or wanted.numel()):
        out[where if wanted is None else where[wanted]] = runnable(step)
    return out.view(batch, columns, width)[:, first:]


def _positions(lowered: Lowered, mask: Tensor, given: Tensor | None) -> Tensor:
    """[b, t]: those given, those among the tokens that are not padding, or the columns."""
    if given is not None:
        return given.to(mask.device).expand(mask.shape)
    if lowered.counted:
        return mask.cumsum(1) - 1
    return torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)


def _check(lowered: Lowered, tokens: Tensor, positions: Tensor) -> None:
    """Tokens and positions are lines of their tables: compiled providers read memory without
    looking.
    """
    for name, found, most in (
        ("input_ids", tokens, lowered.words),
        ("positions", positions, lowered.max_positions),
    ):
        if most is not None and found.numel():
            low, high = (int(x) for x in found.aminmax())
            if low < 0 or high >= most:
                raise ValueError(f"{name} {low} .. {high} are not all within 0 .. {most - 1}")
