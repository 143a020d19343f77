"""Quantised wires of ZeRO stage 3 among experts and inside a pipeline, held to the run without
them.

qwZ: a run whose shards were rounded to 8 bits before it started has the same loss and the same
gradients. qgZ: that run's unreduced gradients bound the error. Every micro-batch is the same one:
with LoCo (`err_beta` 0) what was lost of one is sent with the next, so that the error of the whole
batch is that of one message; without, each message loses the same. The messages themselves are
counted; in a pipeline the sums of ties go with one more of each bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ds_testing import Traffic, run_ranks
from torch import Tensor, nn

D = 24
GAS = 6
GROUP = 512
QUANTISED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
LOCO = {**QUANTISED, "zeropp_loco_param": {"err_beta": 0.0}}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 3 * D), nn.Tanh(), nn.Linear(3 * D, D))


class Experts(nn.Module):
    """Four experts, two to a rank, between two linear layers."""

    def __init__(self) -> None:
        from ds_moe import MoE

        super().__init__()
        options = {"use_rts": False, "drop_tokens": False, "min_capacity": 0}
        self.inp = nn.Linear(D, 2 * D)
        self.out = nn.Linear(2 * D, D)
        self.moe = MoE(D, mlp(), 4, ep_size=2, k=1, **options)  # type: ignore[arg-type]

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.out(torch.tanh(self.inp(x)))
        return (hidden + self.moe(hidden)[0] - labels).square().mean()  # type: ignore[no-any-return]


def experts() -> nn.Module:
    torch.manual_seed(5)
    return Experts()


def transposed(first: nn.Linear, x: Tensor) -> Tensor:
    return x @ first.weight


def pipeline() -> nn.Module:
    """Two stages; the first layer's weight is the last one's too."""
    from ds_pipeline import LayerSpec, PipelineModule, TiedLayerSpec

    specs = [
        TiedLayerSpec("first", nn.Linear, D, 2 * D),
        LayerSpec(nn.Tanh),
        *(LayerSpec(nn.Linear, 2 * D, 2 * D) for _ in range(2)),
        LayerSpec(nn.Tanh),
        TiedLayerSpec("first", nn.Linear, D, 2 * D, forward_fn=transposed),
    ]
    options: dict[str, Any] = {"partition_method": "uniform", "seed_layers": True, "base_seed": 5}
    return PipelineModule(specs, num_stages=2, loss_fn=nn.MSELoss(), **options)


# -- on the ranks ----------------------------------------------------------------------------------


class Unreduced(Traffic):
    """Also keeps what reduce-scatters are given, by label."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[str, list[Tensor]] = {}

    def around(self, collective: Any, call: Callable[[], Any]) -> Any:
        if collective.op == "reduce_scatter_tensor":
            self.sources.setdefault(collective.label, []).append(collective.message.clone())
        return super().around(collective, call)


def rounded(x: Tensor) -> Tensor:
    """What arrives of `x` in 8 bits."""
    steps = [group.abs().max() / 127 for group in x.split(GROUP)]
    groups = zip(x.split(GROUP), steps, strict=True)
    return torch.cat([(g / step).round() * step if step > 0 else g for g, step in groups])


def one_step(
    make: Callable[[], nn.Module], zero: dict[str, Any], extra: dict[str, Any]
) -> dict[str, Any]:
    """The loss, by bucket what a step of SGD took off this rank's shard, and what was sent."""
    import ds_core

    stage3 = {"stage": 3, "param_persistence_threshold": 0, "max_reuse_distance": 0, **zero}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": GAS,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": stage3,
        **extra,
    }
    engine = ds_core.initialize(model=make(), config=config)[0]
    mesh = engine.partitioner.ctx.mesh
    buckets = engine.partitioner.buckets
    if "zero_quantized_weights" not in zero:
        for bucket in buckets:
            bucket.weights.shard.copy_(rounded(bucket.weights.shard))
    before = [bucket.weights.shard.clone() for bucket in buckets]
    batch = torch.randn(2, 4, D, generator=torch.Generator().manual_seed(mesh.index("dp"))).unbind()
    with Unreduced() as traffic:
        if make is pipeline:
            loss = engine.train_batch(iter([batch] * GAS))
        else:
            for _ in range(GAS):
                loss = engine(*batch)
                engine.backward(loss)
                engine.step()
    found = {}
    for bucket, old in zip(buckets, before, strict=True):
        found[bucket.about_gradients] = {
            "ranks": list(mesh.ranks(*bucket.axes)),
            "place": bucket.rank,
            "taken": old - bucket.weights.shard,
            "sources": traffic.sources.get(bucket.about_gradients, []),
            "weights": bucket.about_weights,
        }
    sent = [(c.op, c.bytes, c.label) for c in traffic.sent if " of '" in c.label]
    answer = {"loss": float(loss.detach()), "dp": mesh.size("dp"), "buckets": found, "sent": sent}
    engine.destroy()
    return answer


def compared(kind: str, zero: dict[str, Any], extra: dict[str, Any]) -> list[dict[str, Any]]:
    """The exact run with rounded weights, that of quantised wires, and that with LoCo."""
    make = {"experts": experts, "pipeline": pipeline}[kind]
    return [one_step(make, {**zero, **more}, extra) for more in ({}, QUANTISED, LOCO)]


# -- the comparison --------------------------------------------------------------------------------


def message(bits: int, numel: int) -> int:
    """Bytes of `numel` values and an fp32 scale for each group."""
    return -(-numel * bits // 32) * 4 + -(-numel // GROUP) * 4


def largest(x: Tensor) -> Tensor:
    """The largest size in each element's group."""
    return torch.cat([g.abs().max().expand(len(g)) for g in x.split(GROUP)])


def check_messages(run: dict[str, Any], exact: dict[str, Any], exchanges: dict[int, int]) -> None:
    """All weights and gradients went in 8 and 4 bits: as many messages as in the exact run, of that
    size.

    exchanges: ranks of a bucket -> exchanges of one reduction; with two (blocks of hpZ) ranks have
    copies of weights.
    """
    for label, bucket in run["buckets"].items():
        world = len(bucket["ranks"])
        numel = len(bucket["taken"])
        gathers = {(op, size) for op, size, about in run["sent"] if about == bucket["weights"]}
        # hpZ's copy
        second = {("all_gather_into_tensor", 4 * world * numel)} if exchanges[world] == 2 else set()
        # The last stage uses the weight of the tied layer alone.
        unused = not gathers and bucket["weights"].endswith("'tied.first.bias'")
        assert unused or gathers == {("all_gather_into_tensor", world * message(8, numel)), *second}
        reductions = [(op, size) for op, size, about in run["sent"] if about == label]
        assert {op for op, _ in reductions} == {"all_to_all_single"}
        assert len(reductions) == len(exact["buckets"][label]["sources"]) * exchanges[world] > 0
        assert max(size for _, size in reductions) == world * message(4, numel)


def check(answers: list[list[dict[str, Any]]], exchanges: dict[int, int], counts: set[int]) -> None:
    """counts: messages of a bucket in the exact run."""
    ratios = []
    for exact, coded, loco in answers:
        assert {len(b["sources"]) for b in exact["buckets"].values()} == counts
        for run in (coded, loco):
            check_messages(run, exact, exchanges)
            assert run["loss"] == pytest.approx(exact["loss"], rel=1e-5)
        for label, bucket in exact["buckets"].items():
            holders = [a[0]["buckets"] for a in answers if label in a[0]["buckets"]]
            holders = [h for h in holders if h[label]["ranks"] == bucket["ranks"]]
            mine = bucket["place"]
            numel = len(bucket["taken"])
            shards = [
                [s[mine * numel : (mine + 1) * numel] / exact["dp"] for s in h[label]["sources"]]
                for h in holders
            ]
            total = torch.stack([s for given in shards for s in given]).sum(0)
            # the sources are all that was reduced
            assert torch.allclose(bucket["taken"], total, atol=1e-6)
            sizes = [torch.stack([largest(s) for s in given]) for given in shards]
            again = 1 if exchanges[len(bucket["ranks"])] == 1 else 2.1  # sums are rounded once more
            every = again * sum(s.sum(0) for s in sizes) / 14 + 1e-6
            # LoCo: v = gradient + error is sent last; errors are kept in 8 bits.
            last = again * sum(s.amax(0) for s in sizes) / 13 * (1 + len(sizes[0]) / 254) + 1e-6
            off = (coded["buckets"][label]["taken"] - total).abs()
            assert (off <= every).all(), label
            assert ((loco["buckets"][label]["taken"] - total).abs() <= last).all(), label
            ratios.append(float((off / last).max()))
    # so LoCo's bound tells it from qgZ alone
    assert max(ratios) > (1.5 if max(counts) > 1 else 0.1)


@pytest.mark.fast_cases("pipeline")
@pytest.mark.parametrize(
    ("kind", "extra", "count"),
    [("experts", {}, GAS), ("pipeline", {"pipeline": {"reduce": "micro_batch"}}, GAS + 1)],
    ids=["experts", "pipeline"],
)
def test_equal_to_the_run_without_them(kind: str, extra: dict[str, Any], count: int) -> None:
    check(run_ranks(4, compared, kind, {}, extra), {2: 1, 4: 1}, {count})


@pytest.mark.slow
def test_experts_with_two_exchanges() -> None:
    """Blocks of two ranks: gradients of dense layers go inside blocks, then between them."""
    check(
        run_ranks(4, compared, "experts", {"zero_hpz_partition_size": 2}, {}), {2: 1, 4: 2}, {GAS}
    )


@pytest.mark.slow
def test_a_pipeline_that_reduces_once() -> None:
    check(run_ranks(4, compared, "pipeline", {}, {}), {2: 1}, {1})
