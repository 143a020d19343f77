"""The attention and mask functions of transformers, for a sequence that is divided."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_core.errors import UsageError
from ds_sequence_parallel.attention.layout import Layout
from ds_sequence_parallel.attention.ring import Mask, ring_attention
from ds_sequence_parallel.attention.ulysses import ulysses


@dataclass(frozen=True, eq=False)
class Part:
    """What an attention needs to know of the full sequence; passed as its ``attention_mask``."""

    layout: Layout
    whole: Any
    """Ulysses: the mask of the full sequence, in the form of the model's own attention."""
    causal: bool
    """Ring: no query looks at later keys."""
    allowed: Mask | None
    """Ring: which keys a query may look at; None: no more limits."""
    position_ids: Tensor | None
    """Of the full sequence."""


@dataclass(eq=False)
class Tokens:
    """The tokens of an uncut micro-batch; all tensors are [batch, sequence]."""

    layout: Layout
    padding: Tensor | None
    """True where a token counts."""
    segments: Tensor | None
    """The number of a token's document, if there are several."""
    position_ids: Tensor | None


def plain_attention(name: str, module: Any) -> Any:
    """The attention function of that name."""
    from transformers import AttentionInterface

    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return AttentionInterface._global_mapping[name]


def attend_whole(name: str, module: Any, *args: Any, **options: Any) -> Any:
    """The attention function of that name, of whole sequences."""
    return plain_attention(name, module)(module, *args, **options)


def plain_mask(name: str) -> Any:
    """The mask function of the attention of that name; None if it takes no mask."""
    from transformers import AttentionMaskInterface

    return AttentionMaskInterface._global_mapping.get(name)


def make_part(
    tokens: Tokens,
    ring: bool,
    before: str,
    batch_size: int,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    build: Any = None,
    **options: Any,
) -> Part:
    """What stands for the mask of these tokens.

    before: the attention whose mask the whole sequence gets.
    options: as transformers calls a mask function.
    build: the mask function of `before`, if not the one that is registered.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    function: Any = causal_mask_function if mask_function is None else mask_function
    # Plain masks need no tensor: attention kernels know "causal" and "everything".
    plain = function is causal_mask_function or function is bidirectional_mask_function
    causal = function is causal_mask_function or options.get("local_size") is not None
    # Packed documents: a token sees its own document only, whatever the rest of the mask says.
    if tokens.segments is not None:
        assert tokens.position_ids is not None
        function = _limit_to_documents(function, tokens.segments, tokens.position_ids)
        plain = False
        options["allow_is_causal_skip"] = False
    padding = None if tokens.padding is None else tokens.padding.bool()
    whole = None
    allowed = None
    build = build or plain_mask(before)
    if ring:
        # Such a function takes single indices, where the ring asks for blocks of them.
        if options.get("use_vmap"):
            raise UsageError(
                "sequence_parallel: ring attention cannot use this model's own mask; set mode to "
                "ulysses"
            )
        if not plain or padding is not None:
            allowed = _ring_mask(function, padding, batch_size)
    # Built for the full length, on every rank: after the exchange a rank has the full sequence.
    elif build is not None:
        options |= {
            "q_offset": 0,
            "kv_offset": 0,
            "mask_function": function,
            "attention_mask": padding,
        }
        length = tokens.layout.length
        whole = build(batch_size=batch_size, q_length=length, kv_length=length, **options)
    return Part(tokens.layout, whole, causal, allowed, tokens.position_ids)


def attend_part(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Any,
    group: ProcessGroup,
    ring: bool,
    before: Any,
    options: dict[str, Any],
) -> Tensor:
    """The attention of this rank's tokens: [batch, heads, positions, size] -> [batch, positions,
    heads, size].

    before: the attention function of whole sequences, or its name.

    Collective along `group`.
    """
    # The model built a mask itself, of its part of the sequence.
    if not isinstance(part, Part):
        raise UsageError(
            f"sequence_parallel: {type(module).__name__} was given a mask that it did not expect; its "
            "attention cannot be "
            "divided"
        )
    # Arguments by head or by position, which would have to be cut as well.
    for name in ("s_aux", "position_bias", "softcap") if ring else ("s_aux", "position_bias"):
        if options.get(name) is not None:
            raise UsageError(
                f"sequence_parallel: attention with {name} ({type(module).__name__}) cannot be "
                "divided"
            )
    if ring:
        if options.get("dropout"):
            raise UsageError(
                "sequence_parallel: ring attention has no dropout; set attention_dropout to 0 or "
                "mode to ulysses"
            )
        how: Any = {"causal": part.causal, "scale": options.get("scaling"), "mask": part.allowed}
        return ring_attention(query, key, value, group, part.layout, **how).transpose(1, 2)
    # Attention has the full sequence now; with a part of the positions it would find other
    # documents.
    if "position_ids" in options:
        options["position_ids"] = part.position_ids
    function = plain_attention(before, module) if isinstance(before, str) else before

    def attend(query: Tensor, key: Tensor, value: Tensor, repeated: bool) -> Tensor:
        local = _OneKeyPerQuery(module) if repeated else module
        return cast(Tensor, function(local, query, key, value, part.whole, **options)[0])

    there = {"heads": 1, "sequence": 2, "out_heads": 2, "out_sequence": 1}
    return ulysses(attend, query, key, value, group, lengths=part.layout.sizes, **there)


class _OneKeyPerQuery:
    """An attention module whose key-value heads have been repeated for this call."""

    num_key_value_groups = 1

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def documents(position_ids: Tensor | None) -> Tensor | None:
    """The number of the document of each token of packed sequences; None where each row is one."""
    if position_ids is None or position_ids.dim() != 2:
        return None
    # A document starts where positions do not go on by one.
    starts = torch.diff(position_ids, dim=-1, prepend=position_ids[:, :1] - 1) != 1
    return starts.cumsum(-1) if bool(starts.any()) else None


def _limit_to_documents(
    function: Callable[..., Tensor], segments: Tensor, positions: Tensor
) -> Callable[..., Tensor]:
    """A mask function inside documents, by the positions in them."""

    def inner(batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        # One row of segments serves every sequence of the batch.
        row = batch if len(segments) > 1 else batch * 0
        same = segments[row, query] == segments[row, key]
        return function(batch, head, positions[row, query], positions[row, key]) & same

    return inner


def _ring_mask(function: Callable[..., Tensor], padding: Tensor | None, batch: int) -> Mask:
    """A mask function of transformers as the ring takes it."""

    def mask(queries: Tensor, keys: Tensor) -> Tensor:
        rows = torch.arange(batch, device=queries.device)[:, None, None, None]
        query = queries[None, None, :, None]
        key = keys[None, None, None, :]
        seen = function(rows, rows.new_zeros(1, 1, 1, 1), query, key)
        if padding is not None:
            seen = seen & padding[rows, key]
        return seen.expand(batch, 1, len(queries), len(keys))

    return mask
