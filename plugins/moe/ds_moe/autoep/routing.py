"""From router logits to experts and their scores: what AutoEP does where the model's own router
shall not decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RouterRule:
    """How tokens find their experts.

    top_k: experts per token. score: of logits. normalise: divide the chosen scores by their sum.
        scale: they are multiplied by this. groups: (number of groups of experts, groups that a
        token may use), None: any expert.
    group_score: how a group is rated: by its best expert, or its two best together.
    """

    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: tuple[int, int] | None = None
    group_score: Literal["max", "top2"] = "max"


def route(logits: Tensor, how: RouterRule, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each token and their scores: int64 and floating, both [tokens, top_k].

    logits: [tokens, experts]. bias: [experts], added to scores for the choice alone. Scores are
    fp32, or fp64 when the logits are.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    scores = wide.softmax(dim=-1) if how.score == "softmax" else wide.sigmoid()
    choice = scores if bias is None else scores + bias
    if how.groups is not None:
        choice = choice.masked_fill(~_allowed(choice, *how.groups, how.group_score), float("-inf"))
    index = choice.topk(how.top_k, dim=-1).indices
    chosen = scores.gather(-1, index)
    if how.normalise:
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
    return index, chosen * how.scale


def _allowed(choice: Tensor, count: int, kept: int, rated: str) -> Tensor:
    """Which experts are in the `kept` best of `count` groups, token by token."""
    tokens, experts = choice.shape
    members = choice.detach().view(tokens, count, experts // count)
    best = members.topk(min(2 if rated == "top2" else 1, experts // count), dim=-1).values.sum(
        dim=-1
    )
    mask = torch.zeros_like(best, dtype=torch.bool).scatter_(
        -1, best.topk(kept, dim=-1).indices, True
    )
    return mask.unsqueeze(-1).expand_as(members).reshape(tokens, experts)
