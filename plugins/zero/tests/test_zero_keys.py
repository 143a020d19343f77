"""Every key of the section has its effect, seen from outside: collectives, buffers, errors,
memory."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch
from ds_testing import Traffic, run_ranks
from ds_testing.truth import start
from torch import Tensor, nn

D = 8
WEIGHTS = D * D
BIAS = D
PARAMS = 3 * (WEIGHTS + BIAS)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(D, D) for _ in range(3))
        self.seen: list[Any] = []
        self.look: Any = None

    def forward(self, x: Tensor, order: str = "abc") -> Tensor:
        for name in order:
            x = torch.tanh(getattr(self, name)(x))
            if name == "b" and self.look is not None:
                if x.requires_grad:
                    x.register_hook(lambda _: self.seen.append(self.look()))
                else:
                    self.seen.append(self.look())
        return x.square().mean()


def engine_at(stage: int, section: dict[str, Any], **config: Any) -> Any:
    torch.manual_seed(0)
    zero = {"stage": stage, "param_persistence_threshold": 0, **section}
    return start(
        Net(),
        **{
            "micro": 4,
            "clip": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": zero,
            **config,
        },
    )


def data(step: int) -> Tensor:
    from ds_core import comm

    return torch.randn(4, D, generator=torch.Generator().manual_seed(10 * step + comm.rank()))


def step(engine: Any, number: int = 0, **kwargs: Any) -> float:
    loss = engine(data(number), **kwargs)
    engine.backward(loss)
    engine.step()
    value: float = loss.item()
    return value


def sizes(traffic: Traffic) -> dict[str, list[int]]:
    """Operation -> the sizes, in fp32 elements, of what was sent; scalars left out."""
    found: dict[str, list[int]] = {}
    for row in traffic.sent:
        if row.bytes >= 4 * D:
            found.setdefault(row.op, []).append(row.bytes // 4)
    return found


def one_step(stage: int, section: dict[str, Any]) -> dict[str, list[int]]:
    engine = engine_at(stage, section)
    step(engine)
    with Traffic() as traffic:
        step(engine, 1)
    engine.destroy()
    return sizes(traffic)


SCATTER = "reduce_scatter_tensor"
GATHER = "all_gather_into_tensor"
WIRES: list[tuple[int, dict[str, Any], dict[str, list[int]]]] = [
    (1, {}, {SCATTER: [PARAMS], GATHER: [PARAMS]}),
    (2, {}, {SCATTER: [PARAMS], GATHER: [PARAMS]}),
    (2, {"reduce_bucket_size": 80}, {SCATTER: [80, 72, 64], GATHER: [80, 72, 64]}),
    (2, {"reduce_bucket_size": 1}, {SCATTER: [8, 64] * 3, GATHER: [8, 64] * 3}),
    (2, {"allgather_bucket_size": 144}, {SCATTER: [144, 72], GATHER: [144, 72]}),
    (2, {"sub_group_size": 36}, {SCATTER: [72] * 3, GATHER: [72] * 3}),
    (2, {"reduce_scatter": False}, {"all_reduce": [PARAMS], GATHER: [PARAMS]}),
    (
        2,
        {"reduce_scatter": False, "use_multi_rank_bucket_allreduce": False},
        {"reduce": [PARAMS // 2] * 2, GATHER: [PARAMS]},
    ),
    (2, {"allgather_partitions": False}, {SCATTER: [PARAMS], "broadcast": [PARAMS // 2] * 2}),
    # Stage 3: gathered for forward and for backward; what is used again soon is kept in between.
    (3, {"max_reuse_distance": 0}, {SCATTER: [72] * 3, GATHER: [72] * 5}),
    (3, {}, {SCATTER: [72] * 3, GATHER: [72] * 3}),
    (3, {"max_reuse_distance": 71}, {SCATTER: [72] * 3, GATHER: [72] * 5}),
    (3, {"max_reuse_distance": 144}, {SCATTER: [72] * 3, GATHER: [72] * 4}),
    (3, {"allgather_sequential": True}, {SCATTER: [8, 64] * 3, GATHER: [8, 64] * 3}),
    (3, {"use_all_reduce_for_fetch_params": True}, {SCATTER: [72] * 3, "all_reduce": [72] * 3}),
    (3, {"param_persistence_threshold": 9}, {SCATTER: [24] + [64] * 3, GATHER: [24] + [64] * 3}),
    (
        3,
        {"param_persistence_threshold": 9, "model_persistence_threshold": 10},
        {SCATTER: [8, 64, 72, 72], GATHER: [8, 64, 72, 72]},
    ),
    (3, {"module_granularity_threshold": 100}, {SCATTER: [PARAMS], GATHER: [PARAMS]}),
    (3, {"leaf_module": {"classes": "Net"}}, {SCATTER: [PARAMS], GATHER: [PARAMS]}),
    (3, {"leaf_module": {"names": ["", "a", "a"]}}, {SCATTER: [PARAMS], GATHER: [PARAMS]}),
]


@pytest.mark.parametrize(("stage", "section", "expected"), WIRES)
def test_what_travels(stage: int, section: dict[str, Any], expected: dict[str, list[int]]) -> None:
    for found in run_ranks(2, one_step, stage, section):
        assert {op: sorted(sizes) for op, sizes in found.items()} == {
            o: sorted(s) for o, s in expected.items()
        }


def look_in_backward(stage: int, section: dict[str, Any], what: str) -> Any:
    """What `what` is when backward has come through c and stands before b."""
    engine = engine_at(stage, section)
    reducer = engine.partitioner.reducer
    model = engine.module
    model.look = {
        "travelling": lambda: len(reducer._in_flight),
        "copied": lambda: model.c.weight.grad is None,
        "states": lambda: [u.state.value for u in engine.partitioner.units],
        "kept": lambda: [
            u.bucket.full.untyped_storage().nbytes() for u in engine.partitioner.units
        ],
    }[what]
    for number in range(2):
        step(engine, number)
    seen = model.seen[-1]
    peak = engine.partitioner.gathering.peak if stage == 3 else 0
    engine.destroy()
    return {"seen": seen, "peak": peak}


def looked(stage: int, section: dict[str, Any], what: str) -> Any:
    first, second = run_ranks(2, look_in_backward, stage, section, what)
    assert first == second
    return first["seen"]


def test_overlap_comm() -> None:
    small = {"reduce_bucket_size": 72}
    assert looked(2, {**small, "overlap_comm": True}, "travelling") == 1
    assert looked(2, {**small, "overlap_comm": False}, "travelling") == 0
    assert looked(2, small, "travelling") == 0, "off by default below stage 3"
    assert looked(3, {}, "travelling") == 1, "on by default in stage 3"


def test_contiguous_gradients() -> None:
    assert looked(2, {"contiguous_gradients": True}, "copied") is True
    assert looked(2, {"contiguous_gradients": False}, "copied") is False


def test_prefetch_bucket_size() -> None:
    drop = {"max_reuse_distance": 0}
    # Backward has come through c; with room for one unit, b was gathered meanwhile.
    assert looked(3, {**drop, "prefetch_bucket_size": 0}, "states")[1] == "sharded"
    assert looked(3, {**drop, "prefetch_bucket_size": 72}, "states")[1] != "sharded"
    tight = {**drop, "prefetch_bucket_size": 72, "max_live_parameters": 72}
    assert looked(3, tight, "states")[1] == "sharded"


def test_max_live_parameters() -> None:
    for limit, peak in ((72, 72), (144, 144), (10**9, PARAMS)):
        section = {"max_live_parameters": limit}
        assert {a["peak"] for a in run_ranks(2, look_in_backward, 3, section, "states")} == {peak}


@pytest.mark.parametrize("efficient", [True, False])
def test_memory_efficient_linear_keeps_no_gathered_weight(efficient: bool) -> None:
    section = {
        "memory_efficient_linear": efficient,
        "max_reuse_distance": 0,
        "prefetch_bucket_size": 0,
    }
    kept = looked(3, section, "kept")
    assert kept[0] == 0
    assert kept[2] == 0


def check_unused(allowed: bool) -> str:
    from ds_core.errors import UsageError

    engine = engine_at(2, {"ignore_unused_parameters": allowed})
    try:
        step(engine, order="ac")
    except UsageError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_ignore_unused_parameters() -> None:
    assert run_ranks(2, check_unused, True) == ["", ""]
    for told in run_ranks(2, check_unused, False):
        assert "b.weight" in told
        assert "ignore_unused_parameters" in told


def check_parts(section: dict[str, Any]) -> list[int]:
    engine = engine_at(2, {**section, "reduce_bucket_size": 72})
    parts = [b.weights.shard.numel() for b in engine.partitioner.buckets]
    engine.destroy()
    return parts


@pytest.mark.parametrize("spread", [False, True])
def test_round_robin_gradients_every_rank_copies_as_much(spread: bool) -> None:
    first, second = run_ranks(2, check_parts, {"round_robin_gradients": spread})
    assert first == second == [36, 36, 36]


class Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def listen(section: dict[str, Any]) -> list[str]:
    listener = Listener()
    log = logging.getLogger("ds_zero")
    log.addHandler(listener)
    engine = engine_at(3, section)
    for number, order in enumerate(("abc", "abc", "acb", "acb")):
        step(engine, number, order=order)
    engine.destroy()
    log.removeHandler(listener)
    return listener.told


def test_log_trace_cache_warnings() -> None:
    assert run_ranks(2, listen, {}) == [[], []]
    for told in run_ranks(2, listen, {"log_trace_cache_warnings": True}):
        assert len(told) == 1, "one warning, in the step whose order changed"
        assert "c." in told[0]


def test_leaf_modules_that_match_nothing_are_warned_of() -> None:
    leaf = {"classes": ["Nit"], "names": ["a"], "name_suffixes": ["b", "zz"]}
    for told in run_ranks(2, listen, {"leaf_module": leaf}):
        assert len(told) == 2
        assert "'Nit'" in told[0]
        assert "'zz'" in told[1]


def check_sanity(stage: int, checks: bool) -> str:
    from ds_core import comm
    from ds_core.errors import DSError

    engine = engine_at(stage, {"enable_sanity_checks": checks, "param_persistence_threshold": 9})
    step(engine)
    bucket = engine.partitioner.buckets[0]
    owner = bucket.start_gather
    try:
        if comm.rank() == 1:  # a rank whose memory goes bad

            def start_gather(wire: Any) -> Any:
                for work in owner(wire):
                    work.wait()
                bucket.full[0] += 1
                return []

            bucket.start_gather = start_gather
        step(engine, 1)
    except DSError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


@pytest.mark.parametrize("stage", [1, 3])
def test_enable_sanity_checks(stage: int) -> None:
    assert run_ranks(2, check_sanity, stage, False) == ["", ""]
    for told in run_ranks(2, check_sanity, stage, True):
        assert "weights differ between ranks" in told


def check_coalesced(stage: int) -> dict[str, Any]:
    engine = engine_at(stage, {})
    step(engine)
    with Traffic() as traffic:
        with engine.coalesce_grad_reduction():
            for number in range(3):
                engine.backward(engine(data(number)))
            inside = sizes(traffic).get(SCATTER, [])
        outside = sizes(traffic).get(SCATTER, [])
    engine.step()
    engine.destroy()
    return {"inside": len(inside), "outside": sum(outside)}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_coalesced_backwards_travel_once(stage: int) -> None:
    for found in run_ranks(2, check_coalesced, stage):
        assert found == {"inside": 0, "outside": PARAMS}


def trained(section: dict[str, Any] | None, config: dict[str, Any], gas: int) -> dict[str, Tensor]:
    from ds_testing.truth import whole_weights

    config = {**config, "gradient_accumulation_steps": gas}
    engine = engine_at(0 if section is None else 3, section or {}, **config)
    for number in range(3):
        for micro in range(gas):
            loss = engine(
                data(10 * number + micro).to(next(engine.module.buffers(), torch.zeros(1)).dtype)
            )
            held = (
                engine.coalesce_grad_reduction()
                if micro == 0 and gas > 1
                else contextlib.nullcontext()
            )
            with held:
                engine.backward(loss)
            engine.step()
    found: dict[str, Tensor] = whole_weights(engine)
    engine.destroy()
    return found


def worst_of_stages(config: dict[str, Any], gas: int) -> float:
    truth = trained(None, config, gas)
    worst = 0.0
    for stage in (1, 2, 3):
        ours = trained({"stage": stage, "reduce_bucket_size": 80}, config, gas)
        worst = max(worst, *(float((ours[n] - t).abs().max()) for n, t in truth.items()))
    return worst


@pytest.mark.fast_cases("2-config3-1e-06", "2-config1-1e-06", "1-config0-0.002")
@pytest.mark.parametrize(
    ("config", "tolerance"),
    [
        ({"communication_data_type": "bf16"}, 2e-3),
        ({"communication_data_type": "fp32", "gradient_clipping": 0.1}, 1e-6),
        ({"gradient_allreduce_op": "sum"}, 1e-6),
        ({"prescale_gradients": True}, 1e-6),
        ({"gradient_predivide_factor": 2.0}, 1e-6),
        ({"managed_gradient_accumulation": False, "gradient_clipping": 0.1}, 1e-6),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, 1e-2),
    ],
)
@pytest.mark.parametrize("gas", [1, 2])
def test_the_core_s_reduction_keys_mean_the_same(
    config: dict[str, Any], tolerance: float, gas: int
) -> None:
    assert max(run_ranks(2, worst_of_stages, config, gas)) < tolerance


def bits(stage: int, dtype: str) -> dict[str, Tensor]:
    from ds_testing.truth import whole_weights

    # Without clipping: its factor comes from a norm, whose sum runs in another order. Not with
    # fused Adam, which rounds the few elements that do not fill a vector register in another way
    # than the rest.
    sgd = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}}
    config: dict[str, Any] = {"gradient_clipping": 0.0, "optimizer": sgd}
    if dtype != "float32":
        config["bf16" if dtype == "bfloat16" else "fp16"] = {"enabled": True}
    engine = engine_at(stage, {"reduce_bucket_size": 80}, **config)
    for number in range(4):
        engine.backward(engine(data(number).to(getattr(torch, dtype))))
        engine.step()
    found: dict[str, Tensor] = whole_weights(engine)
    engine.destroy()
    return found


@pytest.mark.fast_cases("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_stage_gives_the_bits_of_stage_0(dtype: str) -> None:
    truth = run_ranks(2, bits, 0, dtype)[0]
    for stage in (1, 2, 3):
        ours = run_ranks(2, bits, stage, dtype)[0]
        for name, value in truth.items():
            assert torch.equal(ours[name], value), f"stage {stage}: {name}"
