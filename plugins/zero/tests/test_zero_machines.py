"""The small machines of a bucket: where its weights, masters and gradients are, and what it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from ds_zero.buckets.choose import masters_kind
from ds_zero.buckets.evicted import Evicted
from ds_zero.buckets.masters import Deferred, DeviceCopy, InStore, Masters
from ds_zero.buckets.sizes import Place, Sizes
from ds_zero.buckets.weights import EvictedShard, HostShard, Sharded, Weights, weights_kind
from ds_zero.offload.tiled_step import number_rounds
from ds_zero.reduce.bucket_grads import Grads, HostGrads

from ds_core.partition import GradState
from plugins.zero.tests.offload_models import ALL, CPU, STATES, WEIGHTS, make

DISK = {"offload_optimizer": {"device": "disk"}, "offload_param": CPU}


@pytest.mark.parametrize(
    ("weights", "same", "resident", "kind"),
    [
        (Weights, True, None, Masters),
        (Weights, False, None, DeviceCopy),
        (Sharded, True, None, Masters),
        (HostShard, True, None, DeviceCopy),  # the device steps, weights are on the host
        (HostShard, True, True, Masters),  # the host's step updates weights in place
        (HostShard, False, True, InStore),
        (EvictedShard, True, True, InStore),
        (Sharded, True, True, InStore),
        (Weights, True, False, Evicted),
        (EvictedShard, False, False, Evicted),
    ],
)
def test_where_masters_are(
    weights: type[Weights], same: bool, resident: bool | None, kind: type[Masters]
) -> None:
    assert masters_kind(weights, same=same, resident=resident) is kind


def test_masters_that_are_updated_at_other_times() -> None:
    assert masters_kind(Weights, same=True, resident=True, deferred=True) is Deferred


@pytest.mark.parametrize(
    ("sharded", "resident", "kind", "place"),
    [
        (False, None, Weights, Place.DEVICE),
        (False, True, Weights, Place.DEVICE),  # replicated weights are not offloaded
        (True, None, Sharded, Place.DEVICE),
        (True, True, HostShard, Place.HOST),
        (True, False, EvictedShard, Place.DISK),
    ],
)
def test_where_weights_are(
    sharded: bool, resident: bool | None, kind: type[Weights], place: Place
) -> None:
    assert weights_kind(sharded=sharded, resident=resident) is kind
    assert kind.place is place


def sizes_of(weights: Place) -> Sizes:
    """A 16-bit bucket with wide masters."""
    return Sizes(
        total=100,
        shard=50,
        own=48,
        weight=torch.bfloat16,
        master=torch.float32,
        gradient=torch.float32,
        state_bytes=8,
        weights=weights,
    )


def test_new_weights_are_staged_unless_the_step_writes_them_on_the_host() -> None:
    assert InStore.memory(sizes_of(Place.DEVICE)).staged == 50 * 2
    assert InStore.memory(sizes_of(Place.HOST)).staged == 0
    assert DeviceCopy.memory(sizes_of(Place.HOST)).staged == 0


def test_masters_updated_at_other_times_have_no_waiting_gradients() -> None:
    deferred = Deferred.memory(sizes_of(Place.HOST))
    assert (deferred.gradients, deferred.staged) == (0, 50 * 2)
    assert InStore.memory(sizes_of(Place.HOST)).gradients == 50 * 4


def bytes_of(zero: dict[str, Any], dtype: str, folder: Path | None) -> list[tuple[int, int]]:
    """For each trained bucket, what its classes say of masters and weights, and what there is."""
    engine = make(zero, folder, dtype=dtype)
    x = torch.ones(2, 7, dtype=engine.ctx.precision.param or torch.float32)
    engine.backward(engine(x))
    engine.partitioner.settle()
    found = []
    for bucket in engine.partitioner.reducer.buckets:
        if not bucket.trainable:
            continue
        masters = bucket.masters
        grads = engine.partitioner.reducer.grads(bucket)
        host = grads.host if isinstance(grads, HostGrads) else None
        sizes = Sizes(
            total=bucket.layout.total,
            shard=bucket.layout.shard_numel,
            own=sum(p.stop - p.start for p in bucket.fragments),
            weight=bucket.dtype,
            master=masters.dtype,
            gradient=grads.dtype if host is None else host.dtype,
            state_bytes=0,
            weights=bucket.weights.place,
        )
        said = type(masters).memory(sizes)
        there = 0 if masters.flat is bucket.weights.shard else masters.flat.nbytes
        there += 0 if host is None else host.numel() * host.itemsize
        found.append((said.masters + said.gradients, there))
        kept = bucket.weights.shard if bucket.weights.sharded else bucket.full
        found.append((bucket.weights.memory(sizes), kept.nbytes))
    engine.destroy()
    return found


@pytest.mark.fast_cases(
    "offload0-float32",
    "offload1-bfloat16",
    "offload2-float32",
    "offload3-bfloat16",
    "offload4-float32",
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("offload", [{}, STATES, WEIGHTS, ALL, DISK])
def test_memory_is_what_there_is(offload: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    for found in run_ranks(2, bytes_of, {"stage": 3, **offload}, dtype, tmp_path):
        assert found and all(said == there for said, there in found)


def transitions() -> list[str]:
    """What a bucket's gradients say when states are skipped."""
    engine = make({"stage": 2})
    grads: Grads = engine.partitioner.reducer.grads(engine.partitioner.reducer.buckets[0])
    found = [grads.state.value]
    grads.collect().zero_()
    grads.launch()
    found.append(grads.state.value)
    grads.collect()  # a late gradient waits for the next reduction
    found.append(grads.state.value)
    grads.forget()
    found.append(grads.state.value)
    try:
        grads.move(GradState.REDUCED)
    except AssertionError as error:
        found.append(str(error))
    engine.destroy()
    return found


def test_gradients_move_from_local_over_running_to_reduced() -> None:
    *states, message = run_ranks(2, transitions)[0]
    assert states == ["local", "running", "running", "local"]
    assert message.startswith("gradients of ") and message.endswith(": local to reduced")


@pytest.mark.parametrize(
    ("rows", "rounds"),
    [
        # All ranks have the same buckets: one after the other.
        ([[["a", "b"], ["c"]], [["a", "b"], ["c"]]], {"a": 0, "b": 0, "c": 1}),
        # Slices of other sizes are cut elsewhere: what is connected goes together.
        (
            [[["a", "b"], ["c", "d"], ["e"]], [["a"], ["b", "c"], ["d"], ["e"]]],
            dict.fromkeys("abcd", 0) | {"e": 1},
        ),
        # Stages of a pipeline need not wait for each other, nor does one without any.
        ([[["a"], ["b"]], [["c"]], []], {"a": 0, "b": 1, "c": 0}),
        # A tied parameter connects them.
        ([[["t"], ["a"]], [["b"], ["t"]]], {"a": 0, "b": 0, "t": 1}),
    ],
)
def test_rounds_are_the_same_on_all_ranks(
    rows: list[list[list[str]]], rounds: dict[str, int]
) -> None:
    found, count = number_rounds(rows)
    assert found == rounds
    assert count == max(rounds.values()) + 1
