"""What this rank has of one parameter, as `ds_access` sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from ds_access.param_shard import ParamShard
from ds_state_stores import is_evicted
from torch import Tensor

from ds_core.errors import UsageError
from ds_zero.buckets.flat import FlatBucket
from ds_zero.buckets.records import Fragment

if TYPE_CHECKING:
    from ds_zero.base import ZeroPartitioner
    from ds_zero.reduce.bucket_grads import Grads


class FragmentShard(ParamShard):
    """A fragment of a parameter, in its bucket.

    What the optimizer updates may be another range, see `ds_zero.buckets.full_tensors`.
    """

    def __init__(
        self, partitioner: ZeroPartitioner, bucket: FlatBucket, fragment: Fragment
    ) -> None:
        mesh = partitioner.ctx.mesh
        axes = bucket.replicas
        self._partitioner = partitioner
        self._bucket = bucket
        self._fragment = fragment
        self.name = fragment.name
        self.shape = fragment.shape
        self.param = fragment.param
        self.updated = partitioner.fragments[fragment.param].master
        self.group = mesh.group(*axes)
        self.ranks = mesh.ranks(*axes)
        self.index = mesh.index(*axes)
        # Under MiCS each block of ranks has all of the parameter.
        places = [rank % bucket.world for rank in range(len(self.ranks))]
        spans = (bucket.layout.span(fragment.index, place) for place in places)
        self.ranges = [(s.start, s.stop) for s in spans]
        updated = bucket.masters.ranges(fragment.index)
        self.updated_ranges = [updated[place] for place in places]
        self.partitions_weights = partitioner.section.stage == 3
        self.local = bucket.weights.sharded
        self.device = bucket.full.device

    def read(self, tensor: Tensor) -> Tensor:
        """See `ParamShard.read`."""
        found = self._here(tensor)
        store = self._bucket.masters.evicts
        return store.read(found) if store is not None and is_evicted(found) else found

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """See `ParamShard.write`."""
        found = self._here(tensor)
        values = values.view(tensor.shape)
        store = self._bucket.masters.evicts
        if store is not None and is_evicted(found):
            store.write(found, values)
        else:
            found.copy_(values)
        self._bucket.masters.written(self._fragment)

    def _here(self, tensor: Tensor) -> Tensor:
        """`tensor`, or its host copy while it is offloaded; no copy to or from it is running."""
        self._partitioner.settle()
        return self._partitioner.offloaded.view(tensor.detach())

    # -- weights -----------------------------------------------------------------------------------

    def round(self) -> None:
        """See `ParamShard.round`."""
        if self._bucket.masters.copied:
            self._write_weight(self.read(self.updated).reshape(-1))

    def set_weight(self, master: Tensor) -> None:
        """See `ParamShard.set_weight`."""
        self._bucket.weights.outdate()
        self._write_weight(master.reshape(-1)[slice(*self.ranges[self.index])])
        full = self._partitioner.unsharded_now(self._bucket)
        if full is not None:
            self._bucket.view(self.read(full), self._fragment.index).copy_(master)
        if self._bucket.outer:  # under MiCS each block has written its own
            self.write(self.updated, master.reshape(-1)[slice(*self.updated_ranges[self.index])])

    def _write_weight(self, values: Tensor) -> None:
        """Write this rank's range of the weight, as it is between steps."""
        part = self._here(self._bucket.weights.parts[self._fragment.index])
        with self._bucket.weights.in_memory(write=True):
            part.copy_(values)

    def check_local_write(self) -> None:
        """See `ParamShard.check_local_write`."""
        if self._bucket.weights.has_second:
            raise UsageError(
                f"parameter {self.name!r}: under hpZ other ranks do not see what one writes "
                "between the first forward "
                "and the step; write it after step(), or with safe_set_full_fp32_param"
            )

    # -- gradients ---------------------------------------------------------------------------------

    @property
    def _grads(self) -> Grads | None:
        return self._partitioner.reducer.grads(self._bucket)

    @property
    def window_open(self) -> bool:
        """See `ParamShard.window_open`."""
        return self._partitioner.reducer.any_gradient

    @property
    def grad_dtype(self) -> torch.dtype:
        """See `ParamShard.grad_dtype`."""
        return self._bucket.dtype if self._grads is None else self._grads.dtype

    def reduced(self) -> Tensor | None:
        """See `ParamShard.reduced`."""
        grads = self._grads
        if grads is None or grads.shard is None or not grads.used[self._fragment.index]:
            return None
        return self.read(grads.shard)[self._fragment.within]

    @property
    def has_pending(self) -> bool:
        """See `ParamShard.has_pending`."""
        grads = self._grads
        return grads is not None and (
            grads.filled[self._fragment.index] or self.param.grad is not None
        )

    def pending(self) -> Tensor | None:
        """See `ParamShard.pending`."""
        grads = self._grads
        if grads is None or not self.has_pending:
            return None
        total = torch.zeros(self.numel, dtype=self.grad_dtype, device=self.device)
        if grads.filled[self._fragment.index] and grads.local is not None:
            total.add_(self._bucket.view(self.read(grads.local), self._fragment.index).reshape(-1))
        if (grad := self.param.grad) is not None:
            total.add_((grad.to_dense() if grad.is_sparse else grad).reshape(-1))
        return total.mul_(1.0 / self._partitioner.ctx.mesh.size("dp"))

    def set_grad(self, values: Tensor) -> None:
        """See `ParamShard.set_grad`."""
        grads = self._grads
        index = self._fragment.index
        assert grads is not None, self.name
        if grads.shard is None:  # nothing was reduced yet; what will be is added to it
            grads.begin_shard()
        grads.used[index] = True
        grads.filled[index] = False
        self.param.grad = None
        assert grads.shard is not None
        with grads.in_memory():
            self.read(grads.shard)[self._fragment.within].copy_(values)


class LocalFragmentShard(FragmentShard):
    """A fragment whose gradient stays in ``param.grad``, see `ds_zero.reduce.local_grads`."""

    def reduced(self) -> Tensor | None:
        """See `ParamShard.reduced`."""
        grad = self.param.grad
        if grad is None:
            return None
        if grad.is_sparse or not grad.is_contiguous():
            grad = self.param.grad = grad.to_dense().contiguous()  # the caller may write to it
        return self.read(grad).view(-1)

    def set_grad(self, values: Tensor) -> None:
        """See `ParamShard.set_grad`."""
        if (grad := self.reduced()) is not None:
            grad.copy_(values)
            return
        hidden = self.param.data
        values = values.to(self._bucket.dtype, copy=True).view(self.shape)
        # while the weight is sharded it is empty, and its gradient must have its shape
        self.param.data = values
        self.param.grad = values
        self.param.data = hidden
