"""Collectives of abacus tensors: gloo's, on copies in the host's memory.

The backend is called "hostgloo".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllreduceOptions

_NARROW = (torch.bfloat16, torch.float16)


def register() -> None:
    """Let ``init_process_group`` take it for abacus tensors."""
    if dist.is_available():
        dist.Backend.register_backend("hostgloo", HostGroup, devices=["abacus"])


class Copied(dist.Work):
    """gloo's work, and what is left to do when it has ended: bringing the result back."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], None]) -> None:
        super().__init__()
        self._works = works
        self._finish = finish
        self._done = False

    def wait(self, timeout: Any = None) -> bool:
        """Block until the result is on the device."""
        if not self._done:
            self._done = True
            for work in self._works:
                work.wait()
            self._finish()
        return True

    def is_completed(self) -> bool:
        """Whether it is."""
        return self._done


class HostGroup(dist.ProcessGroup):
    """A process group whose tensors are on the device; a group of gloo does the work."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._register_backend(
            torch.device("abacus"), dist.ProcessGroup.BackendType.CUSTOM, self._gloo
        )

    def getBackendName(self) -> str:
        """As it was registered."""
        return "hostgloo"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """16-bit floats are added in fp32."""
        hosts = [_wide(t) for t in tensors]
        return _after([self._gloo.allreduce(hosts, opts or AllreduceOptions())], tensors, hosts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """As `allreduce`; the result is on one rank."""
        hosts = [_wide(t) for t in tensors]
        return _after([self._gloo.reduce(hosts, opts)], tensors, hosts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """From one rank to all."""
        hosts = [t.cpu() for t in tensors]
        return _after([self._gloo.broadcast(hosts, opts)], tensors, hosts)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """One tensor per rank."""
        hosts = [torch.empty_like(t, device="cpu") for t in outputs[0]]
        return _after([self._gloo.allgather([hosts], [inputs[0].cpu()])], outputs[0], hosts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """One after the other in one tensor."""
        return self.allgather([list(output.view(self.size(), -1).unbind())], [input.reshape(-1)])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Reduced everywhere; each rank takes its part."""
        total = _wide(input)
        options = AllreduceOptions()
        options.reduceOp = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        mine = total.view(self.size(), -1)[self.rank()].view(output.shape)
        return _after([self._gloo.allreduce([total], options)], [output], [mine])

    def all_to_all_single(
        self, output: Tensor, input: Tensor, taken: list[int], given: list[int], opts: Any = None
    ) -> dist.Work:
        """A part for each rank."""
        host = torch.empty_like(output, device="cpu")
        work = self._gloo.alltoall_base(host, input.cpu(), taken, given)
        return _after([work], [output], [host])

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        """To one rank."""
        hosts = [t.cpu() for t in tensors]
        return Copied([self._gloo.send(hosts, dst, tag)], hosts.clear)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        """From one rank."""
        hosts = [torch.empty_like(t, device="cpu") for t in tensors]
        return _after([self._gloo.recv(hosts, src, tag)], tensors, hosts)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks."""
        return self._gloo.barrier()

    # torch calls these by other names before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(
        "cpu", torch.float32 if tensor.dtype in _NARROW else tensor.dtype, copy=True
    )


def _after(works: Sequence[Any], tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> Copied:
    def finish() -> None:
        with torch.no_grad():
            for tensor, host in zip(tensors, hosts, strict=True):
                tensor.copy_(host)

    return Copied(works, finish)
