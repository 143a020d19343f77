"""Where the optimizer's gradients come from: the contract of `Reducer` and `LocalGradients`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_core.partition import GradGroup

if TYPE_CHECKING:
    from jaxtyping import Shaped

    from ds_core.partition import BackwardPlan
    from ds_zero.base import ZeroPartitioner
    from ds_zero.buckets.flat import FlatBucket
    from ds_zero.buckets.records import Fragment
    from ds_zero.reduce.bucket_grads import Grads


class GradientSource(ABC):
    """Collects gradients in backward, and gives the optimizer those of its fragments."""

    local = False
    """Whether gradients stay in ``param.grad``, so that nothing is reported in backward."""

    given: list[Tensor | None]
    """Between `gradients` and the end of the step: one for each of all buckets' fragments."""

    def __init__(self, owner: ZeroPartitioner, buckets: Sequence[FlatBucket]) -> None:
        self.owner = owner
        self.ctx = owner.ctx
        self.section = owner.section
        self.buckets = list(buckets)
        self.given = []
        self._params = {p for b in buckets for p in b.params}

    def begin(self, plan: BackwardPlan) -> None:  # noqa: B027
        """See `Partitioner.begin`."""

    def on_gradient(self, param: nn.Parameter) -> None:  # noqa: B027
        """See `Partitioner.on_gradient`."""

    def finish(self, plan: BackwardPlan) -> None:  # noqa: B027
        """See `Partitioner.finish`."""

    @abstractmethod
    def add(self, param: nn.Parameter, grad: Shaped[Tensor, ...]) -> None:
        """Take a gradient that no backward has made; like one that comes at the end of a
        backward."""

    @abstractmethod
    def gradients(self) -> list[GradGroup]:
        """All gradients that this rank's optimizer gets, in the dtypes in which they arrived; and
        `given`.
        """

    @abstractmethod
    def used(self, bucket: FlatBucket) -> bool:
        """Whether any rank had a gradient for any parameter of `bucket`; called between
        `gradients` and `zero_grad`.
        """

    def unused(self, bucket: FlatBucket) -> list[Fragment]:
        """This rank's fragments of `bucket` without a gradient on any rank; see `used`."""
        return []

    @property
    @abstractmethod
    def any_gradient(self) -> bool:
        """Whether there is any gradient on this rank, reduced or not."""

    @abstractmethod
    def tensors(self, bucket: FlatBucket, *, reduced: bool) -> Iterable[Tensor | None]:
        """The tensors with gradients of `bucket`: what will not be reduced again, or (not
        `reduced`) what will.
        """

    def grads(self, bucket: FlatBucket) -> Grads | None:
        """The gradients of `bucket` in its flat layout; None where there are none, now or ever."""
        return None

    def reduced(self, bucket: FlatBucket) -> list[Tensor]:
        """The tensor of which `given` are views, which a store may have evicted; [] for none."""
        return []

    @abstractmethod
    def zero_grad(self) -> None:
        """Drop all gradients, also those of a backward that failed half-way."""

    def detach(self) -> None:  # noqa: B027
        """Free buffers."""

    # -- for implementations -----------------------------------------------------------------------

    def refuse_unused(self, used: Iterable[Iterable[bool]]) -> None:
        """Raise UsageError where `ignore_unused_parameters` is off and a parameter had no gradient.

        used: per bucket and parameter, whether any rank had one.
        """
        if self.section.ignore_unused_parameters:
            return
        unused = [
            name
            for bucket, had in zip(self.buckets, used, strict=True)
            for name, param, one in zip(bucket.names, bucket.params, had, strict=True)
            if param.requires_grad and not one
        ]
        if unused:
            more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
            raise UsageError(
                f"no rank had a gradient for {', '.join(unused[:5])}{more}, and zero_optimization."
                "ignore_unused_parameters is false; freeze them, use them, or set it to true"
            )

    def grouped(
        self,
        mine: Iterable[Sequence[Tensor | None]],
        norms: Mapping[FlatBucket, Tensor] = MappingProxyType({}),
    ) -> list[GradGroup]:
        """Set `given`, and return the groups of the norm.

        mine: per bucket, the gradients of its fragments.
        norms: of buckets whose gradients are evicted, their L2 norm, which stands for them.
        """
        by_axes: dict[tuple[str, ...], list[Tensor]] = {}
        self.given = []
        for bucket, grads in zip(self.buckets, mine, strict=True):
            self.given += grads
            found = by_axes.setdefault(bucket.summed, [])
            if bucket.counted and bucket in norms:
                found.append(norms[bucket])
            elif bucket.counted:
                found += [g for g in grads if g is not None]
        return [GradGroup(axes, tensors) for axes, tensors in by_axes.items()] or [
            GradGroup((), [])
        ]
