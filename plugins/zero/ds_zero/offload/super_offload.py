"""SuperOffload: on the host, a bucket is updated while backward still computes the gradients of
others.

[Note: attempts] A bucket that is reduced (`Reducer.on_reduced`) is given to a worker thread, which
saves what it will change, and updates the bucket as if no gradient were non-finite and none were
clipped. The step, which knows better, keeps an attempt if it was made with the very factor and
settings (learning rate) of the step, from gradients that have not changed since; it restores what
any other has changed, and updates those buckets and whatever was not begun with, as plain offload
does. So the result has the same bits in every case, and what is lost at worst is the worker's time.

Attempts are this rank's own affair: ranks need not agree on them. Of parameters that this rank did
not use it is only known after backward whether another rank did, so they are left to the step.
Weights do not change before the step: 16-bit ones are written to memory of their own, or to that
from which the step copies them to the device.

[Note: likely] Attempts are made after a step that was not clipped only, and none while plugins
change gradients.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_core.errors import DSError, UsageError
from ds_core.partition import Stepper
from ds_core.process import log_once
from ds_zero.offload.host_worker import HostWorker
from ds_zero.offload.placement import collects
from ds_zero.offload.tiled_step import settings_of
from ds_zero.reduce.reducer import Reducer
from ds_zero.updates import Updates

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_core.partition import BackwardPlan
    from ds_zero.base import ZeroPartitioner
    from ds_zero.buckets.flat import FlatBucket
    from ds_zero.buckets.records import Fragment
    from ds_zero.reduce.bucket_grads import Grads

log = logging.getLogger("ds_zero")

TIMEOUT = 60.0
"""Seconds that the step waits for the update of one bucket."""

KEY = "zero_optimization.offload_optimizer.super_offload"


class SuperOffload(Updates):
    """Updates that begin during backward.

    share: of this rank's threads, which the worker uses.
    """

    def __init__(self, owner: ZeroPartitioner, share: float) -> None:
        super().__init__(owner)
        # How many attempts steps have kept, and how many were made in vain.
        self.kept = 0
        self.undone = 0

        # -- set-up --
        self._share = share
        self._optimizer: Any = None
        # The buckets on which attempts are made.
        self._spares: dict[FlatBucket, _Spare] = {}

        # -- the worker --
        self._worker: HostWorker | None = None
        # The error to raise after an update did not end; "": there was none.
        self._stuck = ""

        # -- the running step --
        # Whether attempts begin in this backward; [Note: likely].
        self._open = False
        self._likely = False
        self._attempts: dict[FlatBucket, _Attempt] = {}

    def bind(self, optimizer: Optimizer) -> None:
        """See `Updates.bind`."""
        reducer = self.owner.reducer
        ctx = self.owner.ctx
        by_buckets = ctx.grain == "element" and not collects(optimizer)
        if not by_buckets or not hasattr(optimizer, "takes_inputs"):
            raise UsageError(
                f"{KEY}: {type(optimizer).__name__} cannot update one bucket after the other; use "
                "Adam, AdamW, Lion, SGD or Adagrad of dscore-optimizers, by its name in the config's "
                "optimizer section, or set it to false"
            )
        if any(b.masters.evicts is not None for b in reducer.buckets):
            raise UsageError(
                f"{KEY}: needs states that stay in memory; set device cpu, or leave it out"
            )
        # Attempts would be made from gradients that are not final: [Note: likely].
        if takers := ctx.plugins.implementing("ds_gradients"):
            log.info(
                "SuperOffload: no update begins in backward, since plugin %s changes gradients "
                "after it",
                takers[0],
            )
            return
        buckets = [b for b in reducer.buckets if b.masters.copied and b.masters.store is not None]
        if not isinstance(reducer, Reducer) or not buckets:
            log.info(
                "SuperOffload: no update begins in backward: no bucket has masters on the host"
            )
            return
        self._optimizer = optimizer
        self._spares = {b: _Spare(b) for b in buckets}
        reducer.on_reduced = self._reduced
        reducer.on_late = self._late

    # -- during backward ---------------------------------------------------------------------------

    def begin(self, plan: BackwardPlan) -> None:
        """See `Updates.begin`."""
        self._open = bool(self._spares) and self._likely and plan.reduce and not self._stuck
        if self._open and not self._optimizer.takes_inputs:
            self._open = False
            log_once(
                log,
                logging.INFO,
                "SuperOffload: no update begins in backward: the optimizer's step has hooks",
            )

    def _reduced(self, bucket: FlatBucket) -> None:
        """See `Reducer.on_reduced`; called in backward, on autograd's thread."""
        spare = self._spares.get(bucket)
        grads = self.owner.reducer.grads(bucket)
        if not self._open or spare is None or grads is None or bucket in self._attempts:
            return
        if self._worker is None:
            threads = max(1, int(self._share * torch.get_num_threads()))
            self._worker = HostWorker("dscore-zero SuperOffload", threads=threads)
        if self._worker.failed:
            return  # the step says so
        attempt = _Attempt(self._optimizer, spare, grads, self.owner.gradient_hooks.unscaling())
        self._attempts[bucket] = attempt
        attempt.future = self._worker.submit(bucket.about_weights, attempt.make)

    def _late(self, bucket: FlatBucket) -> None:
        """See `Reducer.on_late`."""
        if bucket in self._attempts:
            self._undo()

    # -- after it ----------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, factor: float) -> None:
        """See `Updates.step`."""
        given = list(self.owner.reducer.given)
        settings = _settings(optimizer)
        made = self._finish()
        # Keep attempts that were made as the step would: the others are undone and made again.
        place = 0
        for bucket in self.owner.reducer.buckets:
            attempt = made.get(bucket)
            if attempt is not None and (attempt.factor, attempt.settings) == (factor, settings):
                attempt.keep()
                self.kept += 1
                # These masters are updated: the stepper leaves them as they are.
                for index in attempt.places:
                    given[place + index] = None
            elif attempt is not None:
                attempt.undo()
                self.undone += 1
            place += len(bucket.masters.fragments)
        self._likely = factor == self.owner.gradient_hooks.unscaling()
        if any(g is not None for g in given):
            self.update(optimizer, given, factor)

    def settle(self) -> None:
        """See `Updates.settle`."""
        if self._attempts:
            log_once(
                log,
                logging.INFO,
                "SuperOffload: states or gradients are used between backward and step, so updates "
                "that had begun are undone and made again in the step",
            )
            self._undo()

    def drop(self) -> None:
        """See `Updates.drop`; without a step before it, gradients were not finite, or the user
        dropped them.
        """
        if self._attempts:
            self._likely = False
            self._undo()
        super().drop()

    def close(self) -> None:
        """See `Updates.close`."""
        if not self._stuck:
            self._undo()
        self._worker = None  # its thread ends

    def _undo(self) -> None:
        """Make everything as it was before backward."""
        for attempt in self._finish().values():
            attempt.undo()
            self.undone += 1

    def _finish(self) -> dict[FlatBucket, _Attempt]:
        """End all attempts: those that were made.

        Raises DSError for what went wrong, when all others are undone.
        """
        if self._stuck:
            raise DSError(self._stuck)
        attempts, self._attempts = self._attempts, {}
        failure: tuple[FlatBucket, BaseException] | None = None
        # The step is faster than the worker's threads: what has not begun is left to it.
        for attempt in attempts.values():
            attempt.future.cancel()
        for bucket, attempt in attempts.items():
            if not wait([attempt.future], TIMEOUT).done:
                self._stuck = (
                    f"{self._who} has not updated the {bucket.about_weights} within {TIMEOUT:g} s; "
                    "it is stuck, and states are of no use: end the run, and load a checkpoint"
                )
                raise DSError(self._stuck)
            if not attempt.future.cancelled() and (error := attempt.future.exception()) is not None:
                failure = failure or (bucket, error)
        if failure is not None:
            self._worker = None  # it has stopped; the next step starts another one
            for attempt in attempts.values():
                attempt.undo()
            bucket, error = failure
            what = f"{type(error).__name__}: {error}"
            raise DSError(
                f"{self._who} failed to update the {bucket.about_weights}: {what}"
            ) from error
        return {b: a for b, a in attempts.items() if a.made}

    @property
    def _who(self) -> str:
        return f"rank {self.owner.ctx.rank}: the worker of offload_optimizer.super_offload"


class _Spare:
    """Memory for attempts on one bucket, which is kept: fresh pages cost more than the copies."""

    def __init__(self, bucket: FlatBucket) -> None:
        self.bucket = bucket
        # What an attempt changes is copied here before it: by state, in the layout of the shard.
        self._saved: dict[str, Tensor] = {}
        staged = bucket.masters.staged
        # Whether attempts write 16-bit weights where the step's copy to the device expects them.
        self.steps = staged is not bucket.weights.shard
        # Where attempts write 16-bit weights; None: nowhere. The weights themselves must not change
        # before the step.
        self.copies = staged
        if staged is not None and not self.steps:
            self.copies = torch.empty_like(staged)
        copies = [
            self.copies[p.within] if self.copies is not None and p.numel else None
            for p in bucket.fragments
        ]
        self.stepper = Stepper([p.master for p in bucket.fragments], copies)

    def room(self, key: str, fragment: Fragment, like: Tensor) -> Tensor:
        """Where state `key` of a fragment is saved."""
        flat = self._saved.get(key)
        if flat is None or flat.dtype != like.dtype:
            flat = self._saved[key] = torch.empty(self.bucket.layout.shard_numel, dtype=like.dtype)
        return flat[fragment.within]


@dataclass(slots=True, eq=False)
class _Attempt:
    """The update of one bucket, before the step."""

    optimizer: Any
    spare: _Spare
    source: Grads

    # The factor of gradients and the groups' settings with which it is made.
    factor: float
    settings: list[dict[str, Any]] = field(init=False)

    # The gradient of each fragment; None: it is left to the step.
    grads: list[Tensor | None] = field(init=False)

    # Done when it was made, or cancelled.
    future: Future[None] = field(init=False)

    # The tensors that it has changed, and copies of their earlier values, in the same order.
    changed: tuple[list[Tensor], list[Tensor]] | None = None

    # The optimizer's earlier states of each fragment; None: it had none.
    states: list[tuple[Fragment, dict[str, Any] | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.grads = self.bucket.masters.gradients(self.source)
        self.settings = _settings(self.optimizer)

    @property
    def bucket(self) -> FlatBucket:
        return self.spare.bucket

    @property
    def places(self) -> list[int]:
        """The fragments that it updates."""
        return [i for i, grad in enumerate(self.grads) if grad is not None]

    @property
    def made(self) -> bool:
        """Whether anything was changed."""
        return self.changed is not None

    def make(self) -> None:
        """Update; on the worker's thread."""
        self.source.wait()
        # A scheduler or the user may have changed a setting meanwhile: leave it to the step.
        if not self.optimizer.takes_inputs or _settings(self.optimizer) != self.settings:
            return
        self._save()
        self.spare.stepper.step(self.optimizer, self.grads, self.factor)
        if _settings(self.optimizer) != self.settings:
            raise UsageError(
                f"{type(self.optimizer).__name__} changes its parameter groups in each step, and "
                "buckets are updated "
                "one by one, so it would count them wrongly; set super_offload false"
            )

    @torch.no_grad()
    def _save(self) -> None:
        live: list[Tensor] = []
        saved: list[Tensor] = []
        for place in self.places:
            fragment = self.bucket.fragments[place]
            state = self.optimizer.state.get(fragment.master)
            self.states.append((fragment, None if state is None else dict(state)))
            for key, value in {"": fragment.master, **(state or {})}.items():
                if isinstance(value, Tensor):
                    live.append(value.detach())
                    full = value.shape == fragment.master.shape
                    saved.append(
                        self.spare.room(key, fragment, value) if full else torch.empty_like(value)
                    )
        if live:
            torch._foreach_copy_(saved, live)
        self.changed = live, saved

    @torch.no_grad()
    def undo(self) -> None:
        """Restore what was saved."""
        if self.changed is None:
            return
        live, saved = self.changed
        if live:
            torch._foreach_copy_(live, saved)
        # States that the attempt has made, or replaced by other tensors.
        for fragment, state in self.states:
            if state is None:
                self.optimizer.state.pop(fragment.master, None)
            else:
                self.optimizer.state[fragment.master].clear()
                self.optimizer.state[fragment.master].update(state)
        self.changed = None

    @torch.no_grad()
    def keep(self) -> None:
        """The attempt was right: make its 16-bit weights the bucket's, as the step does."""
        if self.spare.copies is not None and not self.spare.steps:
            fragments = [self.bucket.fragments[i] for i in self.places]
            parts = [self.bucket.weights.parts[i] for i in self.places]
            if parts:
                torch._foreach_copy_(parts, [self.spare.copies[p.within] for p in fragments])


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """`settings_of`, as they are now: a tensor (a learning rate) may change later."""

    def now(value: Any) -> Any:
        return value.tolist() if isinstance(value, Tensor) else value

    return [{k: now(v) for k, v in group.items()} for group in settings_of(optimizer)]
