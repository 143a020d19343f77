"""Blocks of ranks, hpZ and MiCS: the weights of plain stage 3 to the last bit, and what crosses
between blocks.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from ds_testing import run_ranks
from torch import nn

from plugins.zero.tests.hierarchy_models import (
    HPZ,
    MICS,
    RUNS,
    SINGLE_OPERATIONS,
    SMALL,
    D,
    Net,
    differences,
    three_steps,
)


@pytest.mark.parametrize(
    "run", ["bf16", *(pytest.param(r, marks=pytest.mark.slow) for r in RUNS if r != "bf16")]
)
def test_second_copies_change_no_bit(run: str) -> None:
    variants = [
        HPZ,
        {**HPZ, "offload_param": {"device": "cpu"}},
        {**HPZ, "use_all_reduce_for_fetch_params": True},
    ]
    for answer in run_ranks(4, differences, variants, RUNS[run], False):
        assert answer == [{}] * len(variants)


@pytest.mark.parametrize("run", ["plain", pytest.param("accumulated", marks=pytest.mark.slow)])
def test_shard_groups_change_no_bit_where_sums_are_exact(run: str) -> None:
    extra = {k: v for k, v in RUNS[run].items() if k != "gradient_clipping"} | SINGLE_OPERATIONS
    variants = [
        MICS,
        {"mics_shard_size": 1},
        {"mics_shard_size": 4},
        {**MICS, "reduce_scatter": False},
    ]
    variants.append(
        {**MICS, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    )
    for answer in run_ranks(4, differences, variants, extra, True):
        assert answer == [{}] * len(variants)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_shard_groups_train_as_plain_stage_3(run: str) -> None:
    """In any case sums over ranks are made in another order only.

    Muon's iterations make that larger.
    """
    bound = {"bf16": 0.05, "autocast": 0.05, "matrices": 1e-4}.get(run, 1e-5)
    for answer in run_ranks(4, differences, [MICS], RUNS[run], False):
        assert all(value < bound for value in answer[0].values()), answer


# -- what crosses between blocks -------------------------------------------------------------------


def crossings(zero: dict[str, Any], extra: dict[str, Any]) -> dict[str, list[str]]:
    """Per phase of two micro-batches and a step, the messages of groups that are in several blocks
    of two ranks.
    """
    import ds_core
    from ds_core import comm

    class Watch(comm.Interceptor):
        """Notes them under the phase that runs."""

        def __init__(self) -> None:
            self.phase = ""
            self.seen = dict[str, list[str]]()

        def around(self, collective: comm.Collective, call: Any) -> Any:
            ranks = torch.distributed.get_process_group_ranks(collective.group)
            if len({rank // 2 for rank in ranks}) > 1 and collective.label.startswith(
                ("weights", "gradients")
            ):
                self.seen.setdefault(self.phase, []).append(
                    f"{collective.op} over {len(ranks)} {collective.label}"
                )
            return call()

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW"},
        **extra,
        "zero_optimization": {"stage": 3, **SMALL, "prefetch_bucket_size": 0, **zero},
    }
    engine, *_ = ds_core.initialize(model=Net(), config=config)
    comm.add_interceptor(watch := Watch())
    for _ in range(2):
        watch.seen.clear()
        for micro in range(2):
            watch.phase = f"forward {micro}"
            loss = engine(torch.ones(2, D))
            watch.phase = f"backward {micro}"
            engine.backward(loss)
            watch.phase = "step"
            engine.step()
    comm.remove_interceptor(watch)
    engine.destroy()
    return watch.seen


def test_what_crosses_between_blocks() -> None:
    for seen in run_ranks(4, crossings, HPZ, {}):
        gathers = {phase: [m for m in found if "gather" in m] for phase, found in seen.items()}
        assert len(gathers["forward 0"]) == len(set(gathers["forward 0"])) > 4  # each weight once
        # those came with the first pass of all
        assert not any("frozen" in m for m in gathers["forward 0"])
        assert not any(gathers.get(phase) for phase in ("backward 0", "forward 1", "backward 1"))
        assert all("small" in m or "gain" in m or "bias" in m for m in gathers.get("step", []))
    for seen in run_ranks(4, crossings, MICS, {}):
        assert set(seen) == {"backward 0", "backward 1"}
        assert {m.split()[0] for found in seen.values() for m in found} == {"all_reduce"}


def on_two_hosts(zero: dict[str, Any]) -> tuple[dict[str, float], dict[str, list[str]]]:
    """As if ranks 0 and 1 were on another host than 2 and 3: differences to plain stage 3, and what
    crosses.
    """
    from ds_core import comm

    with mock.patch("ds_zero.comm.hierarchy.host_name", return_value=f"host {comm.rank() // 2}"):
        (found,) = differences([zero], {"bf16": {"enabled": True}, "gradient_clipping": 0.1}, False)
        return found, crossings(zero, {})


@pytest.mark.slow
def test_shards_cross_once_where_groups_are_on_several_hosts() -> None:
    zero = {"mics_shard_size": 4, "mics_hierarchical_params_gather": True}
    plain = run_ranks(4, crossings, {"mics_shard_size": 4}, {})[0]
    for found, seen in run_ranks(4, on_two_hosts, zero):
        assert found == {}
        for phase in ("forward 0", "backward 0"):
            whole = [m for m in plain[phase] if "weights" in m]
            assert (
                [m for m in seen[phase] if "weights" in m]
                == [m.replace("over 4", "over 2") for m in whole]
                != []
            )


# -- access and construction -----------------------------------------------------------------------


def look(zero: dict[str, Any]) -> dict[str, float]:
    """Weights that were written in every way are what forwards use, on all ranks; gradients are
    those of all ranks.
    """
    import ds_access
    import ds_zero

    import ds_core
    from ds_core import comm
    from ds_core.errors import UsageError

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {
            "stage": 3,
            "param_persistence_threshold": 0,
            "enable_sanity_checks": True,
            **zero,
        },
    }
    engine, *_ = ds_core.initialize(model=nn.Linear(D, D, bias=False), config=config)
    weight = engine.module.weight
    x = torch.eye(D) * (1 + comm.rank())
    found = {}

    def forward(wanted: float) -> float:
        with torch.no_grad():
            return float((engine(torch.eye(D)) - wanted).abs().max())

    with ds_zero.GatheredParameters(weight, modifier_rank=3):
        weight.data.fill_(float(comm.rank()))
    found["written"] = forward(3.0)
    ds_access.safe_set_full_fp32_param(weight, torch.full((D, D), 5.0))
    found["set"] = forward(5.0)
    # each owner's counts
    ds_access.safe_set_full_fp32_param(weight, torch.full((D, D), 7.0 + comm.rank()))
    value = ds_access.safe_get_full_fp32_param(weight)
    assert value is not None
    with torch.no_grad():
        found["set apart"] = float((engine(torch.eye(D)) - value.T).abs().max())
    engine.backward(engine(x).sum())
    grad = ds_access.safe_get_full_grad(weight)
    assert grad is not None
    found["gradient"] = float((grad - 2.5 / 2).abs().max())
    fragment = ds_access.safe_get_local_fp32_param(weight)
    assert fragment is not None
    try:
        ds_access.safe_set_local_fp32_param(weight, torch.zeros_like(fragment))
    except UsageError as error:
        assert "zero_hpz_partition_size" in zero
        assert "under hpZ other ranks do not see" in str(error)
    engine.step()
    engine.backward(engine(x).sum())
    engine.step()
    ds_access.safe_set_local_fp32_param(weight, torch.full_like(fragment, 2.0))
    found["local"] = forward(2.0)
    engine.destroy()
    return found


@pytest.mark.parametrize("zero", [HPZ, MICS], ids=["hpZ", "MiCS"])
def test_weights_that_are_written_are_used(zero: dict[str, Any]) -> None:
    for answer in run_ranks(4, look, zero):
        assert all(error == 0 for error in answer.values()), answer


# -- errors ----------------------------------------------------------------------------------------


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"stage": 2, **MICS}, "mics_shard_size: only stage 3 partitions weights, this is stage 2"),
    (
        {"stage": 1, **HPZ},
        "zero_hpz_partition_size: only stage 3 partitions weights, this is stage 1",
    ),
    ({"stage": 3, **HPZ, **MICS}, "MiCS gathers inside a shard group already"),
    (
        {"stage": 3, "mics_hierarchical_params_gather": True},
        "there are no shard groups to gather over",
    ),
    ({"stage": 3, "mics_shard_size": 3}, "mics 3 must divide dp 1 .* use 1"),
    ({"stage": 3, "zero_hpz_partition_size": 2}, "hpz 2 must divide dp 1 .* use 1"),
]


@pytest.mark.parametrize(("zero", "message"), WRONG)
def test_what_cannot_be(zero: dict[str, Any], message: str) -> None:
    import ds_core
    from ds_core.errors import ConfigError

    with pytest.raises(ConfigError, match=message):
        ds_core.initialize(
            model=nn.Linear(2, 2), config={"train_batch_size": 1, "zero_optimization": zero}
        )


# -- with everything else --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("world", "size"), [(8, 2), (8, 4)])
def test_eight_ranks(world: int, size: int) -> None:
    """hpZ: no bit differs.

    MiCS: only what the fused update rounds otherwise; see SINGLE_OPERATIONS.
    """
    hpz = {"zero_hpz_partition_size": size}
    mics = {"mics_shard_size": size}
    for answer in run_ranks(world, differences, [hpz], RUNS["accumulated"], False, timeout=600):
        assert answer == [{}]
    for answer in run_ranks(world, differences, [mics], SINGLE_OPERATIONS, True, timeout=600):
        assert answer == [{}]
    for found, nothing in run_ranks(world, differences, [mics, hpz], {}, True, timeout=600):
        assert all(value < 1e-12 for value in found.values()), found
        assert nothing == {}


@pytest.mark.slow
def test_weights_and_states_that_leave_memory(tmp_path: Any) -> None:
    """With second copies a shard is read once a step."""
    places = {
        f"offload_{what}": {"device": "nvme", "nvme_path": str(tmp_path)}
        for what in ("param", "optimizer")
    }
    for answer in run_ranks(4, differences, [{**HPZ, **places}], RUNS["bf16"], False, places):
        assert answer == [{}]
    for answer in run_ranks(4, differences, [{**MICS, **places}], SINGLE_OPERATIONS, True, places):
        assert answer == [{}]


# -- with quantised messages -----------------------------------------------------------------------


def with_quantised(variants: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, float]]:
    """Of pairs of sections, where they differ and by how much."""
    answers = []
    for first, second in variants:
        one = three_steps(first, {})
        two = three_steps(second, {})
        answers.append(
            {
                k: float((two[k] - v).abs().max())
                for k, v in one.items()
                if not torch.equal(two[k], v)
            }
        )
    return answers


@pytest.mark.slow
def test_second_copies_hold_what_was_gathered() -> None:
    """So qwZ's weights are the same in both passes, whether they come from all ranks or from near
    ones.
    """
    qwz = {"zero_quantized_weights": True}
    qgz = {"zero_quantized_gradients": True}
    for answer in run_ranks(
        4, with_quantised, [(qwz, {**qwz, **HPZ}), ({**MICS, **qgz}, {**MICS, **qwz, **qgz})]
    ):
        assert answer[0] == {}
        assert 0 < max(answer[1].values()) < 0.5
