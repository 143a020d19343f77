"""This rank's part of the planned steps, as batches of torch's DataLoader, at a position that can
be saved.

Every rank plans the steps of all ranks, which costs no communication, and loads its own
micro-batches.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from ds_core.errors import UsageError
from ds_data_sampling.batching.batches import (
    Item,
    TokenBudget,
    by_length,
    by_tokens,
    fixed,
    packed,
    samples_in,
)
from ds_data_sampling.batching.collate import Packer, Padder, Rows
from ds_data_sampling.batching.lengths import Lengths
from ds_data_sampling.batching.mixing import Mixed, concatenated
from ds_data_sampling.batching.order import make_order
from ds_data_sampling.batching.planner import Method, Planner, Step, at_start
from ds_data_sampling.callbacks import callbacks_of
from ds_data_sampling.curricula.index import read_array
from ds_data_sampling.loss_weights import NAME
from ds_data_sampling.lr_scaling import STEP_FACTOR, check_optimizer, scale

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.engine import LoaderRequest
    from ds_data_sampling.batching.order import Order
    from ds_data_sampling.config import DataEfficiency

log = logging.getLogger("ds_data_sampling")

WINDOW = 8  # steps that are planned together with sequence_picking_order seqlen


def make_loader(ctx: Context, request: LoaderRequest, section: DataEfficiency) -> PlannedLoader:
    """The loader that `section` asks for.

    Raises UsageError for data that cannot be indexed, or is empty.
    """
    sampling = section.data_sampling
    data = request.dataset
    if isinstance(data, IterableDataset):
        raise UsageError(
            "data_efficiency.data_sampling chooses samples by index, and training_data is an "
            "IterableDataset; give a "
            "dataset with len() and [], or set data_sampling.enabled to false"
        )
    if (weights := sampling.mixing.weights) is not None:
        data = concatenated(data, weights)
    if not len(data):
        raise UsageError("training_data is empty")
    by_samples = not sampling.dynamic_batching.enabled and not sampling.packing.enabled
    return (SizedLoader if by_samples else PlannedLoader)(ctx, request, section, data)


def _make_order(ctx: Context, section: DataEfficiency, data: Any) -> Order:
    """The order of samples of `data`."""
    mixing = section.data_sampling.mixing
    if mixing.weights is None:
        return make_order(section, len(data), schedules=callbacks_of(ctx).schedules)
    sizes = [len(part) for part in data.datasets]
    return Mixed(
        sizes, list(mixing.weights.values()), mixing.samples_per_epoch or len(data), section.seed
    )


class PlannedLoader:
    """Batches of steps that are planned for all ranks; see `ds_core.engine.Loader`.

    data: a map-style dataset.
    samples_seen: samples in the batches of all ranks yielded so far.
    """

    def __init__(
        self, ctx: Context, request: LoaderRequest, section: DataEfficiency, data: Any
    ) -> None:
        self._ctx = ctx
        self._request = request
        self._data = data
        self._sampling = section.data_sampling
        self._seed = section.seed
        self.batch_size = request.batch_size
        self.samples_seen = 0
        folder = self._sampling.dynamic_batching.metrics_path
        files = (
            partial(read_array, Path(folder) / "seqlen" / "seqlen_sample_to_metric.npy")
            if folder
            else None
        )
        self._lengths = Lengths(data, files)
        self._checked = False
        self._state: Mapping[str, Any] = at_start(0, 0)
        # The next iteration continues at the state; otherwise it is the next epoch.
        self._fresh = True
        self._generator = torch.Generator()
        self._count = _Count()
        self._planner = Planner(
            partial(_make_order, ctx, section, data),
            usable=self._usable(),
            drop_last=request.drop_last,
        )

    # -- iterating ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        state = self._state
        if not self._fresh:
            state = at_start(state["epoch"] + 1, state["step"] + bool(state["done"]))
        if state["epoch"] >= self._sampling.num_epochs:
            log.warning(
                "data_efficiency.data_sampling.num_epochs: all %d epochs are done; there are no "
                "more batches",
                self._sampling.num_epochs,
            )
            return
        self._check()
        self._count = _Count()
        while (yield from self._batches(state)):
            state = self._state
        if self._sampling.dynamic_batching.verbose and self._ctx.rank == 0:
            log.info("epoch %d of the training data: %s", state["epoch"], self._count)
        self._state = at_start(state["epoch"] + 1, self._planner.step)
        self._fresh = True

    def _batches(self, state: Mapping[str, Any]) -> Generator[Any, None, bool]:
        """The batches of the epoch from `state` on; whether steps have another number of
        micro-batches from here on.
        """
        gas = self._ctx.batch.gas
        replicas = self._request.replicas
        method = self._method(gas * replicas)
        done = self._planner.load(state, method.shape, replicas)
        given: deque[tuple[Step, int]] = deque()
        self._generator.manual_seed(self._seed + state["epoch"])  # keeps torch's global one
        turns = range(done // replicas, gas)
        next_step = partial(self._planner.next, method, gas * replicas)
        data: Any = Rows(self._data) if self._sampling.packing.enabled else self._data
        loader: DataLoader[Any] = DataLoader(
            data,
            batch_sampler=_Share(next_step, self._mine, turns, given),
            collate_fn=self._collate(),
            num_workers=self._sampling.num_workers,
            pin_memory=self._sampling.pin_memory,
            generator=self._generator,
        )
        for batch in loader:
            step, turn = given.popleft()
            yield self._enter(step, turn, batch)
            if turn + 1 == gas and self._ctx.batch.gas != gas:
                return True
        return False

    def _mine(self, step: Step, turn: int) -> list[Item]:
        """What this rank loads in the turn `turn` of a step."""
        return step.plan[turn * self._request.replicas + self._request.index]

    def _enter(self, step: Step, turn: int, batch: Any) -> Any:
        """Be at the place after this batch; gives the batch as it is yielded."""
        replicas = self._request.replicas
        done = (turn + 1) * self._request.replicas
        self._state = {**step.state, "done": done}
        self._fresh = False
        self.samples_seen += sum(
            len(samples_in(micro)) for micro in step.plan[done - replicas : done]
        )
        dynamic = self._sampling.dynamic_batching
        if dynamic.verbose and turn == 0:
            self._count.add([[self._tokens(i) for i in samples_in(micro)] for micro in step.plan])
        if dynamic.enabled:
            samples = sum(len(micro) for micro in step.plan)
            self._ctx.stash[STEP_FACTOR] = scale(
                dynamic.lr_scaling_method, samples, self._ctx.batch.train
            )
        callbacks = callbacks_of(self._ctx)
        callbacks.difficulties = difficulties = step.state["order"].get("difficulties", {})
        if (change := callbacks.post_process) is not None:
            batch = change(
                batch, {"curriculum_step": step.number + 1, "current_difficulties": difficulties}
            )
        return batch if self._sampling.loss_weights == "none" else self._weighted(batch, step, turn)

    def _weighted(self, batch: Any, step: Step, turn: int) -> Any:
        """`batch` with what its mean loss is to be multiplied by."""
        if not isinstance(batch, Mapping):
            raise UsageError(
                "data_sampling.loss_weights needs batches that are mappings, and collate_fn "
                "gives a "
                f"{type(batch).__name__}; let it return a dict, whose keys are the arguments of "
                "forward"
            )
        counts = [sum(map(self._counted, samples_in(micro))) for micro in step.plan]
        own = counts[turn * self._request.replicas + self._request.index]
        return {**batch, NAME: torch.tensor(own * len(counts) / sum(counts))}

    def _counted(self, index: int) -> int:
        """How much a sample counts in the loss."""
        if self._sampling.loss_weights == "samples":
            return 1
        return self._tokens(index) - (self._sampling.loss_weights == "targets")

    # -- what batches are made of ------------------------------------------------------------------

    def _method(self, micros: int) -> Method:
        """How steps of `micros` micro-batches are planned."""
        packing = self._sampling.packing
        dynamic = self._sampling.dynamic_batching
        plan: Any
        if packing.enabled:
            shape: dict[str, Any] = {
                "kind": "packed",
                "rows": self.batch_size,
                "tokens": packing.row_tokens,
            }
            plan = partial(
                packed, rows=self.batch_size, capacity=packing.row_tokens, length=self._tokens
            )
        elif not dynamic.enabled:
            shape = {"kind": "fixed", "samples": self.batch_size}
            plan = partial(fixed, size=self.batch_size)
        elif dynamic.sequence_picking_order == "seqlen":
            window = dynamic.sequence_picking_window or (
                1 if self._sampling.curriculum_learning.enabled else WINDOW
            )
            shape = {"kind": "by_length", "budget": astuple(self._budget), "window": window}
            plan = partial(
                by_length, length=self._tokens, budget=self._budget, steps=window, seed=self._seed
            )
        else:
            shape = {"kind": "by_tokens", "budget": astuple(self._budget)}
            plan = partial(by_tokens, length=self._tokens, budget=self._budget)
        return Method(
            plan,
            {name: list(v) if isinstance(v, tuple) else v for name, v in shape.items()}
            | {"micros": micros},
        )

    @property
    def _budget(self) -> TokenBudget:
        dynamic = self._sampling.dynamic_batching
        assert dynamic.max_tokens is not None  # the section has checked it
        return TokenBudget(dynamic.max_tokens, dynamic.min_batch_size, dynamic.max_batch_size)

    def _tokens(self, index: int) -> int:
        """Tokens of a sample, as it is in a batch."""
        packing = self._sampling.packing
        length = self._lengths[index]
        return min(length, packing.row_tokens) if packing.enabled and packing.row_tokens else length

    def _usable(self) -> Callable[[int], bool] | None:
        """Whether a sample fits into a micro-batch; None: any does."""
        packing = self._sampling.packing
        if self._sampling.dynamic_batching.enabled:
            return lambda index: self._budget.fits(self._lengths[index])
        if packing.enabled and packing.long_samples == "drop":
            return lambda index: self._lengths[index] <= packing.row_tokens
        return None

    def _check(self) -> None:
        """Before the first batch: are there samples that do not fit?"""
        if self._checked:
            return
        self._checked = True
        if (engine := self._ctx.engine_ref()) is not None:
            if self._sampling.loss_weights != "none" and not engine.runner.manual:
                raise UsageError(
                    f"data_sampling.loss_weights: {engine.runner.manual_reason}; set it to none"
                )
            if self._sampling.dynamic_batching.lr_scaling_method != "none":
                check_optimizer(engine.optimizer)
        limit, key, rule = self._limit()
        if limit is None:
            return
        too_long = np.flatnonzero(self._lengths.values > limit)
        if not len(too_long):
            return
        longest = int(self._lengths.values.max())
        count = len(self._data)
        found = (
            f"{len(too_long)} of {count} samples have more than {limit} tokens (the longest "
            "has "
            f"{longest})"
        )
        if rule == "error" or (len(too_long) == count and rule == "left out"):
            raise UsageError(
                f"{key}: {found}, such as sample {too_long[0]}; raise it, shorten the samples, or "
                "set "
                "packing.long_samples to truncate or drop"
            )
        if self._ctx.rank == 0:
            log.warning("%s: %s; they are %s", key, found, rule)

    def _limit(self) -> tuple[int | None, str, str]:
        """Most tokens of a sample, the key that says so, and what becomes of longer ones."""
        packing = self._sampling.packing
        dynamic = self._sampling.dynamic_batching
        rules = {"error": "error", "truncate": "cut", "drop": "left out"}
        if packing.enabled:
            return (
                packing.row_tokens,
                "data_sampling.packing.row_tokens",
                rules[packing.long_samples],
            )
        if dynamic.enabled:
            return (
                self._budget.tokens // self._budget.min_samples,
                "data_sampling.dynamic_batching.max_tokens",
                "left out",
            )
        return None, "", ""

    def _collate(self) -> Any:
        """What makes a batch of samples; the user's function where there is one."""
        packing = self._sampling.packing
        token = self._sampling.pad_token_id
        if packing.enabled:
            if self._request.collate_fn is not None:
                raise UsageError(
                    "data_sampling.packing makes the batches itself, and collate_fn is given; "
                    "leave it out, and let "
                    "the dataset give tokens, or mappings with input_ids"
                )
            return Packer(packing.row_tokens, token, truncate=packing.long_samples == "truncate")
        padded = self._sampling.dynamic_batching.enabled
        return self._request.collate_fn or (Padder(token) if padded else None)

    # -- the position ------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is `epoch`; a position within it that was loaded is kept."""
        if epoch != self._state["epoch"] or not self._fresh:
            self._state = at_start(epoch, self._state["step"] + bool(self._state["done"]))
            self._fresh = True

    def set_batch_size(self, samples: int) -> None:
        """Samples (or packed rows) per micro-batch from the next iteration on, which goes on where
        this one is.
        """
        self.batch_size = samples
        self._fresh = True

    def state_dict(self) -> dict[str, Any]:
        """The position: the order's, samples that were taken and not used, and the steps that are
        planned.
        """
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state` at the next iteration; with other batches at the first sample that was
        not used.
        """
        if "window" not in state:
            log.warning(
                "data_efficiency.data_sampling: the checkpoint's position in the data is another "
                "loader's (%s); resuming "
                "at the start of its epoch %s",
                ", ".join(map(str, state)),
                state.get("epoch", 0),
            )
            state = at_start(int(state.get("epoch", 0)), 0)
        self._state = state
        self._fresh = True


class SizedLoader(PlannedLoader):
    """With batches of so many samples, of which there is a known number."""

    def __len__(self) -> int:
        """Batches per epoch on this rank."""
        gas = self._ctx.batch.gas
        samples = len(self._planner)
        step = gas * self._request.replicas * self.batch_size
        return (samples // step if self._request.drop_last else -(-samples // step)) * gas


class _Count:
    """Steps, and what they held."""

    def __init__(self) -> None:
        self.steps = self.micros = self.samples = self.tokens = self.room = 0

    def add(self, step: list[list[int]]) -> None:
        """A step of micro-batches of samples of these lengths."""
        self.steps = self.steps + 1
        self.micros = self.micros + len(step)
        self.samples += sum(map(len, step))
        self.tokens += sum(map(sum, step))
        self.room += sum(len(micro) * max(micro) for micro in step)

    def __str__(self) -> str:
        padding = 1 - self.tokens / max(self.room, 1)
        return (
            f"{self.steps} steps of {self.micros} micro-batches, {self.samples} samples, "
            f"{self.tokens} tokens, and "
            f"{padding:.1%} padding"
        )


class _Share:
    """The items of this rank's micro-batches to the end of the epoch; `given` gets the step and
    turn of each.

    turns: those of the first step; later ones begin at 0.
    """

    def __init__(
        self,
        next_step: Callable[[], Step | None],
        mine: Callable[[Step, int], list[Item]],
        turns: range,
        given: deque[tuple[Step, int]],
    ) -> None:
        self._next = next_step
        self._mine = mine
        self._turns = turns
        self._given = given

    def __iter__(self) -> Iterator[list[Item]]:
        turns = self._turns
        while (step := self._next()) is not None:
            for turn in turns:
                self._given.append((step, turn))
                yield self._mine(step, turn)
            turns = range(turns.stop)
