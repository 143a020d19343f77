"""From router logits to experts and their scores, where the model's own router shall not decide.

Softmax scores are Mixtral's; sigmoid scores, the bias and group-limited routing are DeepSeek-V3's
(2024, section 2.1.2), groups rated by their best expert DeepSeek-V2's (2024, section 2.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@dataclass(frozen=True, slots=True)
class RouterRule:
    """How tokens find their experts."""

    top_k: int
    """Experts per token."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """From logits to scores."""
    normalise: bool = True
    """Divide the chosen scores by their sum."""
    scale: float = 1.0
    """The chosen scores are multiplied by this."""
    groups: tuple[int, int] | None = None
    """(number of groups of experts, groups that a token may use); None: any expert."""
    group_score: Literal["max", "top2"] = "max"
    """How a group is rated: by its best expert, or its two best together."""


def route(
    logits: Float[Tensor, "tokens experts"],
    how: RouterRule,
    bias: Float[Tensor, " experts"] | None = None,
) -> tuple[Int[Tensor, "tokens k"], Float[Tensor, "tokens k"]]:
    """The experts of each token and their scores.

    bias: added to scores for the choice alone. Experts are int64, scores fp32, or fp64 when the
    logits are.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    scores = wide.softmax(dim=-1) if how.score == "softmax" else wide.sigmoid()
    # The bias evens out the load by changing who is chosen; weights come from the unbiased scores.
    choice = scores if bias is None else scores + bias
    if how.groups is not None:
        choice = choice.masked_fill(~_allowed(choice, *how.groups, how.group_score), float("-inf"))
    index = choice.topk(how.top_k, dim=-1).indices
    chosen = scores.gather(-1, index)
    if how.normalise:
        # The transformers library's constant: sigmoid scores may all round to 0.
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
    return index, chosen * how.scale


def _allowed(
    choice: Float[Tensor, "tokens experts"], count: int, kept: int, rated: str
) -> Bool[Tensor, "tokens experts"]:
    """Which experts are in the `kept` best of `count` groups, token by token."""
    tokens, experts = choice.shape
    # Neighbouring experts are a group: those of one node, in the paper.
    members = choice.detach().view(tokens, count, experts // count)
    best = members.topk(min(2 if rated == "top2" else 1, experts // count), dim=-1).values.sum(
        dim=-1
    )
    mask = torch.zeros_like(best, dtype=torch.bool).scatter_(
        -1, best.topk(kept, dim=-1).indices, True
    )
    return mask.unsqueeze(-1).expand_as(members).reshape(tokens, experts)
