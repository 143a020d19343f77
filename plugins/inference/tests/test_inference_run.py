"""A divided inference engine is a run like any other: interceptors see it, and ranks compare what
they were given.
"""

from __future__ import annotations

import threading

import pytest
from ds_inference import init_inference
from ds_testing import run_ranks

from ds_core.comm import Collective, Interceptor, add_interceptor, remove_interceptor
from ds_core.errors import RankMismatchError


def small_model() -> object:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=4, vocab_size=32, n_positions=16, pad_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


class Seen(Interceptor):
    """Remembers operations."""

    def __init__(self) -> None:
        self.operations: list[str] = []

    def around(self, collective: Collective, call):  # type: ignore[no-untyped-def]
        self.operations.append(collective.op)
        return call()


def divided() -> tuple[list[str], list[str]]:
    import torch

    engine = init_inference(small_model(), dtype="fp32", tensor_parallel={"tp_size": 2})
    add_interceptor(seen := Seen())
    try:
        engine(input_ids=torch.ones(1, 3, dtype=torch.long))
    finally:
        remove_interceptor(seen)
        engine.destroy()
    return sorted(thread.name for thread in threading.enumerate()), seen.operations


def test_interceptors_see_a_divided_engine() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("ds_comms_guard")
    for threads, operations in run_ranks(2, divided):
        assert "ds_comms_guard watcher" in threads  # it tells which rank waits for which
        assert operations, "no collective of a layer was seen"


def differs() -> str:
    import os

    rank = int(os.environ["RANK"])
    with pytest.raises(RankMismatchError) as caught:
        init_inference(
            small_model(),
            dtype="fp32",
            tensor_parallel={"tp_size": 2, "tp_grain_size": 4 * (1 + rank)},
        )
    return str(caught.value)


def test_ranks_with_other_configs_are_refused() -> None:
    pytest.importorskip("transformers")
    for text in run_ranks(2, differs):
        assert "tp_grain_size" in text
