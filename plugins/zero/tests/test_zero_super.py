"""SuperOffload: updates that begin during backward leave the same bits as those that wait for it."""

from __future__ import annotations

import pytest
import torch
from ds_testing import run_ranks

from plugins.zero.tests.test_zero_offload_numbers import make


def reports(stage: int) -> list[list[int]]:
    """How often each bucket was reported, after every micro-batch and step; the first ends before a late gradient."""
    engine = make({"stage": stage, "offload_optimizer": {"device": "cpu"}}, gradient_accumulation_steps=2)
    reducer = engine.partitioner.reducer
    counts = dict.fromkeys(reducer.buckets, 0)

    def count(bucket: object) -> None:
        counts[bucket] += 1

    reducer.on_reduced = count
    found = []
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 7)))
        found.append(list(counts.values()))
        engine.step()
    engine.backward(engine(torch.ones(2, 7)))
    engine.step()
    engine.backward(engine(torch.ones(2, 7)))
    engine.partitioner.add_gradient(engine.module.inp.weight, torch.ones(24, 7))
    engine.step()
    late = reducer.buckets.index(engine.partitioner.bucket_of[engine.module.inp.weight])
    found.append([list(counts.values())[late]])
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_bucket_is_reported_when_it_has_what_was_accumulated(stage: int) -> None:
    for first, boundary, late in run_ranks(2, reports, stage):
        assert not any(first)  # reduced already from stage 2 on, and more will come
        assert sum(boundary) >= 3 and set(boundary) <= {0, 1}  # frozen ones are never reduced
        assert late == [3]
