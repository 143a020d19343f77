"""The optimizer step of ZenFlow.

[Note: intervals] Let g be the gradient of a step as any run would use it: reduced, unscaled,
clipped by the norm of all gradients. In every step the optimizer updates the chosen columns of each
weight with g, on the device; so it does with parameters of less than two dimensions. The rest of g
is added up on the host. When an interval of n steps ends, the optimizer updates the rest there with
the mean of these n gradients. Columns are chosen in the first step of an interval, by the norms of
g's columns. Moments of a column stay with it (see `moments.carry`).

With `overlap_step` the host works while the next interval's steps run, and the weights it has made
are taken over at the end of that interval: always then, however fast it was, so that results do not
depend on time. Where columns are chosen meanwhile, the host is waited for: columns that become
chosen come with their newest values.

The host has all of each weight, its optimizer states too; what is chosen lies over it in
`Weight.part`. `fold` writes it back, when others are chosen and before anybody reads what the host
has; `follow` reads it again when that was written. So nothing but this package knows of parts.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_core import comm
from ds_core.errors import UsageError
from ds_core.partition import Stepper
from ds_zero.buckets.masters import Deferred
from ds_zero.offload.host_worker import HostWorker, cores_for
from ds_zero.offload.state_offload import OffloadedStates, OffloadStateTypeEnum
from ds_zero.offload.tiled_step import settings_of
from ds_zero.updates import Updates
from ds_zero.zenflow import saving
from ds_zero.zenflow.columns import important
from ds_zero.zenflow.moments import put_states, steps_of, take_states, twin
from ds_zero.zenflow.pace import Pace
from ds_zero.zenflow.weight import Tile, Weight

if TYPE_CHECKING:
    from ds_run_state.states import StateSource, StateTensor
    from torch.optim import Optimizer

    from ds_zero.base import ZeroPartitioner
    from ds_zero.buckets.flat import FlatBucket
    from ds_zero.buckets.records import Fragment
    from ds_zero.config import ZenFlowConfig


class ZenFlow(Updates):
    """Carries out the steps of one partitioner. See the module's docstring."""

    def __init__(self, owner: ZeroPartitioner, keys: ZenFlowConfig) -> None:
        super().__init__(owner)
        self.ctx = owner.ctx
        self.keys = keys
        self.tiles: list[Tile] = []
        for bucket in owner.reducer.buckets:
            weights = [Weight.of(bucket, p, keys.topk_ratio) for p in bucket.fragments]
            self.tiles.append(Tile(bucket, weights, sum(len(t.weights) for t in self.tiles)))
            assert isinstance(bucket.masters, Deferred)
            bucket.masters.updates = self
        self.weights = [w for t in self.tiles for w in t.weights]
        self.of = {w.fragment: w for w in self.weights}
        self.tile_of = {t.bucket: t for t in self.tiles}

        # -- the interval --
        # Steps in it so far.
        self.steps = 0
        # Steps since columns were chosen, and whether they ever were.
        self.since = 0
        self.begun = False
        # Rounds of warm-up done.
        self.warm = 0
        # Buckets whose new weights on the host are not copied to the device yet.
        self.pending: list[Tile] = []
        self._pace = Pace(self.ctx, keys)

        # -- optimizers --
        # The user's: its arithmetic, groups, and the states of masters.
        self.optimizer: Optimizer | None = None
        # Its twins: with the states of the parts, and with the settings of the last interval.
        self.device: Optimizer | None = None
        self._host: Optimizer | None = None
        self._device_stepper: Stepper
        self._host_stepper: Stepper

        # -- what the host has --
        self._worker: HostWorker | None = None
        # Whether it has the newest values of what is chosen, too.
        self._folded = True
        # The parts and their states, where they are on the host between steps.
        self._offloaded = OffloadedStates(self.ctx.accelerator)

    # -- one step ----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, optimizer: Optimizer, factor: float) -> None:
        """See `Updates.step`. It writes this rank's weights too."""
        self._folded = False
        self._begin(optimizer)
        self._take_gradients()
        if self.warm < self.keys.full_warm_up_rounds:
            # An interval of one step that updates everything on the host.
            self.warm = self.warm + 1
            self.steps = 1
            self._accumulate(factor)
            self._apply(everything=True)
        else:
            self._step(factor)
        for weight in self.weights:
            weight.grad = None
            weight.now = False

    def _step(self, factor: float) -> None:
        # At the beginning of an interval only: the host's sum has all gradients of it, so a column
        # that is chosen no more would be updated again with some that it has had.
        choosing = self.steps == 0 and (self.since >= self._pace.choose_every or not self.begun)
        norms = self._norms() if choosing or self._pace.watches else {}
        if choosing:
            self._choose(norms)
        self._update_parts(factor)
        for weight in self.weights:
            weight.updates += weight.now
        # The host gets all of the gradient; what is chosen of it is overwritten by `fold`.
        self._accumulate(factor)
        self.steps = self.steps + 1
        self.since = self.since + 1
        self._pace.watch(norms, factor)
        if self._pace.ends(self.weights, self.steps):
            self._apply()
        self._write_parts()
        self._offload_states()

    def _begin(self, optimizer: Optimizer) -> None:
        """Have everything at hand that a step needs."""
        self.take(optimizer)
        if self.keys.overlap_step and self._worker is None:
            self._worker = HostWorker(
                "the worker of ZenFlow", cores_for(self.keys.pt_reserved_cores_perc)
            )
        self.bring_states()

    def take(self, optimizer: Optimizer) -> None:
        """Take over the optimizer, unless this was done."""
        if self.optimizer is optimizer:
            return
        self._host = twin(optimizer, self.ctx.kernels)
        self.optimizer = optimizer
        # torch's schedules warn where it never stepped.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        copies = [self._copy_of(tile, w) for tile in self.tiles for w in tile.weights]
        self._host_stepper = Stepper([w.fragment.master for w in self.weights], copies, every=False)

    def _take_gradients(self) -> None:
        reducer = self.owner.reducer
        for weight, grad in zip(self.weights, reducer.given, strict=True):
            found = reducer.grads(weight.bucket)
            weight.now = found is not None and found.used[weight.fragment.index]
            weight.grad = grad
            weight.used |= weight.now
        for tile in self.tiles:
            tile.changed = any(w.now for w in tile.weights)

    def _norms(self) -> dict[Weight, Tensor]:
        """The norm of each column of each weight's gradient, over all its ranks.

        Collective.
        """
        found: dict[Weight, Tensor] = {}
        for axes in sorted({t.bucket.axes for t in self.tiles}):
            mine = [w for w in self.weights if w.bucket.axes == axes and w.deferred]
            if not mine:
                continue
            flat = torch.cat([w.squares() for w in mine])
            if mine[0].bucket.world > 1:
                comm.label("squares of columns, for ZenFlow")
                comm.all_reduce(flat, group=mine[0].bucket.group)
            found |= dict(zip(mine, flat.sqrt_().split([w.columns for w in mine]), strict=True))
        return found

    # -- on the device -----------------------------------------------------------------------------

    def _choose(self, norms: dict[Weight, Tensor]) -> None:
        """Choose columns anew, and move their masters and states to the device; those of others go
        to the host.
        """
        self.fold(norms)
        if not self.begun:
            for weight in self.weights:
                weight.updates = steps_of(_state(self.optimizer, weight.fragment.master))
        for weight, norm in norms.items():
            weight.picked = important(norm, weight.wanted)
        self.build([w for w in self.weights if w.deferred or w.part is None])
        self.begun = True
        self.since = 0
        for tile in self.tiles:
            tile.changed = True  # columns that become chosen have their newest values at once

    def build(self, weights: Sequence[Weight]) -> None:
        """Make the parts of `weights` from the host's masters and states."""
        assert self.optimizer is not None
        old = self.device.state if self.device is not None else {}
        states: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        for weight in set(self.weights) - set(weights):
            if weight.part is not None and weight.part in old:
                states[weight.part] = old[weight.part]
        for weight in weights:
            weight.choose()
            master = weight.fragment.master
            host = self.optimizer.state.get(master, {})
            if weight.part is not None and weight.chosen is not None and host:
                group = self._group_of[master]
                device = weight.part.device
                states[weight.part] = take_states(
                    weight.chosen, host, master, group, weight.updates, device
                )
        self._make_device(states)

    def _make_device(self, states: dict[Tensor, dict[str, Any]]) -> None:
        """Make the device's optimizer of the parts there are now."""
        assert self.optimizer is not None
        parts = {w.fragment.master: w.part for w in self.weights if w.part is not None}
        device = self.device = twin(self.optimizer, self.ctx.kernels)
        device.state = states  # type: ignore[assignment]
        device.param_groups = [
            {**g, "params": [parts[p] for p in g["params"] if p in parts]}
            for g in self.optimizer.param_groups
        ]
        self._device_stepper = Stepper(list(parts.values()), [None] * len(parts), every=False)

    def _update_parts(self, factor: float) -> None:
        """The device's optimizer step."""
        if late := [
            w for w in self.weights if w.grad is not None and not w.deferred and w.part is None
        ]:
            self.build(late)  # they were frozen until now
        assert self.optimizer is not None and self.device is not None
        with_part = [w for w in self.weights if w.part is not None]
        grads = [
            w.chosen.take(w.grad.view(-1)) if w.grad is not None and w.chosen else None
            for w in with_part
        ]
        if not any(g is not None for g in grads):
            return
        # Settings may have changed, such as the learning rate.
        for group, new in zip(self.device.param_groups, settings_of(self.optimizer), strict=True):
            group.update(new)
        kept = settings_of(self.device)
        self._device_stepper.step(self.device, grads, factor)
        self._device_stepper.release()
        if settings_of(self.device) != kept:
            raise UsageError(
                f"zero_optimization.zenflow: {type(self.optimizer).__name__} changes its parameter "
                "groups in each step, and ZenFlow updates parts of them at different times; use an "
                "optimizer that counts per parameter"
            )

    def _write_parts(self) -> None:
        """Write the chosen elements into this rank's weights."""
        for tile in self.tiles:
            found = [w for w in tile.weights if w.part is not None]
            if found and tile.changed:
                with tile.bucket.weights.in_memory(write=True):
                    for weight in found:
                        assert weight.part is not None and weight.chosen is not None
                        part = tile.bucket.weights.parts[weight.fragment.index]
                        weight.chosen.put(part, weight.part.data)

    @property
    def _group_of(self) -> dict[Tensor, dict[str, Any]]:
        """The optimizer's group of each master."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return {p: g for g in groups for p in g["params"]}

    # -- on the host -------------------------------------------------------------------------------

    def _accumulate(self, factor: float) -> None:
        """Add this step's gradients, times `factor`, to the interval's sums on the host."""
        # All copies are started before any job: with no worker a job waits for its copy.
        jobs = []
        for tile in self.tiles:
            if not any(w.now for w in tile.weights):
                continue
            grads = self.owner.reducer.grads(tile.bucket)
            if grads is not None and grads.shard is not None:
                if self._worker is not None:
                    self._worker.wait(tile.adding)
                jobs.append((tile, tile.receive(grads.shard, self.ctx.accelerator, factor)))
        for tile, job in jobs:
            if self._worker is None:
                job()
            else:
                tile.adding = self._worker.submit(
                    f"adding up {tile.bucket.about_gradients}", job, first=True
                )

    def _apply(self, *, everything: bool = False) -> None:
        """End the interval: update the host's masters with the mean gradient.

        everything: also of what is updated on the device otherwise, and at once. Else, with
        overlap, the weights that the last interval has made are taken over, and those of this one
        when the next ends.
        """
        assert self.optimizer is not None and self._host is not None
        # What the last interval has made is taken over now, however long ago it was ready, so that
        # results do not depend on time.
        self.wait()
        self.take_over()
        self._host.state = self.optimizer.state
        # a schedule may change them meanwhile
        self._host.param_groups = [dict(g) for g in self.optimizer.param_groups]
        self.pending = [t for t in self.tiles if t.used]
        for tile in self.pending:
            job = partial(self._update, tile, tile.mean_of(everything), 1.0 / self.steps)
            if self._worker is None or everything:
                job()
            else:
                self._worker.submit(f"the optimizer's step for {tile.bucket.about_weights}", job)
            # The next interval adds up in another buffer while the worker reads this one.
            tile.turn(2 if self.keys.overlap_step else 1)
        for weight in self.weights:
            weight.begin_interval()
        self.steps = 0
        if self._worker is None or everything:
            self.take_over()

    def _update(self, tile: Tile, grads: Sequence[Tensor | None], scale: float) -> None:
        """The host's optimizer step for one bucket."""
        before = [None] * tile.place
        after = [None] * (len(self.weights) - tile.place - len(grads))
        self._host_stepper.step(self._host, [*before, *grads, *after], scale)

    def take_over(self) -> None:
        """Write the weights that the host has made into this rank's; the worker has no jobs."""
        tiles, self.pending = self.pending, []
        for tile in tiles:
            tile.changed = True
            made = tile.bucket.masters.flat if tile.staged is None else tile.staged
            tile.bucket.weights.write(made)
        self.owner.offload.synchronize()

    def changed(self, bucket: FlatBucket) -> bool:
        """See `Updates.changed`."""
        return bucket in self.tile_of and self.tile_of[bucket].changed

    def wait(self) -> None:
        """Wait until the worker has done all that it was given."""
        if self._worker is not None:
            self._worker.wait_all()

    # -- both sides in step ------------------------------------------------------------------------

    def settle(self) -> None:
        """See `Updates.settle`."""
        self.wait()
        if not self._folded:
            self.fold(self.weights)
            self._folded = True

    def fold(self, weights: Iterable[Weight]) -> None:
        """Write their parts, and the states of these, over what the host has; what is not chosen
        there stays.
        """
        self.wait()
        self.bring_states()
        for weight in weights:
            part = weight.part
            chosen = weight.chosen
            master = weight.fragment.master
            if part is None or chosen is None:
                continue
            chosen.put(master.data, part.data)
            if (staged := self.tile_of[weight.bucket].staged) is not None:
                chosen.put(staged[weight.fragment.within], part.data)
            state = _state(self.device, part)
            if state and self.optimizer is not None:
                if not self.optimizer.state.get(master):
                    self.optimizer.state[master] = weight.blank(state)
                host = self.optimizer.state[master]
                if not weight.deferred and "step" in state:
                    host["step"] = copy.deepcopy(state["step"])
                put_states(
                    chosen, state, part.numel(), host, self._group_of[master], steps_of(host)
                )

    def follow(self, fragment: Fragment) -> None:
        """See `DeferredUpdates.follow`."""
        weight = self.of[fragment]
        if weight.part is not None and weight.chosen is not None:
            weight.part.data.copy_(weight.chosen.take(fragment.master.data))
            state = _state(self.device, weight.part)
            host = _state(self.optimizer, fragment.master)
            if state and host:
                place = (
                    fragment.master,
                    self._group_of[fragment.master],
                    weight.updates,
                    weight.part.device,
                )
                for key, value in take_states(weight.chosen, host, *place).items():
                    if isinstance(value, Tensor) and value.dim():
                        state[key].copy_(value)
        if (staged := self.tile_of[weight.bucket].staged) is not None:
            staged[fragment.within].copy_(fragment.master.data)

    def _copy_of(self, tile: Tile, weight: Weight) -> Tensor | None:
        """Where the host's step writes the new weight, where that has another dtype than its
        master.
        """
        bucket = tile.bucket
        if tile.staged is None and bucket.masters.differ:
            tile.staged = tile.buffer(bucket.dtype)
            tile.staged.copy_(bucket.masters.flat)
        empty = tile.staged is None or not weight.fragment.numel
        return None if empty else tile.staged[weight.fragment.within]  # type: ignore[index]

    def begin_anew(self, optimizer: Optimizer) -> None:
        """Forget which columns are chosen, and the interval that has begun; what the host has
        counts.
        """
        self.take(optimizer)
        self.steps = self.since = self.warm = 0
        self.begun = False
        self.pending = []
        self.device = None
        for weight in self.weights:
            weight.picked = weight.chosen = weight.part = None
            weight.begin_interval()
            weight.updates = 0
        for tile in self.tiles:
            tile.begun = False

    def loaded(self, source: StateSource, optimizer: Optimizer | None) -> None:
        """See `Updates.loaded`."""
        saving.load(self, source, optimizer)

    def saved(self, fragment: Fragment, store: bool) -> Iterator[StateTensor]:
        """See `DeferredUpdates.saved`."""
        return saving.states(self, self.of[fragment], store)

    # -- states that are kept on the host (key `offload`) ------------------------------------------

    def bring_states(self) -> None:
        """Have the parts and their states on the device."""
        self._offloaded.reload(non_blocking=True)

    def _offload_states(self) -> None:
        if not self.keys.offload or self.device is None:
            return
        found = [
            v
            for s in self.device.state.values()
            for v in s.values()
            if isinstance(v, Tensor) and v.dim()
        ]
        found += [w.part.data for w in self.weights if w.part is not None]
        self._offloaded.offload(
            OffloadStateTypeEnum.optim_states, found, pin=self._pinned, non_blocking=True
        )

    @property
    def _pinned(self) -> bool:
        store = self.owner.offload.optimizer
        return store is not None and store.pinned

    def close(self) -> None:
        """See `Updates.close`."""
        self.bring_states()
        if self._worker is not None:
            self._worker.close()
        for tile in self.tiles:
            assert isinstance(tile.bucket.masters, Deferred)
            tile.bucket.masters.updates = None


def _state(optimizer: Optimizer | None, updated: Tensor) -> dict[str, Any]:
    """The state that an optimizer has of `updated`; none where there is none."""
    return {} if optimizer is None else optimizer.state.get(updated, {})
