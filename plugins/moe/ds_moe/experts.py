"""The experts of one rank: deep copies of a module, whose parameters are stacked, run without a
loop where possible.

Three ways, the first that fits:

- ``ffn``: the expert is a feed-forward network that `ds_moe.ffn` knows;
- ``grouped``: all its parameters belong to linear layers; each becomes a grouped one, and the
  module's own forward runs once on all rows. That the results are the module's is tried out on a
  few rows when the layer is built, so that a module that mixes rows is found out;
- ``loop``: anything else runs expert by expert.

[Note: lending] A partitioner may give a module its weights only while its forward runs (ZeRO-3). So
code that uses the weights of a `Stack` does so in a function that it is called with.

Dimensions: ``rows`` sorted by expert, ``hidden``, ``out``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_moe.ffn import ffn, match
from ds_moe.kernels.grouped import Groups, grouped_linear

if TYPE_CHECKING:
    from jaxtyping import Float

    from ds_core.kernels import Kernels


class Stack(nn.Module):
    """The parameters and buffers of `count` copies of a module, in the same tree, with a first
    dimension for copies.
    """

    def __init__(
        self, module: nn.Module, count: int, known: dict[nn.Parameter, nn.Parameter] | None = None
    ) -> None:
        super().__init__()
        known = {} if known is None else known
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            self.register_parameter(name, _stack_param(param, count, known))
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            # As in the module: a buffer that is not saved there is not saved here.
            kept = name not in module._non_persistent_buffers_set
            self.register_buffer(
                name, buffer.detach().expand(count, *buffer.shape).clone(), persistent=kept
            )
        for name, child in module.named_children():
            self.add_module(name, Stack(child, count, known))

    def forward(self, use: Callable[[], Tensor]) -> Tensor:
        """``use()``, while the parameters of this module (not of those below it) are there."""
        return use()


class GroupedLinear(nn.Module):
    """`count` copies of a linear layer; `groups` must be set before it is called."""

    def __init__(
        self, linear: nn.Linear, count: int, known: dict[nn.Parameter, nn.Parameter]
    ) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        bias = linear._parameters["bias"]
        self.weight = _stack_param(cast(nn.Parameter, linear.weight), count, known)
        self.bias = None if bias is None else _stack_param(bias, count, known)
        self.groups: Groups | None = None

    def forward(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        """`F.linear` of each row with its expert's weight; rows are sorted by expert."""
        assert self.groups is not None
        return grouped_linear(x, self.weight, self.bias, self.groups)


def _stack_param(
    param: nn.Parameter, count: int, known: dict[nn.Parameter, nn.Parameter]
) -> nn.Parameter:
    # Tied parameters of the expert stay tied: one stack for both names.
    if param not in known:
        if param.dim() and param.numel() == 0:
            raise UsageError(
                f"a parameter of the expert has shape {tuple(param.shape)}, so its values are not "
                "here; build the "
                "MoE layer where its expert has them (outside of ds_zero.Init)"
            )
        values = param.detach().expand(count, *param.shape).clone()
        known[param] = nn.Parameter(values, requires_grad=param.requires_grad)
        # The stack has one more dimension in front, so a dimension that counts from the front moves
        # by one.
        if (dim := partition_dim(param)) is not None:
            known[param].partition_dim = dim + 1 if dim >= 0 else dim  # type: ignore[attr-defined]
    return known[param]


def partition_dim(tensor: Tensor) -> int | None:
    """The dimension along which tensor-parallel ranks have cut a parameter, under the name that
    Megatron-LM gave it.

    -1: it is the same on all of them; None: unknown, or sharded in stripes (``partition_stride``).
    """
    dim = getattr(tensor, "partition_dim", None)
    stride = getattr(tensor, "partition_stride", 1)
    return dim if isinstance(dim, int) and stride == 1 else None


class Experts(nn.Module):
    """`count` deep copies of `expert`, a module of one argument ``[rows, hidden]``.

    Its parameters have the expert's names below ``stacked``, and one more dimension, the first, for
    the copies.
    """

    # See `ds_run_state.blocks.ROWS_TOGETHER`: rows are sorted by expert, and counted.
    ds_rows_together = True

    def __init__(self, expert: nn.Module, count: int, hidden_size: int) -> None:
        super().__init__()
        self.count = count
        # What the expert computes, if it is a known feed-forward network.
        self.what = match(expert)
        # "ffn", "grouped" or "loop", see the module's docstring.
        self.way = "ffn" if self.what is not None else "loop"
        self.stacked: nn.Module = Stack(expert, count)
        # The run's kernels; None: the reference functions.
        self.kernels: Kernels | None = None
        # The module that `loop` calls, without weights; in a list, so that it is no child.
        self._plain: list[nn.Module] = []
        if self.what is None:
            grouped = _make_grouped(expert, count)
            if grouped is not None and _agree(expert, hidden_size):
                self.way = "grouped"
                self.stacked = grouped
            else:
                self._plain = [copy.deepcopy(expert).to("meta")]

    def forward(
        self, rows: Float[Tensor, "rows hidden"], groups: Groups
    ) -> Float[Tensor, "rows ..."]:
        """The experts' output for rows that are sorted by expert, also for no rows at all."""
        if self.way == "grouped":
            return _first(_run_grouped(self.stacked, rows, groups))
        # Each module that owns weights wraps the next in its forward, so that all weights are lent
        # while `use` runs; see [Note: lending].
        owners = [m for m in self.stacked.modules() if m._parameters]
        use: Callable[[], Tensor] = functools.partial(
            self._ffn if self.what is not None else self._loop, rows, groups
        )
        for owner in owners:
            use = functools.partial(owner, use)
        return use()

    def _ffn(self, rows: Tensor, groups: Groups) -> Tensor:
        what = self.what
        assert what is not None
        names = [n for n in (what.up, what.gate, what.down) if n is not None]
        linears = [(n, self.stacked.get_submodule(n)) for n in names]
        weights = {f"{n}.{p}": getattr(m, p, None) for n, m in linears for p in ("weight", "bias")}
        # Compiled kernels know nothing of autocast; the reference does.
        if self.kernels is None or torch.is_autocast_enabled(rows.device.type):
            return ffn(rows, what, weights, groups)
        done: Tensor = self.kernels.serving("expert_ffn", rows)(rows, what, weights, groups)
        return done

    def _loop(self, rows: Tensor, groups: Groups) -> Tensor:
        module = self._plain[0]
        module.train(self.training)
        tensors = list(_tensors(self.stacked))
        # One dictionary of weights per expert: views of the stacks, so gradients reach the stacked
        # parameters.
        parts = [
            dict(zip((n for n, _ in tensors), ts, strict=True))
            for ts in zip(*(t.unbind() for _, t in tensors), strict=True)
        ]
        # An expert without parameters (an activation, say).
        if not parts:
            parts = [{}] * self.count
        outs = [
            _first(torch.func.functional_call(module, part, (x,)))
            for part, x in zip(parts, rows.split(groups.sizes), strict=True)
        ]
        return torch.cat(outs)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, read one by one, as a module's own forward reads them."""
    for prefix, owner in module.named_modules():
        for name in (*owner._parameters, *owner._buffers):
            tensor = getattr(owner, name)
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, tensor


def _first(out: Any) -> Tensor:
    """An expert may give a tuple, whose first is what counts."""
    return cast(Tensor, out[0] if isinstance(out, tuple) else out)


def _make_grouped(expert: nn.Module, count: int) -> nn.Module | None:
    """`expert` with grouped linear layers; None if it has parameters or buffers elsewhere."""
    owned = {
        p
        for m in expert.modules()
        if type(m) is nn.Linear
        for p in m._parameters.values()
        if p is not None
    }
    if not owned or any(p not in owned for p in expert.parameters()) or list(expert.buffers()):
        return None
    if isinstance(expert, nn.Linear):
        return GroupedLinear(expert, count, {})
    known: dict[nn.Parameter, nn.Parameter] = {}
    # deepcopy takes what the memo has for a copy already made: the copy has grouped layers in the
    # places of linear ones.
    memo: dict[int, Any] = {
        id(m): GroupedLinear(m, count, known) for m in expert.modules() if type(m) is nn.Linear
    }
    return copy.deepcopy(expert, memo)


def _run_grouped(module: nn.Module, rows: Tensor, groups: Groups) -> Any:
    linears = [m for m in module.modules() if isinstance(m, GroupedLinear)]
    # The module's forward passes rows only, so its layers are given the groups by an attribute.
    for linear in linears:
        linear.groups = groups
    try:
        return module(rows)
    finally:
        for linear in linears:
            linear.groups = None


def _agree(expert: nn.Module, hidden_size: int) -> bool:
    """Whether grouped linear layers give, on a few rows of two different experts, what the module
    gives for each.
    """
    first = next(expert.parameters())
    if first.device.type == "meta":
        return False
    devices = [first.device] if first.device.type != "cpu" else []
    with torch.random.fork_rng(devices, enabled=True), torch.no_grad():
        torch.manual_seed(0)
        # Two experts with different weights, in fp64, so that a difference is not rounding.
        twins = [copy.deepcopy(expert).eval().double() for _ in range(2)]
        for param in twins[1].parameters():
            param.add_(torch.randn_like(param), alpha=0.1)
        pair = _make_grouped(twins[0], 2)
        assert pair is not None
        for (_, both), *each in zip(
            pair.named_parameters(), *(t.parameters() for t in twins), strict=True
        ):
            both.copy_(torch.stack(each))
        rows = torch.randn(7, hidden_size, dtype=torch.float64, device=first.device)
        # Groups of different sizes: a module that mixes rows, or normalizes over them, shows.
        groups = Groups(torch.tensor([4, 3], device=first.device))
        try:
            ours = _first(_run_grouped(pair.eval(), rows, groups))
            theirs = torch.cat(
                [_first(t(x)) for t, x in zip(twins, rows.split([4, 3]), strict=True)]
            )
        except Exception:  # its forward does more with linear layers than to call them
            return False
        return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)
