"""Norms and overflows of what a rank holds, for loops that work on gradients themselves
(``deepspeed.runtime.utils``).

mpu: a model-parallel unit, as Megatron has it: what its ranks hold counts together, and a parameter
that all of them have alike (none that says ``model_parallel`` or ``tensor_model_parallel``) counts
once. The engine needs none of this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ds_core import comm
from ds_core.accelerator import get_accelerator
from ds_core.process import STATE
from ds_deepspeed_compat.utils.bwc import bwc_tensor_model_parallel_rank


def is_model_parallel_parameter(p: Any) -> bool:
    """Whether tensor-parallel ranks have different parts of it, as Megatron marks them."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def has_inf_or_nan(x: Tensor) -> Tensor:
    """Whether a number of `x` is not finite: a bool tensor on its device."""
    values = x._values() if x.is_sparse else x
    if values.numel() == 0:
        return torch.tensor(False, device=values.device)
    # NaN passes through both, and infinity through one: no mask of the size of `x` is made.
    least, most = torch.aminmax(values.detach())
    return ~(torch.isfinite(least) & torch.isfinite(most))


def is_invalid_grad_norm(norm: Any) -> bool:
    """Whether a norm is not finite, or below 0, as functions here give one that was not."""
    if isinstance(norm, Tensor):
        return bool((~torch.isfinite(norm) | (norm < 0)).any())
    return not math.isfinite(norm) or norm < 0


# -- norms -----------------------------------------------------------------------------------------


def get_global_norm(norm_list: Iterable[float]) -> float:
    """The L2 norm of norms; infinite where one of them is not valid."""
    norms = list(norm_list)
    if any(is_invalid_grad_norm(norm) for norm in norms):
        return math.inf
    return math.sqrt(sum(float(norm) ** 2 for norm in norms))


def combine_grad_norm_groups(norm_groups: Iterable[Any], norm_type: float = 2) -> Tensor:
    """The norm of groups' norms; infinite where one of them is not valid."""
    norms = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in norm_groups])
    return (
        norms.new_tensor(math.inf)
        if is_invalid_grad_norm(norms)
        else torch.linalg.vector_norm(norms, norm_type)
    )


def get_global_norm_of_tensors(
    input_tensors: Iterable[Tensor], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> Tensor:
    """The norm of tensors as if they were one, and of those of all ranks of `mpu` and of
    `moe_ep_group`.

    A 0-d fp32 tensor; -1 where it is not finite.
    """
    groups = [] if mpu is None else [mpu.get_model_parallel_group()]
    total = _norm(
        list(input_tensors), norm_type, [*groups, *([] if moe_ep_group is None else [moe_ep_group])]
    )
    return torch.where(torch.isfinite(total), total, -1.0)


def clip_tensors_by_global_norm(
    input_tensors: Iterable[Tensor],
    max_norm: float = 1.0,
    global_norm: Any = None,
    mpu: Any = None,
    eps: float = 1e-6,
) -> Any:
    """Multiply tensors, in place, so that their norm is at most `max_norm`; returns the norm
    before.
    """
    tensors = list(input_tensors)
    if global_norm is None:
        global_norm = get_global_norm_of_tensors(tensors, mpu=mpu)
    factor = max_norm / (global_norm + eps)
    if 0 <= factor < 1:
        for tensor in tensors:
            tensor.detach().mul_(factor)
    return global_norm


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """As torch's, of gradients that this rank, and those of `mpu`, hold whole; the engine clips by
    itself.
    """
    found = [p for p in _listed(parameters) if p.grad is not None]
    total = _norm([p.grad for p in found if _counts(p, mpu)], norm_type, _groups(mpu))
    # A factor of 1 instead of a branch: no value is read from the device.
    factor = (float(max_norm) / (total + 1e-6)).clamp(max=1.0)
    for param in found:
        param.grad.detach().mul_(factor.to(param.grad.device))
    return total


def get_grad_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """The norm of the gradients that this rank, and those of `mpu`, hold; -1 where it is not
    finite.

    ``engine.get_global_grad_norm()`` is that of all ranks.
    """
    found = [p.grad for p in _listed(parameters) if p.grad is not None and _counts(p, mpu)]
    return _or_invalid(_norm(found, norm_type, _groups(mpu)))


def get_flattened_grad_norm(
    parameters: Any,
    norm_type: float = 2,
    mpu: Any = None,
    grad_norm_mask: Sequence[Tensor] | None = None,
) -> float:
    """The norm of gradients of flat parameters; -1 where it is not finite.

    grad_norm_mask: for each parameter with a gradient, rows (begin, end) of what does not count.
    """
    grads = [p.grad.detach() for p in _listed(parameters) if p.grad is not None]
    for place, ranges in enumerate(grad_norm_mask or ()):
        if len(ranges):
            # The gradients themselves stay as they are.
            grads[place] = grads[place].clone()
            for begin, end in ranges.tolist():
                grads[place][begin:end] = 0
    return _or_invalid(_norm(grads, norm_type, _groups(mpu)))


def get_weight_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """The norm of the weights that this rank, and those of `mpu`, hold; -1 where it is not
    finite."""
    found = [
        p
        for p in _listed(parameters)
        if _counts(p, mpu) and not getattr(p, "ds_pipe_replicated", False)
    ]
    return _or_invalid(_norm(found, norm_type, _groups(mpu)))


def get_grad_zeros(parameters: Any, mpu: Any = None) -> float:
    """How many numbers in gradients are 0, on this rank and those of `mpu`."""
    grads = [
        p.grad
        for p in _listed(parameters)
        if p.grad is not None and _counts(p, mpu) and not getattr(p, "ds_pipe_replicated", False)
    ]
    zeros = torch.tensor(
        float(sum(g.numel() - int(torch.count_nonzero(g)) for g in grads)), device=_device(grads)
    )
    for group in _groups(mpu):
        comm.all_reduce(zeros, group=group)
    return float(zeros)


def _norm(tensors: Sequence[Tensor], norm_type: float, groups: Sequence[Any]) -> Tensor:
    """The norm over tensors and over ranks: a power of each is summed, or the largest taken."""
    power = float(norm_type)
    largest = power == math.inf
    each = [torch.linalg.vector_norm(t.detach().float(), power) for t in tensors if t.numel()]
    device = _device(tensors)
    norms = (
        torch.stack([norm.to(device) for norm in each]) if each else torch.zeros(1, device=device)
    )
    total = norms.max() if largest else norms.pow(power).sum()
    for group in groups:
        comm.all_reduce(total, op=ReduceOp.MAX if largest else ReduceOp.SUM, group=group)
    return total if largest else total.pow(1.0 / power)


def _device(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device(get_accelerator().current_device())


def _counts(param: Any, mpu: Any) -> bool:
    """Whether a parameter of this rank counts: the first rank's alone where all have it alike."""
    return (
        mpu is None
        or bwc_tensor_model_parallel_rank(mpu) == 0
        or is_model_parallel_parameter(param)
    )


def _groups(mpu: Any) -> list[Any]:
    return [] if mpu is None else [mpu.get_model_parallel_group()]


def _listed(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _or_invalid(norm: Tensor) -> float:
    value = float(norm)
    return value if math.isfinite(value) else -1.0


# -- overflow --------------------------------------------------------------------------------------


class CheckOverflow:
    """Whether gradients are not finite, on any of the ranks that must agree.

    param_groups: lists of parameters.
    zero_reduce_scatter: all ranks agree.
    mpu: its ranks do.
    deepspeed: an engine that does not reduce by itself makes all ranks agree.

    Ranks with other experts of an engine's agree too.
    """

    def __init__(
        self,
        param_groups: Iterable[Iterable[Tensor]] | None = None,
        mpu: Any = None,
        zero_reduce_scatter: bool = False,
        deepspeed: Any = None,
    ) -> None:
        self.mpu = mpu
        self.zero_reduce_scatter = zero_reduce_scatter
        self.deepspeed = deepspeed
        self.params = (
            None if param_groups is None else [param for group in param_groups for param in group]
        )
        self.has_moe_params = any(_is_expert(param) for param in self.params or ())

    def check(self, param_groups: Iterable[Iterable[Tensor]] | None = None) -> bool:
        """Whether a gradient is not finite, of these groups or of those given at first.

        Collective.
        """
        if param_groups is None:
            return self.has_overflow(self.params or [])
        params = [param for group in param_groups for param in group]
        return self.has_overflow(params, any(_is_expert(param) for param in params))

    def has_overflow(self, params: Iterable[Tensor], has_moe_params: bool | None = None) -> bool:
        """`check` of parameters."""
        all_ranks = (
            self.zero_reduce_scatter
            or getattr(self.deepspeed, "enable_backward_allreduce", True) is False
        )
        return self._agreed(self.has_overflow_serial(params), all_ranks, has_moe_params)

    def check_using_norm(self, norm_group: Iterable[Any], reduce_overflow: bool = True) -> bool:
        """Whether one of these norms is not valid.

        Collective over `mpu`, or over all ranks with reduce_overflow.
        """
        overflow = any(is_invalid_grad_norm(norm) for norm in norm_group)
        return self._agreed(overflow, self.mpu is None and reduce_overflow, None)

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient of this rank is not finite."""
        return any(bool(has_inf_or_nan(p.grad)) for p in params if p.grad is not None)

    @staticmethod
    def _has_inf_or_nan(x: Tensor, i: int = 0) -> Tensor:
        return has_inf_or_nan(x)

    def _agreed(self, overflow: bool, all_ranks: bool, has_moe_params: bool | None) -> bool:
        groups: list[Any] = [None] if all_ranks else _groups(self.mpu)
        mesh = STATE.engines[-1].ctx.mesh if STATE.engines else None
        experts = self.has_moe_params if has_moe_params is None else has_moe_params
        if experts and not all_ranks and mesh is not None and mesh.has("ep"):
            groups.append(mesh.group("ep"))
        if not comm.is_initialized():
            return overflow
        flag = torch.tensor(float(overflow), device=get_accelerator().current_device())
        for group in groups:
            comm.all_reduce(flag, op=ReduceOp.MAX, group=group)
        return bool(flag)


def _is_expert(param: Any) -> bool:
    return not getattr(param, "allreduce", True)
