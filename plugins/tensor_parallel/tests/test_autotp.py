"""Models of transformers by config alone: losses and weights equal those of one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from ds_testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

from ds_testing.truth import difference, plain, train
from tp_models import ADAMW, FAMILIES, hugging_face, ids, settings, texts, weights_off

STEPS = 3


def errors_of_stages(
    world: int, kind: str, tp: int, stages: list[int], keys: dict[str, Any], sizes: Any = None
) -> dict[str, float]:
    import ds_core

    dp = world // tp
    truth = hugging_face(kind, **(sizes or {}))
    losses = plain(truth, texts, STEPS, count=dp, optimizer=ADAMW)
    off = {}
    for stage in stages:
        model = hugging_face(kind, **(sizes or {}))
        engine, *_ = ds_core.initialize(model=model, config=settings(tp, stage, **keys))
        got = train(engine, texts, STEPS)
        off[f"losses, stage {stage}"] = difference(got, losses)
        off[f"weights, stage {stage}"] = weights_off(engine, truth)
        engine.destroy()
    return off


@pytest.mark.fast_cases("tp2-gpt2")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("world", "tp", "stages"),
    [(2, 2, [0, 3]), pytest.param(4, 2, [0, 1, 2, 3], marks=pytest.mark.slow)],
    ids=["tp2", "tp2-dp2"],
)
def test_trains_as_one_process(kind: str, world: int, tp: int, stages: list[int]) -> None:
    for rank, off in enumerate(run_ranks(world, errors_of_stages, world, kind, tp, stages, {})):
        assert max(off.values()) < 1e-12, f"rank {rank}: {off}"


@pytest.mark.parametrize(
    ("tp", "keys"),
    [(2, {"num_key_value_heads": 1}), pytest.param(3, {}, marks=pytest.mark.slow)],
    ids=["one", "two"],
)
def test_fewer_heads_of_keys_than_ranks(tp: int, keys: dict[str, Any]) -> None:
    """Each rank computes keys and values for its own queries, from weights that all have."""
    for rank, off in enumerate(run_ranks(tp, errors_of_stages, tp, "few", tp, [0, 3], {}, keys)):
        assert max(off.values()) < 1e-12, f"rank {rank}: {off}"


MORE: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    *((kind, 2, {}, {}) for kind in (*FAMILIES, "t5", "mpt", "qwen3")),
    ("t5", 4, {}, {}),  # its table of relative positions is cut into heads
    ("mpt", 4, {}, {}),
    ("qwen3", 3, {}, {}),  # norms of heads, whose gradients are summed
    ("qwen3", 3, {"sequence_parallel": True}, {}),
    ("qwen3", 3, {}, {"num_attention_heads": 2}),  # an attention that stays whole, with its norms
    ("few", 3, {"tp_overlap_comm": True}, {"attention_bias": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tp", "keys", "sizes"), MORE)
def test_every_stage(kind: str, tp: int, keys: dict[str, Any], sizes: dict[str, Any]) -> None:
    for rank, off in enumerate(
        run_ranks(tp, errors_of_stages, tp, kind, tp, [1, 2, 3], keys, sizes)
    ):
        assert max(off.values()) < 1e-6, f"rank {rank}: {off}"  # models compute some of it in fp32


def trained_later(stage: int) -> float:
    """Norms of heads are frozen until `initialize` is over: how far their gradients are off, beside
    their size.
    """
    import torch
    from ds_access import safe_get_full_grad

    import ds_core

    truth = hugging_face("qwen3")
    model = hugging_face("qwen3")
    norms = {n: p for n, p in model.named_parameters() if "q_norm" in n or "k_norm" in n}
    for param in norms.values():
        param.requires_grad_(False)
    config = {key: value for key, value in settings(3, stage).items() if key != "optimizer"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = ds_core.initialize(model=model, config=config, optimizer=optimizer)
    for param in norms.values():
        param.requires_grad_(True)
    batch = ids(0, 0)
    truth(input_ids=batch, labels=batch).loss.backward()
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    wanted = {n: p.grad for n, p in truth.named_parameters() if n in norms}
    off = max(
        float((safe_get_full_grad(p) - wanted[n]).abs().max() / wanted[n].abs().max())
        for n, p in norms.items()
    )
    engine.destroy()
    return off


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_frozen_may_be_trained_later(stage: int) -> None:
    assert max(run_ranks(3, trained_later, stage)) < 1e-6


@pytest.mark.fast_cases("even-llama")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("world", "tp", "stages"),
    [(2, 2, [0]), pytest.param(3, 3, [0], marks=pytest.mark.slow)],
    ids=["even", "uneven"],
)
def test_tokens_divided_between_layers(kind: str, world: int, tp: int, stages: list[int]) -> None:
    """Megatron's sequence parallelism; 8 tokens do not divide by 3, nor do 4 heads."""
    for rank, off in enumerate(
        run_ranks(world, errors_of_stages, world, kind, tp, stages, {"sequence_parallel": True})
    ):
        assert max(off.values()) < 1e-12, f"rank {rank}: {off}"


def overlapped(kind: str) -> dict[str, Any]:
    """As `compare`; also whether sums over the ranks were started while there was other work."""
    from ds_core.comm import Collective, Interceptor, Order, add_interceptor, remove_interceptor

    class Watch(Interceptor):
        order = Order.OBSERVE
        started = 0

        def around(self, collective: Collective, call: Any) -> Any:
            if "input of column-parallel layers" in collective.label:
                self.started += bool(collective.arguments["async_op"])
            return call()

    watch = Watch()
    add_interceptor(watch)
    try:
        off = errors_of_stages(2, kind, 2, [0], {"tp_overlap_comm": True})
    finally:
        remove_interceptor(watch)
    return {"off": off, "started": watch.started}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_sums_of_gradients_go_on_behind_those_of_weights(kind: str) -> None:
    for found in run_ranks(2, overlapped, kind):
        assert max(found["off"].values()) < 1e-12, found
        # attention and MLP of two blocks, and the head
        assert found["started"] == STEPS * (2 * 2 + 1)
