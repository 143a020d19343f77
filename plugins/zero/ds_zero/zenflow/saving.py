"""What checkpoints keep of ZenFlow, beside weights, masters and optimizer states, which have their
usual names.

For each weight there are numbers (``zenflow/``, see `_NUMBERS`), the columns that are updated on
the device (``zenflow_columns/``, a byte for each), and the sum of its gradients in the interval
that has begun (``zenflow_sum/``). All are by parameter, so a checkpoint loads at any world size,
and one without them begins anew: columns are chosen in the next step. The four dimensions of two of
them tell them from slices of weights (see `ds_run_state.slices`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from ds_run_state.states import StateSource, StateTensor

from ds_zero.buckets.states import fragment_state, param_state

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_zero.zenflow.stepping import ZenFlow
    from ds_zero.zenflow.weight import Weight

_NUMBERS = ("updates", "steps", "since", "warm", "begun", "pending", "used", "rest", "most")
"""How often its columns on the device were updated; of the run, see `ZenFlow`; of this weight, see
`Weight`.
"""


def states(flow: ZenFlow, weight: Weight, store: bool) -> Iterator[StateTensor]:
    """The states of this module of one fragment."""
    fragment = weight.fragment
    place = (weight.bucket, fragment)
    first = store and fragment.start == 0
    if flow.pending and not weight.bucket.masters.differ:  # else masters are saved anyway
        yield fragment_state("master", fragment.master.data, *place, store)
    run = (flow.steps, flow.since, flow.warm, flow.begun, bool(flow.pending))
    own = (weight.used, weight.rest, weight.most)
    numbers = torch.tensor(
        [[[[float(n) for n in (weight.updates, *run, *own)]]]], dtype=torch.float64
    )
    yield param_state("zenflow", numbers, *place, first)
    if not weight.deferred or weight.picked is None:
        return
    mask = torch.zeros(1, 1, 1, weight.columns, dtype=torch.uint8)
    mask[0, 0, 0, weight.picked.cpu()] = 1
    yield param_state("zenflow_columns", mask, *place, first)
    tile = flow.tile_of[weight.bucket]
    if weight.used and tile.sums:
        yield fragment_state("zenflow_sum", tile.sums[0][fragment.within], *place, store)


@torch.no_grad()
def load(flow: ZenFlow, source: StateSource, optimizer: Optimizer | None) -> None:
    """After masters and states were read: read the rest, or begin anew.

    Without optimizer: only follow the masters.
    """
    if optimizer is None:
        for weight in flow.weights:
            flow.follow(weight.fragment)
        return
    flow.begin_anew(optimizer)
    known = set(source.names())
    for tile in flow.tiles:
        for weight in tile.weights:
            if f"zenflow/{weight.fragment.name}" in known:
                _load_weight(flow, weight, source, known)
        if tile.staged is not None:
            tile.staged.copy_(tile.bucket.masters.flat)
    if flow.begun:
        flow.build(flow.weights)


def _load_weight(flow: ZenFlow, weight: Weight, source: StateSource, known: set[str]) -> None:
    """Read the states of one fragment."""
    fragment = weight.fragment
    tile = flow.tile_of[weight.bucket]
    values = source.read(f"zenflow/{fragment.name}").tolist()
    found = dict(zip(_NUMBERS, values, strict=True))
    flow.steps, flow.since, flow.warm = (int(found[k]) for k in ("steps", "since", "warm"))
    flow.begun |= bool(found["begun"])
    weight.updates = int(found["updates"])
    weight.used = bool(found["used"])
    weight.rest = found["rest"]
    weight.most = found["most"]
    if found["pending"]:
        flow.pending = flow.tiles
        if not weight.bucket.masters.differ and f"master/{fragment.name}" in known:
            fragment.master.data.copy_(
                source.read(f"master/{fragment.name}", fragment.start, fragment.stop)
            )
    columns = f"zenflow_columns/{fragment.name}"
    if weight.deferred and columns in known and source.shape(columns)[-1] == weight.columns:
        weight.picked = source.read(columns).nonzero().view(-1).to(weight.bucket.full.device)
    if f"zenflow_sum/{fragment.name}" in known and weight.deferred:
        tile.begin_sum()[fragment.within].copy_(
            source.read(f"zenflow_sum/{fragment.name}", fragment.start, fragment.stop)
        )
