"""Tiles in a model whose code does not know of them: its MLPs, and its logits with their loss.

[Note: deferred logits] A causal language model of transformers computes logits, may scale them, and
passes them to its ``loss_function``. While it is called with labels, its output layer returns
`DeferredLogits` instead, which record the scaling; the loss function then runs output layer, scaling
and the loss that was there before tile by tile. Anything else that is done with deferred logits
computes them, as if there were no tiles.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from ds_run_state.blocks import find_blocks, of_rows_together
from torch import Tensor, nn

from ds_core import comm
from ds_core.errors import UsageError
from ds_core.process import log_once
from ds_sequence_parallel.config import TileConfig, TiledMLPConfig
from ds_sequence_parallel.tiles.budget import TileBytes
from ds_sequence_parallel.tiles.tiled import tiled, weights_of

if TYPE_CHECKING:
    from ds_sequence_parallel.hf import ShardedModel

log = logging.getLogger("ds_sequence_parallel")

_MLP = re.compile(r"(mlp|feed_?forward(network)?|ffn)$", re.IGNORECASE)


def shards_of(section: TileConfig) -> int | TileBytes:
    """The number of tiles, or the budget that a config asks for."""
    return section.shards if section.shards is not None else TileBytes(section.tile_bytes)


def stand_before(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Callable[[], None]:
    """Give each module a forward of its own; returns a function that removes it, where it is still
    there.
    """
    before = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward

    def undo() -> None:
        for module, earlier in before.items():
            if module.__dict__.get("forward") is forwards[module]:
                del module.__dict__["forward"]
                if earlier is not None:
                    module.__dict__["forward"] = earlier

    return undo


# -- layers ----------------------------------------------------------------------------------------


def tile_mlps(model: nn.Module, section: TiledMLPConfig) -> Callable[[], None]:
    """Compute the model's MLPs in tiles: those that the section names, else all whose class is
    called one.

    Gives a function that undoes it. Raises UsageError where there is none.
    """
    key = "sequence_parallel.tiled_mlp.modules"
    if section.modules:
        found = find_blocks(model, section.modules, key, "")
    else:
        called = {
            n: m
            for n, m in model.named_modules()
            if _MLP.search(type(m).__name__) and _has_weights(m)
        }
        # The outermost only: an MLP inside an MLP (an expert, say) is tiled with it.
        inner = {m for outer in called.values() for m in outer.modules() if m is not outer}
        found = {n: m for n, m in called.items() if m not in inner}
    # The MLPs of experts are given rows in an order that tiles would break.
    whole = of_rows_together(model)
    found = {n: m for n, m in found.items() if m not in whole}
    # A stage of a pipeline may have none; an error is raised on all ranks, or none.
    if not any(comm.all_gather_json(bool(found))):
        others = {type(m).__name__ for m in model.modules() if _has_weights(m) and m not in whole}
        aside = ", but for those of experts (ds_moe.MoE)," if whole else ""
        raise UsageError(
            f"{key}: no class of the model{aside} is called an MLP; name some of "
            f"{', '.join(sorted(others))}"
        )
    shards = shards_of(section)
    return stand_before({m: TiledForward(m, shards) for m in found.values()})


def _has_weights(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None


class TiledForward:
    """Stands before the forward of `module`.

    Tensors that are as long as the first are cut, others are passed on.
    """

    def __init__(self, module: nn.Module, shards: int | TileBytes) -> None:
        self.module = module
        self.shards = shards
        self.__wrapped__ = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped forward, tile by tile along the tokens."""
        first = next((a for a in args if isinstance(a, Tensor)), None)
        if first is None or first.dim() < 2:
            return self.__wrapped__(*args, **kwargs)
        # Everything with the first one's leading dimensions belongs to the tokens, and is cut with
        # them.
        lead = first.shape[:-1]
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        cut = [k for k, v in given.items() if isinstance(v, Tensor) and _begins(v, lead)]

        def run(*tiles: Tensor) -> Any:
            now = given | dict(zip(cut, tiles, strict=True))
            return self.__wrapped__(
                *[now[i] for i in range(len(args))], **{k: now[k] for k in kwargs}
            )

        return tiled(
            run, [given[k] for k in cut], self.shards, weights_of(self.module), owner=self.module
        )


def _begins(tensor: Tensor, lead: Sequence[int]) -> bool:
    return tensor.shape[: len(lead)] == torch.Size(lead)


# -- the loss --------------------------------------------------------------------------------------


def tile_loss(
    model: nn.Module, section: TileConfig, sharded: ShardedModel | None = None
) -> Callable[[], None]:
    """Compute the model's logits and loss in tiles; gives a function that undoes it.

    sharded: what cuts the model's sequences, and shifts its labels, if they are cut.

    Raises UsageError for a model of which it is not known how.
    """
    key = "sequence_parallel.tiled_loss"
    name = type(model).__name__
    output = getattr(model, "get_output_embeddings", lambda: None)()
    before = getattr(model, "loss_function", None)
    own = {k: v for k, v in vars(model).items() if k == "_loss_function"}
    if not isinstance(output, nn.Module) or before is None:
        raise UsageError(
            f"{key} is for causal language models of the transformers library, and {name} has no "
            "get_output_embeddings() and loss_function; call ds_sequence_parallel.TiledFusedLogitsLoss in the model"
        )
    if "shift_labels" not in inspect.signature(before).parameters:
        raise UsageError(
            f"{key}: the loss of {name}, {getattr(before, '__name__', before)}, takes no "
            "shift_labels, so it is not one of a causal language model; remove the key"
        )
    head = TiledHead(output)
    forward = stand_before({output: head})
    model.loss_function = TiledLoss(before, head, shards_of(section), sharded)  # type: ignore[assignment]
    place = list(inspect.signature(type(model).forward).parameters).index("labels") - 1

    # Without labels users expect logits: the head computes them as usual.
    def arm(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        labels = args[place] if len(args) > place else kwargs.get("labels")
        head.defers = labels is not None

    def disarm(module: nn.Module, args: Any, output: Any) -> None:
        head.defers = False

    hooks = (
        model.register_forward_pre_hook(arm, with_kwargs=True),
        model.register_forward_hook(disarm, always_call=True),
    )

    def undo() -> None:
        forward()
        model.__dict__.pop("_loss_function", None)
        model.__dict__.update(own)
        for hook in hooks:
            hook.remove()

    return undo


class _Job(NamedTuple):
    """The argument of the output layer by which it computes a loss.

    Through the module, so that hooks that gather its weights (ZeRO-3) run.
    """

    x: Tensor
    """Hidden states."""
    labels: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    shards: int | TileBytes


class TiledHead:
    """Stands before the forward of the output layer."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.__wrapped__ = module.forward
        # Whether the forward under way has labels, and so a loss to come.
        self.defers = False

    def __call__(self, x: Any) -> Any:
        """The head's output, or the loss of tiles where a job asks for it."""
        if isinstance(x, _Job):
            return tiled(
                x.loss,
                [x.x, x.labels],
                x.shards,
                weights_of(self.module),
                owner=self.module,
                loss=True,
            )
        if self.defers and not torch.compiler.is_compiling():
            return DeferredLogits(x, self)
        return self.__wrapped__(x)

    def plain(self, x: Tensor) -> Tensor:
        """Logits, through the module, so that its hooks see it."""
        before = self.defers
        self.defers = False
        try:
            logits: Tensor = self.module(x)
        finally:
            self.defers = before
        return logits


class TiledLoss:
    """Stands before the model's loss function `before`, a mean over tokens in transformers'
    signature.
    """

    def __init__(
        self,
        before: Callable[..., Tensor],
        head: TiledHead,
        shards: int | TileBytes,
        sharded: ShardedModel | None,
    ) -> None:
        self.__wrapped__ = before
        self.head = head
        self.shards = shards
        self.sharded = sharded

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """transformers' loss of `logits`, tile by tile where they are deferred."""
        common = {"vocab_size": vocab_size, "ignore_index": ignore_index, **kwargs}
        items = {"num_items_in_batch": num_items_in_batch, "shift_labels": shift_labels}
        if not isinstance(logits, DeferredLogits):
            return self.__wrapped__(logits=logits, labels=labels, **items, **common)
        # Labels of a part of the sequence are shifted already.
        if self.sharded is not None:
            items = self.sharded.complete(labels, items)
        num_items_in_batch = items["num_items_in_batch"]
        shift_labels = items["shift_labels"]
        if shift_labels is None:
            assert labels is not None
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if num_items_in_batch is None:
            num_items_in_batch = (shift_labels != ignore_index).sum()

        # num_items_in_batch=1 makes the wrapped mean a sum; divided once, behind the last tile.
        def sum_of(x: Tensor, targets: Tensor) -> Tensor:
            tile = logits.change(self.head.__wrapped__(x))
            return self.__wrapped__(
                logits=tile, labels=None, num_items_in_batch=1, shift_labels=targets, **common
            )

        total: Tensor = self.head.module(
            _Job(logits.x, shift_labels.to(logits.x.device), sum_of, self.shards)
        )
        mean: Tensor = total / torch.as_tensor(num_items_in_batch, device=total.device)
        return mean


_SCALING = frozenset(
    {
        "div",
        "true_divide",
        "__truediv__",
        "mul",
        "multiply",
        "__mul__",
        "__rmul__",
        "neg",
        "__neg__",
    }
)
_SCALING |= {"tanh", "float", "to", "contiguous"}
"""Functions, by name, that are recorded and applied to each tile."""
_METADATA = frozenset(
    {"shape", "dtype", "device", "ndim", "layout", "size", "dim", "ndimension", "numel", "nelement"}
)
_METADATA |= {
    "is_contiguous",
    "is_floating_point",
    "stride",
    "requires_grad",
    "grad",
    "grad_fn",
    "is_leaf",
    "__len__",
}


class DeferredLogits(Tensor):
    """Logits of hidden states `x` that are not computed until they are used; see [Note: deferred
    logits].
    """

    x: Tensor
    _head: TiledHead
    _changes: tuple[Callable[[Tensor], Tensor], ...]

    @staticmethod
    def __new__(cls, x: Tensor, head: TiledHead, changes: tuple[Any, ...] = ()) -> DeferredLogits:  # noqa: D102
        width = getattr(head.module, "out_features", 0)
        made = Tensor._make_wrapper_subclass(
            cls, (*x.shape[:-1], width), dtype=x.dtype, device=x.device
        )
        made.x = x
        made._head = head
        made._changes = changes
        return made

    def change(self, logits: Tensor) -> Tensor:
        """What the model would have done to these logits."""
        for change in self._changes:
            logits = change(logits)
        return logits

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"<logits of hidden states of shape {tuple(self.x.shape)}, not computed: the "
            "loss is computed in tiles>"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__ if func.__name__ != "__get__" else func.__self__.__name__
        # Shape and dtype are known without the values.
        if name in _METADATA or name in ("__set__", "__delete__"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        mine = [a for a in args if isinstance(a, DeferredLogits)]
        others = [
            a
            for a in args
            if isinstance(a, Tensor) and not isinstance(a, DeferredLogits) and a.dim()
        ]
        # Elementwise with a number: the same for a tile as for all. Anything else needs the values.
        if name in _SCALING and len(mine) == 1 and not others:
            one = mine[0]

            def change(logits: Tensor) -> Tensor:
                result: Tensor = func(*[logits if a is one else a for a in args], **kwargs)
                return result

            return DeferredLogits(one.x, one._head, (*one._changes, change))
        log_once(
            log,
            logging.WARNING,
            "sequence_parallel.tiled_loss: logits are used beside the loss (by %s), so they are "
            "computed as a whole",
            name,
        )
        return func(*(_compute(a) for a in args), **{k: _compute(v) for k, v in kwargs.items()})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise UsageError(
            f"sequence_parallel.tiled_loss: {func} on logits that are not computed; remove the key"
        )


def _compute(value: Any) -> Any:
    if isinstance(value, DeferredLogits):
        return value.change(value._head.plain(value.x))
    return type(value)(map(_compute, value)) if type(value) in (list, tuple) else value
