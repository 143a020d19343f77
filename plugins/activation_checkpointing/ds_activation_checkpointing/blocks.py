"""Activation checkpointing by config: blocks whose forward is replaced, and the choice by a budget."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state.changes import StandIn, changing
from torch import Tensor, nn

from ds_activation_checkpointing.meter import Meter
from ds_activation_checkpointing.recompute import Options, recompute
from ds_core import comm
from ds_core.context import StashKey
from ds_core.errors import UsageError
from ds_core.process import log_once

if TYPE_CHECKING:
    from ds_core.context import Context

log = logging.getLogger("ds_activation_checkpointing")

# Batch norm changes these without counting their versions.
_STATISTICS = ("running_mean", "running_var")
_CACHES = ("past_key_values", "past_key_value", "layer_past")


class Block(StandIn):
    """The forward of one module, which is recomputed. It takes the place of ``module.forward``."""

    def __init__(self, name: str, module: nn.Module, options: Options, ctx: Context) -> None:
        super().__init__(module)
        self.name = name
        # False where the budget lets it keep its activations.
        self.recomputes = True
        # Until the budget has chosen.
        self.meter: Meter | None = None
        self._options = options
        self._ctx = ctx
        # Whether `_prepare` has run: at the first forward.
        self._ready = False
        # The module's buffers, and those that its last forward changed.
        self._buffers: list[tuple[dict[str, Tensor | None], str]] = []
        self._changing: list[Tensor] = []
        # Places of arguments that may be caches.
        names = list(inspect.signature(module.forward).parameters)
        self._caches = [names.index(name) for name in _CACHES if name in names]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result."""
        if not (self.recomputes and torch.is_grad_enabled()):
            return self.forward(*args, **kwargs)
        # One graph serves all blocks of a class, so it must not depend on their state.
        compiling = torch.compiler.is_compiling()
        if not self._ready and not compiling:
            self._prepare()
        if getattr(self.module, "gradient_checkpointing", False):
            raise UsageError(_TWICE.format(self.name))
        args, kwargs = self._without_caches(args, kwargs)
        return recompute(self.forward if compiling else self._run, args, kwargs, self._options)

    def _prepare(self) -> None:
        """What is known once the model is on its device and its parameters are placed."""
        self._ready = True
        self._buffers = [(m._buffers, key) for m in self.module.modules() for key in m._buffers]
        inside = set(self._ctx.mesh.expand(("dp",)))
        params = self._ctx.params
        # Ranks with other samples that make collectives inside of the block (experts) may want other
        # tensors again: all must run to the end.
        talks = any(
            inside.intersection(params[p].held) for p in self.module.parameters() if p in params
        )
        self._options = dataclasses.replace(self._options, stop_early=not talks, meter=self.meter)

    def _without_caches(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments without caches of keys and values, which a second forward would fill
        again."""
        places = [i for i in self._caches if i < len(args) and _fills(args[i])]
        keys = [key for key in _CACHES if key in kwargs and _fills(kwargs[key])]
        if not (places or keys or kwargs.get("use_cache")):
            return args, kwargs
        log_once(
            log,
            logging.INFO,
            "blocks that are computed again in backward get no cache of keys and values",
        )
        off = {"use_cache": False} if "use_cache" in kwargs else {}
        args = tuple(None if i in places else value for i, value in enumerate(args))
        return args, {**kwargs, **dict.fromkeys(keys), **off}

    def stop_measuring(self) -> None:
        """Go on without the meter."""
        self.meter = None
        self._options = dataclasses.replace(self._options, meter=None)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward.

        What it counts in buffers (running statistics) is counted once.
        """
        if not self._buffers:
            return self.forward(*args, **kwargs)
        if torch._C._current_graph_task_id() == -1:
            before = [
                (b, b._version, key)
                for place, key in self._buffers
                if (b := place.get(key)) is not None
            ]
            out = self.forward(*args, **kwargs)
            self._changing = [
                b for b, version, key in before if b._version != version or key in _STATISTICS
            ]
            return out
        # Inside a backward: the second run, whose changes of buffers are undone.
        values = [buffer.clone() for buffer in self._changing]
        try:
            return self.forward(*args, **kwargs)
        finally:
            with torch.no_grad():
                for buffer, value in zip(self._changing, values, strict=True):
                    buffer.copy_(value)


BLOCKS: StashKey[list[Block]] = StashKey("recomputed blocks")
"""The blocks of this rank, in the order of the model."""

_TWICE = (
    "{} is recomputed twice: by the config (activation_checkpointing) and by the model itself, "
    "where transformers' gradient_checkpointing_enable was called. Leave that out, or "
    "activation_checkpointing.modules, policy and budget"
)


def _fills(value: Any) -> bool:
    return value is not None and not getattr(value, "recompute_safe", False)


def install(
    model: nn.Module, chosen: Mapping[str, nn.Module], options: Options, ctx: Context, measure: bool
) -> None:
    """Recompute the modules `chosen`, by name.

    measure: measure them until `choose_by_budget`.
    """
    if any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        raise UsageError(_TWICE.format("the model"))
    blocks = []
    with changing(model, ctx.undo):
        for name, module in chosen.items():
            block = Block(name, module, dataclasses.replace(options, name=f"module {name!r}"), ctx)
            block.meter = Meter(module) if measure else None
            module.forward = block
            blocks.append(block)
    ctx.stash[BLOCKS] = blocks
    log.info(
        "rank %d computes %d modules again in backward: %s", ctx.rank, len(blocks), _some(chosen)
    )


def _some(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:3]) + (f" ... {found[-1]}" if len(found) > 3 else "")


# -- the budget ------------------------------------------------------------------------------------


def choose_by_budget(ctx: Context, budget: int) -> None:
    """After the first step: let as many blocks keep their activations as `budget` bytes allow.

    Collective, once.

    Those with the most work per byte come first; of equal ones the last, whose activations backward
    frees first.
    """
    blocks = ctx.stash.get(BLOCKS) or []
    if not any(block.meter for block in blocks) and ctx.world_size == 1:
        return
    mine = {
        b.name: [b.meter.full, b.meter.held, b.meter.flops, b.meter.peak]
        for b in blocks
        if b.meter is not None
    }
    everyone = comm.all_gather_json(mine) if ctx.world_size > 1 else [mine]
    # The most of all ranks, so that all choose the same blocks: they make collectives together.
    found = {
        name: [max(r[name][i] for r in everyone if name in r) for i in range(4)] for name in mine
    }
    kept, total = _chosen(list(found.items()), budget)
    for block in blocks:
        block.stop_measuring()
        block.recomputes = block.name not in kept
    least = sum(held * peak for _, held, _, peak in found.values())
    if least > budget:
        log.warning(
            "activation_checkpointing.budget is %d bytes, but %d is the least, with all blocks "
            "computed again",
            budget,
            least,
        )
    most = sum(max(full, held) * peak for full, held, _, peak in found.values())
    again = [block.name for block in blocks if block.recomputes]
    log.info(
        "rank %d: %d of %d blocks are computed again (%s); activations of blocks take %d bytes of "
        "the budget of %d, %d if none were",
        *(ctx.rank, len(again), len(blocks), _some(again), total, budget, most),
    )


def _chosen(found: list[tuple[str, list[int]]], budget: int) -> tuple[set[str], int]:
    """The blocks that are not recomputed, and the bytes that all take then.

    found: full, held, flops, peak by name.
    """
    total = sum(held * peak for _, (_, held, _, peak) in found)
    # Bytes that a block needs more when it keeps its activations, as often as it is alive at once.
    extra = {name: max(0, full - held) * peak for name, (full, held, _, peak) in found}
    place = {name: i for i, (name, _) in enumerate(found)}
    work = {name: flops / (extra[name] or 1) for name, (_, _, flops, _) in found}
    kept = set()
    for name in sorted(extra, key=lambda n: (-work[n], -place[n])):
        measured = found[place[name]][1][3] > 0
        if measured and total + extra[name] <= budget:
            kept.add(name)
            total += extra[name]
    return kept, total
