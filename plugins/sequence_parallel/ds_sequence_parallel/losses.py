"""Losses over the tokens of all shards: what one process would compute, and its gradients.

[Note: the factor] A rank adds up the losses of its own tokens. Gradients are then averaged over all
ranks of dp, those of a sequence among them; so the sum is divided by the number of tokens of *all*
shards and multiplied by the number of ranks. The mean over ranks of that, which users see, is the
mean over tokens.

Dimensions: ``batch`` any leading ones, ``classes``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from ds_comm_autograd import mean
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ds_core import comm
from ds_sequence_parallel.along import AlongSequence

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped


def token_mean(
    total: Float[Tensor, ""], count: Shaped[Tensor, ""] | float, group: ProcessGroup | None
) -> Float[Tensor, ""]:
    """The mean over the tokens of all shards; equal on all ranks of `group`, with this rank's share
    of the gradient.

    total: the sum of the losses of this rank's tokens.
    count: how many these are (or the sum of their weights).

    Collective along `group`; the gradients of the ranks are to be averaged, as the engine does.
    """
    ranks = comm.world_size(group)
    if ranks == 1:
        return total / count
    # fp64, as fp32 counts no further than 2^24. A clone: the sum is in place, and the count may be
    # the caller's.
    counted = torch.as_tensor(count, dtype=torch.float64, device=total.device).clone()
    comm.all_reduce(counted, group=group)
    # See [Note: the factor]; the mean is over this group, in forward only the value that is shown.
    return mean(total * (ranks / counted).to(total.dtype), group)


def cross_entropy(
    logits: Float[Tensor, "*batch classes"],
    labels: Shaped[Tensor, "*batch"],
    group: ProcessGroup | None,
    *,
    ignore_index: int = -100,
    **options: Any,
) -> Float[Tensor, ""]:
    """torch's cross entropy, as the mean over the tokens of all shards; see `token_mean`.

    labels: already shifted where the model predicts the next token.
    options: ``weight`` and ``label_smoothing`` of torch's function.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    wanted = labels.reshape(-1)
    total = nn.functional.cross_entropy(
        rows, wanted, ignore_index=ignore_index, reduction="sum", **options
    )
    valid = wanted != ignore_index
    weight = options.get("weight")
    # As torch's mean: with class weights it divides by the sum of the targets' weights.
    count = valid.sum() if weight is None else weight[wanted[valid]].sum()
    return token_mean(total, count, group)


class CrossEntropy(AlongSequence):
    """`cross_entropy` as a module of the model, over the axis ``sp`` once `ds_core.initialize` has
    the model.
    """

    def __init__(
        self, group: ProcessGroup | None = None, *, ignore_index: int = -100, **options: Any
    ) -> None:
        super().__init__(group)
        self.ignore_index = ignore_index
        self.options = options

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over the tokens of all shards."""
        return cross_entropy(
            logits, labels, self.group, ignore_index=self.ignore_index, **self.options
        )
