"""Cross entropy of logits of which each rank has the columns of some tokens.

As Megatron-LM's vocabulary-parallel loss (Shoeybi et al. 2019, section 3), with one collective.

Dimensions: ``positions`` of the batch, ``tokens`` of this rank's part of the vocabulary.

[Note: one small message] Of each position a rank sends three numbers: its largest logit, the sum of
exponentials relative to it, and the target's logit if it has it. From those of all ranks every rank
has the loss; the gradient needs no message. No rank ever has the full
logits, or their gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from ds_comm_autograd import gather
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from ds_core.errors import UsageError
from ds_tensor_parallel.layers.linear import Place, gather_columns

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch.distributed import ProcessGroup

    from ds_tensor_parallel.planning.division import Division


def parallel_cross_entropy(
    logits: Float[Tensor, "*batch tokens"],
    target: Int[Tensor, "*batch"],
    head: Any,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Float[Tensor, "*losses"]:
    """`torch.nn.functional.cross_entropy` of the logits that `head` computed; fp32 for 16 bits.

    logits: with this rank's tokens last.
    target: token ids of the full vocabulary.
    head: the column-parallel layer with ``gather_output=False`` that made the logits; until it is
        bound, they are of all tokens.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction {reduction!r}; use 'mean', 'sum' or 'none'")
    flat = logits.reshape(-1, logits.shape[-1])
    wanted = target.reshape(-1)
    if logits.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    place: Place | None = head.tp
    if place is None:
        loss = functional.cross_entropy(
            flat,
            wanted,
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
        )
    else:
        division: Division = head.division
        ((first, size),) = division.ranges(place.rank)
        if logits.shape[-1] != size:
            raise ValueError(
                f"logits have {logits.shape[-1]} tokens, and this rank has {size} of "
                f"{division.length}"
            )
        # Only the loss needs the group: reductions are over positions, which every rank has.
        options = (first, division.length, ignore_index, label_smoothing)
        apply: Any = _CrossEntropy.apply
        loss = apply(flat, wanted, place.group, place.size, options)
    if reduction == "none":
        return loss.view(target.shape)
    return loss.sum() if reduction == "sum" else loss.sum() / (wanted != ignore_index).sum()


class _CrossEntropy(Function):
    """The losses of the positions.

    Saves the logits and one number per position; exponentials are computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Float[Tensor, "positions tokens"],
        target: Int[Tensor, " positions"],
        group: ProcessGroup,
        ranks: int,
        options: tuple[int, int, int, float],
    ) -> Float[Tensor, " positions"]:
        first, vocabulary, ignore_index, smoothing = options
        # Which targets are this rank's; the others look up column 0 and count as 0.
        local = target - first
        ignored = target == ignore_index
        mine = (local >= 0) & (local < logits.shape[-1]) & ~ignored
        local = local.masked_fill(~mine, 0)
        # This rank's three numbers per position. Exponentials are relative to its own largest
        # logit, so that they do not overflow before the largest of all is known.
        largest = logits.amax(-1)
        rows = [
            largest,
            (logits - largest.unsqueeze(-1)).exp_().sum(-1),
            logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0.0),
        ]
        if smoothing:
            # Label smoothing mixes in the mean over all tokens of the losses, for which the sum of
            # logits is enough.
            rows.append(logits.sum(-1))
        parts = gather(torch.stack(rows), group, 0).view(ranks, len(rows), -1)
        top = parts[:, 0].amax(0)
        # The logarithm of the sum of all exponentials: the ranks' sums, each moved to the common
        # largest logit.
        whole = top + (parts[:, 1] * (parts[:, 0] - top).exp()).sum(0).log()
        # loss = log sum exp(logits) - logit of the target, which exactly one rank has.
        loss = whole - (1 - smoothing) * parts[:, 2].sum(0)
        if smoothing:
            loss = loss - smoothing / vocabulary * parts[:, 3].sum(0)
        ctx.save_for_backward(logits, whole, local, mine, ignored)
        ctx.smoothing = smoothing
        ctx.vocabulary = vocabulary
        return loss.masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, whole, local, mine, ignored = ctx.saved_tensors
        grad = grad.masked_fill(ignored, 0.0).unsqueeze(-1)
        # The gradient is softmax - target: this rank's columns of it need this rank's logits only.
        found = (logits - whole.unsqueeze(-1)).exp_()
        if ctx.smoothing:
            found -= ctx.smoothing / ctx.vocabulary
        found.scatter_add_(
            -1, local.unsqueeze(-1), (ctx.smoothing - 1) * mine.unsqueeze(-1).to(found.dtype)
        )
        return found.mul_(grad), None, None, None, None


# -- models of transformers ------------------------------------------------------------------------


class _NoLogits:
    """Stands in for the logits of a model that was given labels in training: they are divided, and
    not gathered.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(
            "the logits of a training step are divided over the ranks, and only the loss is "
            "computed from them; set "
            "tensor_parallel.vocab_parallel_loss false to have them gathered, or call the model "
            "without labels"
        )

    def __getitem__(self, key: Any) -> Any:
        return self.__getattr__("a part of it")

    def __repr__(self) -> str:
        return "<logits, divided over the ranks>"


NO_LOGITS = _NoLogits()


def divide_loss(owner: Any, head: Any) -> bool:
    """Let `owner`, a model of transformers, compute its loss from divided logits in training;
    whether it can be done.

    head: its column-parallel output head with ``gather_output``. It leaves the logits divided while
    it trains; where the model gives no loss they are gathered behind it.
    """
    loss = getattr(owner, "loss_function", None)
    # Models of transformers compute the loss through self.loss_function; one whose forward does not
    # would ignore ours.
    forward: Any = inspect.unwrap(type(owner).forward)
    if (
        not callable(loss)
        or "loss_function" not in forward.__code__.co_names
        or len(head.division.segments) > 1
    ):
        return False
    if not _is_causal(loss):
        return False
    head.divides_loss = True
    owner.loss_function = _Loss(loss, head)
    owner.register_forward_hook(_Logits(head), with_kwargs=True)
    return True


def _is_causal(loss: Any) -> bool:
    """Whether it is transformers' loss of causal language models, or takes its arguments."""
    if getattr(loss, "__name__", "") == "ForCausalLMLoss":
        return True
    names = set(inspect.signature(loss).parameters)
    return {"logits", "labels", "vocab_size", "num_items_in_batch", "shift_labels"} <= names


class _Loss:
    """`whole`, the loss of a causal language model, for logits that are divided too.

    Copies of the model copy it.
    """

    def __init__(self, whole: Callable[..., Tensor], head: Any) -> None:
        self._whole = whole
        self._head = head

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """As transformers calls it."""
        head = self._head
        if head.tp is None or logits.shape[-1] == head.division.length:
            return self._whole(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **more,
            )
        # As transformers does: the label of a position is the next token, and the last position has
        # none.
        if shift_labels is None:
            assert labels is not None
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = parallel_cross_entropy(
            logits, shift_labels, head, ignore_index=ignore_index, reduction=reduction
        )
        if num_items_in_batch is None:
            return loss
        items = num_items_in_batch
        return loss / (items.to(loss.device) if isinstance(items, Tensor) else items)


class _Logits:
    """Forward hook of the model: divided logits are gathered, or left out beside a loss."""

    def __init__(self, head: Any) -> None:
        self.head = head

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        # A ModelOutput, or (with return_dict=False) a tuple whose first is the loss where there is
        # one.
        if hasattr(output, "keys"):
            output["logits"] = self._seen(output["logits"], output.get("loss") is not None)
            return output
        has_loss = kwargs.get("labels") is not None
        place = int(has_loss)
        return (*output[:place], self._seen(output[place], has_loss), *output[place + 1 :])

    def _seen(self, logits: Tensor, has_loss: bool) -> Any:
        """What the user sees of the logits."""
        if logits.shape[-1] == self.head.division.length:
            return logits
        return NO_LOGITS if has_loss else gather_columns(logits, self.head.tp, self.head.division)
