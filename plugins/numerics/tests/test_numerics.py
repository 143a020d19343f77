"""Replayed runs are the same bit for bit, and planted faults are named before a weight changes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, ClassVar

import ds_activation_checkpointing  # noqa: F401  what the runs need, beside what is declared
import ds_optimizers  # noqa: F401
import ds_zero  # noqa: F401
import pytest
import torch
from ds_numerics.trace import Checksums, Kind, checksum
from ds_numerics.verdict import Odd, describe, find
from ds_testing import ObserverConformance, run_ranks
from ds_testing.pool import RemoteError
from ds_testing.truth import same

from ds_core.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parent))

import replayed_runs
import unusual_loops
from replayed_runs import Outcome


class TestObserver(ObserverConformance):
    config: ClassVar[Any] = {"numerics": {"every": 2}}


# -- checksums and verdicts ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("shape", [(), (7,), (3, 8)])
def test_a_checksum_sees_every_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=dtype)
    right = checksum(tensor).item()
    octets = tensor.view(-1).view(torch.uint8)
    for place in range(octets.numel()):
        for bit in range(8):
            octets[place] ^= 1 << bit
            assert checksum(tensor).item() != right
            octets[place] ^= 1 << bit
    assert checksum(tensor).item() == right


def test_a_checksum_is_of_elements_and_not_of_memory() -> None:
    tensor = torch.arange(35.0)
    assert checksum(tensor.view(5, 7).t().contiguous().t()).item() == checksum(tensor).item()
    # A view that begins between two words.
    assert checksum(tensor[1:]).item() == checksum(tensor[1:].clone()).item()
    assert checksum(tensor[:0]).item() == 0
    assert checksum(torch.tensor([1 + 2j])).item() == checksum(torch.tensor([1.0, 2.0])).item()


def _passes(*odd: tuple[int, str]) -> list[Checksums]:
    """Three passes of three modules; (pass, module): its checksum differs there."""
    return [
        Checksums(
            [(Kind.OUTPUT, name, 0) for name in "abc"],
            [1 + number if (number, name) in odd else 0 for name in "abc"],
        )
        for number in range(3)
    ]


def test_the_pass_that_differs_from_two_others_is_the_wrong_one() -> None:
    assert find(0, _passes(), ()) is None
    for number, odd in enumerate((Odd.FIRST, Odd.REPLAY, Odd.REPLAY)):
        found = find(0, _passes((number, "b"), (number, "c")), ())
        assert found is not None
        assert (found.odd, found.what, found.more) == (odd, "the output of 'b'", 1)
    unlike = find(0, _passes((0, "a"), (1, "b")), ())
    assert unlike is not None and unlike.odd is Odd.ALL
    assert find(0, _passes((0, "a")), {(Kind.OUTPUT, "a")}) is None


def test_the_rank_that_differs_earliest_is_the_origin() -> None:
    found = [find(0, _passes((0, "c")), ()), find(1, _passes((0, "b"), (0, "c")), ())]
    text = describe(7, [f for f in found if f is not None])
    assert text.startswith("step 7: a bit has flipped. rank 1: the output of 'b' in micro-batch 0")
    assert "differs on rank 0 too" in text


# -- runs without a fault --------------------------------------------------------------------------


def _zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


HOST = {"device": "cpu"}
ZENFLOW = {
    "topk_ratio": 0.2,
    "update_interval": 2,
    "select_strategy": "step",
    "select_interval": 2,
    "full_warm_up_rounds": 0,
    "overlap_step": False,
}
SHARDED = {"stage3_param_persistence_threshold": 0}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}}
CLEAN: dict[str, dict[str, Any]] = {
    "stage 0": {"gas": 2},
    "stage 1": _zero(1),
    "stage 2": {"gas": 2, **_zero(2)},
    "stage 3": {"gas": 2, **_zero(3, **SHARDED)},
    "offload": {"gas": 2, **_zero(2, offload_optimizer=HOST)},
    "offload 3": _zero(3, offload_optimizer=HOST, offload_param=HOST),
    "super offload": {"gas": 2, **_zero(3, offload_optimizer={**HOST, "super_offload": True})},
    "zenflow": _zero(2, offload_optimizer=HOST, zenflow=ZENFLOW),
    "bf16": {"gas": 2, **BF16},
    "bf16, stage 1": BF16 | _zero(1),
    "fp16, stage 2": {"gas": 2, **FP16, **_zero(2)},
    "autocast, stage 3": _zero(3) | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "recomputed": {"activation_checkpointing": {}},
    "recomputed, stage 3": {"activation_checkpointing": {}, **_zero(3, **SHARDED)},
    "matrices": MUON | _zero(3, **SHARDED),
    "quantised": _zero(3, zero_quantized_gradients=True, zero_quantized_weights=True, **SHARDED),
    "unmanaged": {"managed_gradient_accumulation": False, **_zero(2)},
    "sum": {"gradient_allreduce_op": "sum", "prescale_gradients": False},
    "layers dropped": {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.1}},
    "compiled": {"compile": {"at_start": True, "backend": "eager"}},
}


@pytest.mark.fast_cases("stage 3")
@pytest.mark.parametrize("layout", CLEAN)
def test_a_replayed_run_is_the_same(layout: str) -> None:
    """Losses, weights, running statistics, norms and random states, bit for bit; no alarm."""
    # The first of the three steps is replayed twice, and the third once.
    answers = run_ranks(2, replayed_runs.compared, CLEAN[layout], {"every": 2}, {})
    assert answers == [["3 replays"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("way", ["direct", "whole batches", "alone", "two forwards"])
def test_a_replayed_loop_is_the_same(way: str) -> None:
    """A plain ``loss.backward()``, `train_batch`, one rank, and a loss of two forwards."""
    ranks = 1 if way == "alone" else 2
    answers = run_ranks(ranks, replayed_runs.compared_loop, way)
    assert answers == [["3 replays"]] * ranks


TRANSFORMERS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tensor parallel": (2, "llama", {"tensor_parallel": {"autotp_size": 2}}),
    "tensor parallel, stage 1": (
        4,
        "llama",
        {"tensor_parallel": {"autotp_size": 2}, **BF16, **_zero(1)},
    ),
    "sequence parallel": (2, "llama", {"sequence_parallel_size": 2}),
    "experts": (
        2,
        "mixtral",
        {"expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}},
    ),
    "dropout": (2, "gpt2", {"gas": 2, "activation_checkpointing": {}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", TRANSFORMERS)
def test_a_replayed_transformer_is_the_same(case: str) -> None:
    ranks, kind, sections = TRANSFORMERS[case]
    answers = run_ranks(ranks, replayed_runs.compared_transformer, kind, sections)
    assert answers == [["3 replays"]] * ranks


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "replays"), [("interrupted", 6), ("joint", 8), ("in place", 4)])
def test_a_replayed_loop_with_more_in_it_is_the_same(
    tmp_path: Path, loop: str, replays: int
) -> None:
    answers = run_ranks(2, unusual_loops.compared, loop, str(tmp_path))
    assert answers == [(True, replays, [])] * 2


def test_a_skipped_step_is_followed_by_one_that_is_replayed() -> None:
    """The loss scale is too large at first, and only steps with finite gradients are computed again."""
    sections = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}
    (answer,) = run_ranks(1, replayed_runs.compared, sections, {"every": 100}, {"steps": 12})
    assert answer == ["2 replays"]


# -- faults ----------------------------------------------------------------------------------------


def _faulty(ranks: int, sections: dict[str, Any], fault: str, *how: int) -> Outcome:
    """How all ranks have ended, which must be alike."""
    outcomes = [Outcome(**o) for o in run_ranks(ranks, replayed_runs.faulty, sections, fault, *how)]
    assert len({o.error.partition(" failed in ")[2] for o in outcomes}) == 1
    assert all(o.kept == outcomes[0].kept for o in outcomes)
    return outcomes[0]


NAMED = {
    "activation": r"rank 1: the output of 'blocks\.1\.up' in micro-batch 0: its first pass",
    "gradient": r"rank 1: this rank's own gradient of 'blocks\.1\.up\.weight' in micro-batch 0",
    "reduced": r"rank 1: the reduced gradient of '[\w.]+': its first pass differs",
    "weight": r"rank 1: the weight 'blocks\.1\.up\.weight': it changed",
    "wire": r"rank 1: the reduced gradient of '[\w.]+': its first pass differs",
}
LAYOUTS = {
    "stage 0": {},
    "stage 1": _zero(1),
    "stage 2": _zero(2),
    "stage 3": _zero(3, **SHARDED),
}
FAULTS = [(f, layout) for f in NAMED for layout in LAYOUTS if (f, layout) != ("weight", "stage 3")]


@pytest.mark.fast_cases("activation, stage 0", "gradient, stage 2", "wire, stage 1")
@pytest.mark.parametrize(
    ("fault", "layout"), FAULTS, ids=[f"{fault}, {layout}" for fault, layout in FAULTS]
)
def test_a_fault_is_named_before_a_weight_changes(fault: str, layout: str) -> None:
    outcome = _faulty(2, LAYOUTS[layout], fault)
    assert outcome.step == 1
    assert outcome.kept
    assert re.search(NAMED[fault], outcome.error), outcome.error


@pytest.mark.slow
def test_a_fault_in_a_sharded_weight_names_its_module() -> None:
    """All ranks compute with the wrong weight once it is gathered again."""
    outcome = _faulty(2, _zero(3, **SHARDED), "shard")
    assert outcome.step == 1
    assert re.search(r"rank \d: the output of '[\w.]+' in micro-batch 0", outcome.error)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_the_majority_tells_which_weight_is_wrong(rank: int) -> None:
    """A weight that was wrong before the step gives the same in each pass; other ranks differ."""
    told = run_ranks(3, replayed_runs.drifted, rank)
    others = ", ".join(str(r) for r in range(3) if r != rank)
    for text in told:
        assert f"rank {rank}: the weight 'shared.weight' is not the one that ranks {others}" in text


def test_two_copies_of_a_weight_do_not_tell_which_is_wrong() -> None:
    told = run_ranks(2, replayed_runs.drifted, 1)
    assert all("'shared.weight' differs between ranks 0, 1, without a majority" in t for t in told)


def test_what_two_passes_agree_on_repairs_the_step() -> None:
    """The run is the one without a fault, wherever it strikes: in the first pass or in a replay."""
    sections = {"numerics": {"every": 1, "action": "repair"}}
    wanted = _faulty(1, sections, "activation", -1)
    # A third pass is made where the second differs.
    for skip in (0, 1):
        outcome = _faulty(1, sections, "activation", 0, skip)
        assert (outcome.error, outcome.step) == ("", 2)
        same(outcome.weights, wanted.weights)
        (line,) = outcome.said
        assert "continues with what two of three passes agree on" in line


def test_a_warning_leaves_the_step_as_it_was() -> None:
    outcome = _faulty(1, {"numerics": {"every": 1, "action": "warn"}}, "activation", 0)
    blind = _faulty(1, {"numerics": {"every": 100}}, "activation", 0)
    assert (outcome.error, blind.error, blind.said) == ("", "", [])
    same(outcome.weights, blind.weights)
    (line,) = outcome.said
    assert "step 1: a bit has flipped" in line and "first pass gave" in line


@pytest.mark.slow
def test_a_weight_cannot_be_repaired() -> None:
    outcome = _faulty(2, {"numerics": {"every": 1, "action": "repair"}}, "weight")
    assert outcome.step == 1 and "the weight 'blocks.1.up.weight'" in outcome.error


# -- attackers -------------------------------------------------------------------------------------


def test_a_fault_in_a_replay_is_told_from_one_in_the_step() -> None:
    outcome = _faulty(2, {}, "activation", 1, 1)
    assert outcome.step == 1 and outcome.kept
    assert "one of two replays differs from its first pass and the other" in outcome.error


@pytest.mark.slow
def test_a_rank_that_fails_within_a_replay_ends_all() -> None:
    with pytest.raises(RemoteError) as caught:
        run_ranks(2, replayed_runs.faulty, {}, "failure", 1, 1)
    assert caught.value.rank == 1
    assert "ValueError: planted" in str(caught.value)


def test_a_failure_within_a_replay_leaves_no_hook() -> None:
    outcome = _faulty(1, {}, "failure", 0, 1)
    assert "ValueError: planted" in outcome.error
    assert outcome.step == 1


def test_values_that_are_not_finite_are_skipped_as_ever() -> None:
    (seen,) = run_ranks(1, replayed_runs.poisoned)
    assert seen == {"skipped": 1, "replays": 3, "said": [], "finite": True}


# -- what is not replayed --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}}}, "optimizer.type"),
        (
            _zero(3, zero_quantized_gradients=True, zeropp_loco_param={"err_beta": 0.8}),
            "zeropp_loco_param",
        ),
    ],
)
def test_errors_that_are_fed_back_are_refused(sections: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=r"numerics: does not go with") as caught:
        replayed_runs.run({**sections, "numerics": {}})
    assert names in str(caught.value)


def test_pipelines_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"numerics: does not go with pipelines"):
        replayed_runs.pipeline({"numerics": {}})


def test_what_cannot_be_computed_again_is_said_once() -> None:
    """And the run is the same as without the section."""
    for way, why in {
        "no_sync": "kept back by no_sync",
        "input": "changed in place",
        "dropped": "gradients were dropped",
        "part": "call the engine",
    }.items():
        ((*said, replays),) = run_ranks(1, replayed_runs.compared_loop, way)
        assert len(said) == 1 and why in said[0], said
        assert replays == "0 replays"


def test_a_program_that_never_computes_the_same_is_told_so_once() -> None:
    """By the number of its calls, which nobody puts back."""
    ((*said, replays),) = run_ranks(1, replayed_runs.counted)
    assert len(said) == 1 and "first in the output of 'counter'" in said[0]
    # What differs by design is not compared, so there is nothing to make a third pass for.
    assert replays == "4 replays"


def test_destroy_leaves_nothing() -> None:
    assert run_ranks(2, replayed_runs.left_behind) == [[]] * 2
