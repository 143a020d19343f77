"""ZenFlow follows its definition, written down in `zenflow_reference`, to rounding; at every stage
and world size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from ds_testing import run_ranks
from ds_testing.kits.train.partitioner import PartitionerConformance
from torch import Tensor, nn

CPU = {"device": "cpu"}
STEPS = 11


class Net(nn.Module):
    """Odd sizes, a frozen weight, one of three dimensions, and one that is used in some steps
    only."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(7, 12)
        self.mid = nn.Linear(12, 12, bias=False)
        self.kept = nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)
        self.cube = nn.Parameter(torch.randn(3, 4, 12) / 3)
        self.some = nn.Linear(12, 5)
        self.out = nn.Linear(12, 1)
        self.kept.weight.requires_grad_(False)

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        x = torch.tanh(self.inp(x))
        x = self.norm(self.kept(torch.tanh(self.mid(x))) + x)
        x = x + torch.einsum("bi,jki->bjk", x, self.cube).flatten(1)
        loss = self.out(x).square().mean()
        return loss + self.some(x).square().mean() if extra else loss


def make(zero: dict[str, Any], **more: Any) -> tuple[Any, Net]:
    import ds_core

    torch.manual_seed(0)
    model = Net().to(more.pop("dtype", torch.float64))
    small = {"reduce_bucket_size": 70, "param_persistence_threshold": 13, "offload_optimizer": CPU}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.3,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.02, "weight_decay": 0.1, "betas": [0.8, 0.95]},
        },
        "zero_optimization": {**small, **zero},
        "plugins": {"load": more.pop("load", [])},
        **more,
    }
    engine, *_ = ds_core.initialize(model=model, model_parameters=groups_of(model), config=config)
    return engine, model


def groups_of(model: Net) -> list[dict[str, Any]]:
    odd = [p for n, p in model.named_parameters() if p.requires_grad and "i" in n]
    even = [p for n, p in model.named_parameters() if p.requires_grad and "i" not in n]
    return [{"params": odd}, {"params": even, "lr": 0.01, "weight_decay": 0.0}]


def batch(step: int, number: int, dtype: torch.dtype = torch.float64) -> Tensor:
    seed = 1000 * step + number
    return torch.randn(2, 7, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_steps(engine: Any, which: range, gas: int = 1) -> None:
    from ds_core import comm

    for step in which:
        for micro in range(gas):
            number = micro * comm.world_size() + comm.rank()
            x = batch(step, number, engine.ctx.precision.param or torch.float64)
            engine.backward(engine(x, step % 3 != 1))
            engine.step()


def whole(engine: Any) -> dict[str, Tensor]:
    from ds_testing.truth import whole_weights

    found: dict[str, Tensor] = whole_weights(engine)
    return found


def referred(keys: dict[str, Any], batches: int, choose_every: int) -> dict[str, Tensor]:
    """The weights after training in one process."""
    from plugins.zero.tests.zenflow_reference import Reference

    torch.manual_seed(0)
    model = Net().double()
    groups = groups_of(model)
    base = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-8}
    reference = Reference([{**base, **g} for g in groups], keys, choose_every)
    for step in range(STEPS):
        for number in range(batches):
            (model(batch(step, number), step % 3 != 1) / batches).backward()
        trained = [p for g in groups for p in g["params"]]
        grads = {p: p.grad for p in trained}
        norm = float(torch.stack([g.norm() for g in grads.values() if g is not None]).norm())
        factor = min(1.0, 0.3 / (norm + 1e-6))
        reference.step({p: None if g is None else g * factor for p, g in grads.items()})
        model.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def followed(zero: dict[str, Any], keys: dict[str, Any], gas: int, choose_every: int) -> float:
    """The largest difference between the engine's weights and the reference's."""
    from ds_core import comm

    engine, _ = make({**zero, "zenflow": keys}, gradient_accumulation_steps=gas)
    make_steps(engine, range(STEPS), gas)
    found = whole(engine)
    engine.destroy()
    return far(found, referred(keys, comm.world_size() * gas, choose_every))


def far(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    return max(float((found[n].double() - truth[n].double()).abs().max()) for n in truth)


STEP = {"topk_ratio": 0.25, "select_strategy": "step"}


@pytest.mark.fast_cases("3-keys4-1-6-2", "1-keys5-1-100-2")
@pytest.mark.parametrize(
    ("stage", "keys", "gas", "choose_every", "world"),
    [
        pytest.param(
            1, {**STEP, "select_interval": 4, "update_interval": 2}, 1, 4, 1, marks=pytest.mark.slow
        ),
        pytest.param(
            2, {**STEP, "select_interval": 3, "update_interval": 3}, 2, 3, 2, marks=pytest.mark.slow
        ),
        (
            3,
            {**STEP, "select_interval": 4, "update_interval": 2, "full_warm_up_rounds": 3},
            1,
            4,
            4,
        ),
        (2, {**STEP, "select_interval": 2, "update_interval": 2, "overlap_step": True}, 1, 2, 2),
        (
            3,
            {
                **STEP,
                "select_interval": 6,
                "update_interval": 3,
                "overlap_step": True,
                "offload": True,
            },
            1,
            6,
            2,
        ),
        (
            1,
            {
                "topk_ratio": 0.5,
                "auto_ratio": 0.4,
                "overlap_step": True,
                "pt_reserved_cores_perc": 0.0,
            },
            1,
            100,
            2,
        ),
        (
            3,
            {"topk_ratio": 0.3, "select_strategy": "step", "select_interval": 1, "auto_ratio": 0.9},
            1,
            1,
            2,
        ),
        pytest.param(2, {"topk_ratio": 0, "update_interval": 1}, 1, 100, 1, marks=pytest.mark.slow),
        pytest.param(1, {"topk_ratio": 1, "update_interval": 4}, 1, 100, 2, marks=pytest.mark.slow),
    ],
)
def test_follows_the_reference(
    stage: int, keys: dict[str, Any], gas: int, choose_every: int, world: int
) -> None:
    assert max(run_ranks(world, followed, {"stage": stage}, keys, gas, choose_every)) < 1e-12


class TestEverythingInEveryStep(PartitionerConformance):
    """With an interval of one step the columns of both sides are updated in each: what any
    partitioner does.
    """

    config: ClassVar[Mapping[str, Any]] = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": CPU,
            "offload_param": CPU,
            "zenflow": {**STEP, "topk_ratio": 0.5, "select_interval": 1, "update_interval": 1},
            "reduce_bucket_size": 200,
            "param_persistence_threshold": 10,
            "prefetch_bucket_size": 150,
        }
    }
    refused = "zero_optimization.zenflow: the choice of columns needs each matrix whole"

    @pytest.mark.parametrize(
        ("name", "how", "world"),
        [
            pytest.param("plain-fp32-clip", "manual", 1, marks=pytest.mark.slow),
            pytest.param("shared", "direct", 2, marks=pytest.mark.slow),
            pytest.param("unused", "train_batch", 2, marks=pytest.mark.slow),
            ("groups", "direct", 4),
        ],
    )
    def test_trains_as_one_process(self, name: str, how: str, world: int) -> None:
        super().test_trains_as_one_process(name, how, world)

    @pytest.mark.parametrize(
        ("name", "clip"), [pytest.param("ep2", 0.05, marks=pytest.mark.slow), ("pp2-tp2", 0.05)]
    )
    def test_products_of_axes(self, name: str, clip: float) -> None:
        super().test_products_of_axes(name, clip)


# -- 16 bits ---------------------------------------------------------------------------------------

DTYPES: dict[str, dict[str, Any]] = {
    "bfloat16": {"bf16": {"enabled": True}},
    "float16": {"fp16": {"enabled": True, "loss_scale": 64}},
}


def unlike_offload(zero: dict[str, Any], dtype: str, keys: dict[str, Any]) -> tuple[float, int]:
    """The difference from plain offload where everything is updated in every step; and steps that
    were skipped.
    """
    found = []
    for more in ({}, {"zenflow": keys}):
        engine, _ = make({**zero, **more}, dtype=torch.float32, **DTYPES[dtype])
        make_steps(engine, range(3))
        engine.backward(
            engine(batch(3, 0, engine.ctx.precision.param), True)
            * (math.inf if dtype == "float16" else 1)
        )
        engine.step()
        make_steps(engine, range(4, 6))
        found.append(whole(engine))
        skipped = engine.skipped_steps
        engine.destroy()
    return far(found[0], found[1]), skipped


@pytest.mark.parametrize(
    ("stage", "dtype", "keys"),
    [
        pytest.param(
            1, "bfloat16", {"topk_ratio": 1, "update_interval": 1}, marks=pytest.mark.slow
        ),
        (2, "float16", {"topk_ratio": 0, "update_interval": 1}),
        pytest.param(
            3,
            "float16",
            {"topk_ratio": 0.5, "update_interval": 1, "full_warm_up_rounds": 6},
            marks=pytest.mark.slow,
        ),
        (3, "bfloat16", {"topk_ratio": 0.5, "update_interval": 1}),
    ],
)
def test_updating_everything_in_every_step_is_plain_offload(
    stage: int, dtype: str, keys: dict[str, Any]
) -> None:
    for difference, skipped in run_ranks(2, unlike_offload, {"stage": stage}, dtype, keys):
        assert difference == 0
        assert skipped == (dtype == "float16")


# -- checkpoints and access to states --------------------------------------------------------------

LATE = {**STEP, "select_interval": 4, "update_interval": 2, "overlap_step": True}
AUTO = {"topk_ratio": 0.3, "auto_ratio": 0.6, "full_warm_up_rounds": 2}


def saved(folder: str, zero: dict[str, Any], steps: int) -> None:
    from ds_core import comm

    gas = 4 // comm.world_size()
    engine, _ = make(zero, gradient_accumulation_steps=gas)
    make_steps(engine, range(steps), gas)
    engine.save_checkpoint(folder, tag="now")
    make_steps(
        engine, range(steps, steps + 1), gas
    )  # saving has changed nothing that would fail now
    engine.destroy()


def resumed(folder: str, zero: dict[str, Any], steps: int) -> tuple[dict[str, Tensor], bool]:
    from ds_core import comm

    gas = 4 // comm.world_size()
    engine, _ = make(zero, gradient_accumulation_steps=gas)
    make_steps(engine, range(40, 43), gas)  # what is replaced is not empty
    engine.load_checkpoint(folder, tag="now")
    make_steps(engine, range(steps, STEPS), gas)
    found = whole(engine)
    began = getattr(engine.partitioner.updates, "begun", True)
    engine.destroy()
    return found, began


@pytest.mark.fast_cases("keys2-4-6-source2-target2")
@pytest.mark.parametrize(
    ("keys", "choose_every", "steps", "source", "target"),
    [
        (LATE, 4, 5, (2, 2), (3, 4)),
        pytest.param(AUTO, 100, 6, (3, 4), (1, 1), marks=pytest.mark.slow),
        (LATE, 4, 6, (1, 1), (1, 1)),
    ],
)
def test_resumes_in_the_middle_of_an_interval(
    keys: dict[str, Any], choose_every: int, steps: int, source: Any, target: Any, tmp_path: Any
) -> None:
    run_ranks(source[1], saved, str(tmp_path), {"stage": source[0], "zenflow": keys}, steps)
    answers = run_ranks(
        target[1], resumed, str(tmp_path), {"stage": target[0], "zenflow": keys}, steps
    )
    truth = referred(keys, 4, choose_every)
    assert max(far(found, truth) for found, _ in answers) < 1e-12


def test_checkpoints_go_between_runs_with_and_without_it(tmp_path: Any) -> None:
    plain = {"stage": 2}
    with_it = {"stage": 3, "zenflow": AUTO}
    run_ranks(2, saved, str(tmp_path / "plain"), plain, 5)
    run_ranks(2, saved, str(tmp_path / "with"), with_it, 5)
    assert run_ranks(2, resumed, str(tmp_path / "plain"), with_it, 5)[0][1]
    found, _ = run_ranks(2, resumed, str(tmp_path / "with"), plain, 5)[0]
    assert all(bool(t.isfinite().all()) for t in found.values())


def accessed() -> dict[str, bool]:
    """Reading and setting single states while the worker is at work."""
    import ds_access as access

    engine, model = make({"stage": 3, "zenflow": LATE})
    make_steps(engine, range(5))
    flow = engine.partitioner.updates
    weight = model.mid.weight
    bias = model.norm.bias
    picked = next(w for w in flow.weights if w.fragment.param is weight).picked
    full = access.safe_get_full_fp32_param(weight)
    moment = access.safe_get_full_optimizer_state(weight, "exp_avg")
    out = {"columns": torch.equal(full[:, picked], whole(engine)["mid.weight"][:, picked])}
    out["moments"] = bool(moment.any(0).all())
    out["bias"] = torch.equal(access.safe_get_full_fp32_param(bias), whole(engine)["norm.bias"])
    access.safe_set_full_fp32_param(weight, torch.full_like(full, 0.5))
    access.safe_set_full_optimizer_state(weight, torch.zeros_like(full), "exp_avg")
    out["set"] = bool((whole(engine)["mid.weight"] == 0.5).all())
    out["no moments"] = not access.safe_get_full_optimizer_state(weight, "exp_avg").any()
    make_steps(engine, range(5, 7))
    out["trains on"] = bool((whole(engine)["mid.weight"] - 0.5).abs().max() < 0.2)
    engine.destroy()
    return out


def test_states_of_single_parameters() -> None:
    for found in run_ranks(2, accessed):
        assert all(found.values()), found


# -- faults ----------------------------------------------------------------------------------------


def killed() -> str:
    """The worker's optimizer step raises."""
    import threading

    from ds_zero.offload.host_worker import WorkerError

    engine, _ = make({"stage": 2, "zenflow": {**LATE, "select_interval": 100}})

    def fail(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("no room")

    engine.optimizer.register_step_pre_hook(fail)
    try:
        make_steps(engine, range(6))
    except WorkerError as error:
        return str(error)
    return ""


def test_a_worker_that_dies_is_told() -> None:
    (told,) = run_ranks(1, killed)
    assert "rank 0: the worker of ZenFlow died in the optimizer's step for weights of" in told
    assert "MemoryError: no room" in told


def epochless() -> str:
    from ds_core.errors import UsageError

    engine, _ = make({"stage": 1, "zenflow": {"select_strategy": "epoch", "select_interval": 1}})
    try:
        make_steps(engine, range(1))
    except UsageError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_epochs_of_unknown_length_are_an_error() -> None:
    assert "how many steps an epoch has is not known" in run_ranks(1, epochless)[0]


@pytest.mark.parametrize(
    ("zero", "more", "words"),
    [
        ({"zenflow": {}, "offload_optimizer": None}, {}, "needs optimizer states on the host"),
        (
            {"zenflow": {}, "stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
            {},
            "topk_ratio",
        ),
        (
            {"zenflow": {}},
            {"gradient_allreduce_op": "sum"},
            "does not go with zero_optimization.zenflow",
        ),
        ({"zenflow": {"select_strategy": "columns"}}, {}, "select_strategy"),
        ({"zenflow": {"select_strategy": "step"}}, {}, "select_interval must be a number"),
        ({"zenflow": {"update_interval": "often"}}, {}, "update_interval"),
        (
            {"zenflow": {**STEP, "select_interval": 2, "update_interval": 3}},
            {},
            "less than update_interval",
        ),
    ],
)
def test_config_errors(zero: dict[str, Any], more: dict[str, Any], words: str) -> None:
    from ds_core.errors import ConfigError

    with pytest.raises(ConfigError, match=words):
        make({"stage": 2, **zero}, **more)
