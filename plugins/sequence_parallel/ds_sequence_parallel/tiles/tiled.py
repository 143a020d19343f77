"""Layers and losses computed tile by tile along the sequence, with the memory of one tile.

[Note: tiles] A tiled layer keeps its inputs only. In backward each tile runs again, with the same
random numbers and the same autocast, and gives its gradients before the next begins. Gradients of
weights are summed over tiles, in fp32 for 16-bit weights, and leave the layer once per backward:
partitioners, shared weights and accumulation see one layer.

[Note: gradients in forward] The gradient of a loss is a scalar, so a tiled loss has the gradients
of its inputs already when it ends, and backward multiplies them. It runs no tile twice. fp16 is the
exception: its gradients are only safe with the loss scale, which backward brings, so there tiles
run again as in a layer.

[Note: gathered weights] Weights are read once before the first tile. Under ZeRO-3 the module that
runs thereby gathers them for its whole forward and backward, however many tiles there are, and
ranks may have different numbers of tiles.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ds_run_state.random_streams import STREAMS
from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_sequence_parallel.tiles.autocast import Autocasts
from ds_sequence_parallel.tiles.budget import TileBytes


class TiledMLP:
    """A layer that treats every position alike, such as an MLP, in tiles along the sequence."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        module: nn.Module,
        x: Tensor,
        shards: int | TileBytes,
        compute_params: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """``fn(module, x)``, computed in tiles of `x`.

        fn: returns one tensor with as many positions as it was given.
        x: [..., sequence, width].
        shards: how many tiles, or a budget.
        compute_params: the parameters that `fn` uses; None: all of `module`.

        Raises UsageError in backward when `fn` uses another parameter, and for
        ``create_graph=True``.
        """
        params = weights_of(module) if compute_params is None else list(compute_params)
        return tiled(lambda tile: fn(module, tile), [x], shards, params, owner=module)


class TiledFusedLogitsLoss:
    """Logits and their loss, in tiles along the sequence.

    The logits of one tile are in memory at a time.
    """

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        module: nn.Module,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int | TileBytes,
        compute_params: Sequence[Tensor] | None = None,
        output_reduction: str = "mean",
    ) -> Tensor:
        """The sum or mean over tiles of ``fn(module, x, y)``, or of ``fn(module, x, y, mask)``
        where there is a mask.

        fn: returns a scalar.
        x: [..., sequence, width].
        y, mask: [..., sequence, ...].
        shards, compute_params: as in `TiledMLP`.
        output_reduction: "sum" of the tiles' results, or "mean", in which a tile counts by its
            length. The mean over tokens of which some are ignored is not a mean over tiles: have
            `fn` return a sum, use "sum", and divide it by the number of tokens that count.
        """
        if output_reduction not in ("sum", "mean"):
            raise UsageError(
                "TiledFusedLogitsLoss: output_reduction is 'sum' or 'mean', not "
                f"{output_reduction!r}"
            )
        params = weights_of(module) if compute_params is None else list(compute_params)
        whole = x.shape[_dim(x)]

        def tile_loss(*tiles: Tensor) -> Tensor:
            loss = fn(module, *tiles)
            return loss if output_reduction == "sum" else loss * (tiles[0].shape[_dim(x)] / whole)

        inputs = [x, y] if mask is None else [x, y, mask]
        return tiled(tile_loss, inputs, shards, params, owner=module, loss=True)


def tiled(
    fn: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    shards: int | TileBytes,
    params: Sequence[Tensor],
    *,
    owner: nn.Module | None = None,
    loss: bool = False,
) -> Tensor:
    """``fn(*inputs)`` in tiles.

    inputs: the first is [..., sequence, width]; the others have the same sequence in the same
        dimension.
    loss: `fn` returns a scalar, and the scalars of the tiles are added.
    """
    dim = _dim(inputs[0])
    what = type(owner).__name__ if owner is not None else "tiled"
    length = inputs[0].shape[dim]
    for tensor in inputs[1:]:
        if tensor.dim() <= dim or tensor.shape[dim] != length:
            raise UsageError(
                f"{what}: all inputs of a tiled function have the same length in dimension {dim}, "
                f"where the first has {length}; one has the shape {tuple(tensor.shape)}"
            )
    count = shards.count(fn, inputs, dim, owner) if isinstance(shards, TileBytes) else shards
    if count < 1:
        raise UsageError(f"{what}: the number of tiles is {count}; it must be at least 1")
    # One tile of a layer is the layer. One tile of a loss still saves: its logits are gone when it
    # ends.
    if count == 1 and not loss:
        return fn(*inputs)
    run = _Run(fn, dim, max(1, min(count, length)), loss, owner, len(inputs))
    return _Tiles.apply(run, *inputs, *params)  # type: ignore[no-any-return,no-untyped-call]


def weights_of(module: nn.Module) -> list[Tensor]:
    """The parameters of `module` and all below it, each once. See [Note: gathered weights]."""
    found = (m._parameters[name] for m in module.modules() for name in list(m._parameters))
    return list(dict.fromkeys(p for p in found if p is not None))


# -- autograd --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """What is computed."""

    fn: Callable[..., Tensor]
    dim: int
    """Of the sequence."""
    tiles: int
    loss: bool
    owner: nn.Module | None
    """For messages."""
    inputs: int
    """How many of the tensors are cut into tiles; the others are parameters."""

    def pieces(self, length: int) -> Iterator[tuple[int, int]]:
        """First position and length of each tile; they differ by one at most."""
        ends = [i * length // self.tiles for i in range(self.tiles + 1)]
        return ((a, b - a) for a, b in itertools.pairwise(ends))

    @property
    def what(self) -> str:
        return type(self.owner).__name__ if self.owner is not None else "tiled"


class _Tiles(torch.autograd.Function):
    """``apply(run, *inputs, *params)``."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *tensors: Tensor) -> Tensor:
        needs = ctx.needs_input_grad[1:]
        ctx.run = run
        ctx.grads = None
        device = tensors[0].device.type
        ctx.autocast = Autocasts.now(device)
        # A loss: see [Note: gradients in forward].
        if run.loss and any(needs) and not _is_fp16(tensors, ctx.autocast):
            total, grads = _gradients(run, tensors, needs, None)
            assert total is not None
            ctx.positions = [i for i, g in enumerate(grads) if g is not None]
            ctx.save_for_backward(*[g for g in grads if g is not None])
            ctx.grads = len(grads)
            return total
        # A layer: see [Note: tiles]. The values now; tiles run again in backward from the same
        # random states.
        ctx.random = STREAMS.snapshot() if any(needs) else None
        ctx.params = tensors[run.inputs :]
        ctx.save_for_backward(*tensors[: run.inputs])
        out = _values(run, tensors[: run.inputs])
        if ctx.autocast.enabled:
            # Autocast caches casts of weights; these were made without a graph, and would cut off
            # gradients of later uses.
            torch.clear_autocast_cache()
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        run: _Run = ctx.run
        if torch.is_grad_enabled():
            raise UsageError(
                f"{run.what} is computed in tiles, which give no second derivatives; do without "
                "create_graph=True, or without tiles"
            )
        # A loss is finished: its gradients times that of the scalar.
        if ctx.grads is not None:
            found: list[Tensor | None] = [None] * ctx.grads
            for position, grad in zip(ctx.positions, ctx.saved_tensors, strict=True):
                found[position] = _scale(grad, upstream)
            return None, *found
        tensors = (*ctx.saved_tensors, *ctx.params)
        with ctx.autocast.again(), STREAMS.replay(ctx.random):
            return None, *_gradients(run, tensors, ctx.needs_input_grad[1:], upstream)[1]


def _tile(tensor: Tensor, dim: int, first: int, size: int) -> Tensor:
    """A part without a graph; contiguous, for functions that use ``view``.

    A copy where there are several sequences.
    """
    return tensor.narrow(dim, first, size).detach().contiguous()


def _values(run: _Run, inputs: Sequence[Tensor]) -> Tensor:
    """The output, without a graph."""
    length = inputs[0].shape[run.dim]
    total = _Sum()
    out = None
    for first, size in run.pieces(length):
        tile = run.fn(*[_tile(t, run.dim, first, size) for t in inputs])
        _check(run, tile, size)
        if run.loss:
            total.add(tile)
            continue
        # Allocated at the first tile, whose shape says how wide the output is; tiles are written to
        # their places.
        if out is None:
            out = tile.new_empty([*tile.shape[: run.dim], length, *tile.shape[run.dim + 1 :]])
        out.narrow(run.dim, first, size).copy_(tile)
    found = total.result() if run.loss else out
    assert found is not None
    return found


def _gradients(
    run: _Run, tensors: Sequence[Tensor], needs: Sequence[bool], upstream: Tensor | None
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The sum of a loss's tiles, and the gradient of each of `tensors` that needs one."""
    inputs = tensors[: run.inputs]
    params = tensors[run.inputs :]
    wanted = [p for p, need in zip(params, needs[run.inputs :], strict=True) if need]
    cut = [torch.empty_like(t) if need else None for t, need in zip(inputs, needs, strict=False)]
    sums = [_Sum() for _ in wanted]
    total = _Sum()
    for first, size in run.pieces(inputs[0].shape[run.dim]):
        tiles = [_tile(t, run.dim, first, size) for t in inputs]
        leaves = [
            t.requires_grad_() for t, grad in zip(tiles, cut, strict=True) if grad is not None
        ]
        with torch.enable_grad():
            # Views, as hooks on several gradients (ZeRO-3's, of modules with frozen parameters)
            # cannot ask about leaves inside of autograd.grad.
            out = run.fn(*(t.view_as(t) if t.requires_grad else t for t in tiles))
        _check(run, out, size)
        # Every tile uses the same parameters, so the first is enough.
        if first == 0:
            _refuse_others(run, out, [*leaves, *params])
        given = upstream if upstream is None or run.loss else upstream.narrow(run.dim, first, size)
        # Tensor hooks would run once per tile, with a part of the gradient.
        with _hooks_off(wanted):
            found = iter(_grad(out, [*leaves, *wanted], given))
        for grad in cut:
            if grad is not None:
                part = next(found)
                piece = grad.narrow(run.dim, first, size)
                piece.zero_() if part is None else piece.copy_(part)
        for one in sums:
            one.add(next(found))
        if run.loss:
            total.add(out.detach())
    done = iter(sums)
    return total.result(), [
        *cut,
        *(next(done).result() if need else None for need in needs[run.inputs :]),
    ]


def _grad(out: Tensor, wanted: list[Tensor], given: Tensor | None) -> Sequence[Tensor | None]:
    # A tile that depends on nothing that needs a gradient.
    if not out.requires_grad:
        return [None] * len(wanted)
    return torch.autograd.grad(out, wanted, given, allow_unused=True)


def _scale(grad: Tensor, factor: Tensor) -> Tensor:
    """`grad` times a scalar, in fp32 for 16 bits.

    A factor that is rounded to 16 bits would be a bias, alike for all elements.
    """
    if grad.dtype.itemsize >= 4 or not grad.is_contiguous():
        return (grad * factor.to(torch.promote_types(grad.dtype, torch.float32))).to(grad.dtype)
    out = torch.empty_like(grad)
    # In pieces of 4M elements, so that the fp32 copy stays small.
    for target, part in zip(out.view(-1).split(1 << 22), grad.view(-1).split(1 << 22), strict=True):
        target.copy_(part.float() * factor)
    return out


@contextlib.contextmanager
def _hooks_off(params: Sequence[Tensor]) -> Iterator[None]:
    """Inside, hooks of ``Tensor.register_hook`` do not run: they get the gradient of all tiles,
    when it has arrived.
    """
    hooks = [(p._backward_hooks, dict(p._backward_hooks)) for p in params if p._backward_hooks]
    for live, _ in hooks:
        live.clear()
    try:
        yield
    finally:
        for live, kept in hooks:
            live.update(kept)


class _Sum:
    """A sum over tiles, in fp32 for 16 bits.

    The first is not written to: it may be somebody else's memory.
    """

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self.dtype = torch.float32
        self.count = 0

    def add(self, part: Tensor | None) -> None:
        if part is None:
            return
        if self.value is None:
            self.value = part
            self.dtype = part.dtype
        # Only now a sum: one tile needs neither a copy nor another dtype.
        elif self.count == 1:
            self.value = self.value.to(torch.promote_types(part.dtype, torch.float32)) + part
        else:
            self.value += part
        self.count += 1

    def result(self) -> Tensor | None:
        return None if self.value is None else self.value.to(self.dtype)


def _check(run: _Run, out: Any, size: int) -> None:
    """Raise UsageError when what a tile gave cannot be put together."""
    if not isinstance(out, Tensor):
        raise UsageError(
            f"{run.what}: a tiled function gives one tensor, not a {type(out).__name__}"
        )
    if run.loss and out.numel() != 1:
        raise UsageError(
            f"{run.what}: a tiled loss gives a scalar, not a tensor of shape {tuple(out.shape)}"
        )
    if not run.loss and (out.dim() <= run.dim or out.shape[run.dim] != size):
        raise UsageError(
            f"{run.what}: for a tile of {size} positions in dimension {run.dim} it gave the shape "
            f"{tuple(out.shape)}; only functions that treat all positions the same way can be tiled"
        )


def _refuse_others(run: _Run, out: Tensor, known: Sequence[Tensor]) -> None:
    """Raise UsageError when `out` depends on a leaf of autograd that would get no gradient."""
    for leaf in _leaves(out):
        if not any(leaf is tensor for tensor in known):
            raise UsageError(
                f"{run.what}: the tiled function uses {_name(run.owner, leaf)}, which would get no "
                "gradient; name it in compute_params, or give what it uses as an input"
            )


def _leaves(out: Tensor) -> Iterator[Tensor]:
    """The leaves of autograd that `out` depends on."""
    stack = [out.grad_fn]
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # An AccumulateGrad node.
        if hasattr(node, "variable"):
            yield node.variable
        stack += [above for above, _ in node.next_functions]


def _name(owner: nn.Module | None, tensor: Tensor) -> str:
    names = owner.named_parameters() if owner is not None else ()
    name = next((repr(name) for name, param in names if param is tensor), None)
    return (
        f"parameter {name}"
        if name
        else f"a tensor of shape {tuple(tensor.shape)} that requires a gradient"
    )


def _dim(x: Tensor) -> int:
    if x.dim() < 2:
        raise UsageError(
            "tiles are cut along the last dimension but one; an input has the shape "
            f"{tuple(x.shape)}"
        )
    return x.dim() - 2


def _is_fp16(tensors: Sequence[Tensor], autocast: Autocasts) -> bool:
    return any(t.dtype == torch.float16 for t in tensors) or torch.float16 in autocast.dtypes
