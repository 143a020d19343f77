"""Views of every layout, against plain torch in one process, FSDP2, and an uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ds_moe  # noqa: F401  - these need them installed
import ds_pipeline  # noqa: F401
import ds_tensor_parallel  # noqa: F401
import ds_zero  # noqa: F401
import pytest
import torch
from ds_testing import run_ranks
from torch import Tensor

from plugins.dtensor.tests import states, views
from plugins.dtensor.tests.nets import STAGES, plain_truth

# stage, dtype, tensor parallel, ranks
CASES = [
    (stage, dtype, tp, ranks)
    for ranks, tp in ((1, 1), (2, 1), (2, 2), (4, 2))
    for dtype in ("fp32", "bf16")
    for stage in STAGES
]
FAST = [(3, "bf16", 1, 2), (1, "fp32", 1, 2), (2, "bf16", 2, 2)]


def name(case: Any) -> str:
    stage, dtype, tp, ranks = case
    return f"z{stage}-{dtype}-tp{tp}-{ranks}"


def layouts(*fast: Any) -> Any:
    def mark(test: Any) -> Any:
        test = pytest.mark.parametrize("case", CASES, ids=name)(test)
        return pytest.mark.fast_cases(*map(name, fast))(test)

    return mark


@layouts(*FAST)
def test_views_are_the_engines_memory_with_torchs_values(case: Any) -> None:
    *case, ranks = case
    assert run_ranks(ranks, views.compare_with_torch, *case) == [[]] * ranks


@layouts(FAST[0])
def test_norms_are_global_and_what_is_clipped_is_used(case: Any) -> None:
    *case, ranks = case
    assert run_ranks(ranks, views.norms, *case) == [[]] * ranks


@layouts(FAST[0])
def test_options_of_the_model_are_those_of_fsdp2(case: Any) -> None:
    *case, ranks = case
    if ranks == 1:
        pytest.skip("torch broadcasts only where ranks are")
    assert run_ranks(ranks, views.options, *case) == [[]] * ranks


@layouts(FAST[1])
def test_options_of_the_optimizer_are_those_of_fsdp2(case: Any) -> None:
    *case, ranks = case
    if ranks == 1:
        pytest.skip("torch broadcasts only where ranks are")
    assert run_ranks(ranks, states.optimizer_options, *case) == [[]] * ranks


@layouts(FAST[0])
def test_a_run_goes_on_as_if_it_had_not_been_saved(case: Any, tmp_path: Path) -> None:
    *case, ranks = case
    for saved, loaded in run_ranks(ranks, views.restart, case, str(tmp_path / "saved")):
        assert loaded == saved


# (layout and ranks that save, and those that load)
MOVES = {
    "z3-2-to-z1-1": ((3, "fp32", 1, False), 2, (1, "fp32", 1, False), 1),
    "z1-1-to-z3-4": ((1, "fp32", 1, False), 1, (3, "fp32", 1, False), 4),
    "z3-tp-4-to-z2-2": ((3, "fp32", 2, False), 4, (2, "fp32", 1, False), 2),
    "z0-2-to-z3-tp-2": ((0, "fp32", 1, False), 2, (3, "fp32", 2, False), 2),
    "bf16-z2-2-to-z3-4": ((2, "bf16", 1, True), 2, (3, "bf16", 1, True), 4),
}


@pytest.mark.fast_cases("z3-2-to-z1-1")
@pytest.mark.parametrize("move", MOVES)
def test_other_layouts_and_numbers_of_ranks_load_it(move: str, tmp_path: Path) -> None:
    saver, before, loader, after = MOVES[move]
    folder = str(tmp_path / "saved")
    wanted = run_ranks(before, views.save, saver, folder, 3)[0]
    found = run_ranks(after, views.load, loader, folder, 3)
    near = 2e-2 if "bf16" in move else 1e-5
    for losses in found:
        assert losses == pytest.approx(wanted, rel=near)


@pytest.mark.fast_cases("3-1")
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_fsdp2_and_an_engine_load_each_others_files(stage: int, tp: int, tmp_path: Path) -> None:
    case = (stage, "fp32", tp, False)
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    wanted = run_ranks(2, views.save, case, ours, 3)[0]
    assert run_ranks(2, views.fsdp_loads, ours, 3)[0] == pytest.approx(wanted, rel=1e-5)
    written = run_ranks(2, views.fsdp_saves, theirs, 3)[0]
    assert written == pytest.approx(wanted, rel=1e-5)
    assert run_ranks(2, views.load, case, theirs, 3)[0] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.fast_cases("3")
@pytest.mark.parametrize("stage", STAGES)
def test_plain_torch_reads_the_files(stage: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    run_ranks(2, views.save, (stage, "fp32"), folder, 2)
    found = views.read_plainly(folder)
    truth = plain_truth(2)
    assert set(found["model"]) == set(truth)
    for key, value in truth.items():
        assert torch.allclose(found["model"][key], value, atol=1e-5)
    state = found["optim"]["state"]["up_proj.weight"]
    assert isinstance(state["exp_avg"], Tensor) and state["exp_avg"].shape == (10, 6)
    assert float(state["step"]) == 2


@pytest.mark.fast_cases("modules_own-3", "pickled-3", "arithmetic-3")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("check", ["modules_own", "pickled", "arithmetic"])
def test_other_ways_of_torch(check: str, stage: int) -> None:
    assert run_ranks(2, getattr(states, check), stage) == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_save_in_the_background_has_the_values_of_its_call(stage: int, tmp_path: Path) -> None:
    found = run_ranks(2, states.in_background, stage, "bf16", str(tmp_path / "saved"))
    assert found == [[]] * 2


@pytest.mark.fast_cases("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_what_does_not_fit_is_refused_on_all_ranks(stage: int) -> None:
    said, other = run_ranks(2, states.does_not_fit, stage)
    assert said == other
    assert "size mismatch for up_proj.weight, on rank 1" in said["shape"]
    assert "missing key(s): up_proj.bias" in said["missing"]
    assert "unexpected key(s): other" in said["unexpected"]
    assert said["changed"] == ""
    assert said["loose"] == "['up_proj.bias'] ['other']"
    if stage == 3:
        assert "ranks have different kinds of values" in said["kind"]
        assert ".full_tensor()" in said["matmul"] and ".full_tensor()" in said["mixed"]


OFFLOADED = {
    "stage": 3,
    "offload_optimizer": {"device": "cpu"},
    "offload_param": {"device": "cpu"},
}
KEYS: dict[str, Any] = {
    "offload": {"stage": 3, "dtype": "bf16", "zero_optimization": OFFLOADED},
    "accumulation": {"stage": 2, "dtype": "bf16", "gradient_accumulation_steps": 2},
    "adam": {"stage": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.05}}},
    "sgd": {"stage": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}},
    "lamb": {"stage": 3, "optimizer": {"type": "Lamb", "params": {"lr": 0.01}}},
    "muon": {"stage": 1, "dtype": "bf16", "optimizer": {"type": "Muon", "params": {"lr": 0.01}}},
    "adafactor": {"stage": 1, "optimizer": {"type": "Adafactor", "params": {"lr": 0.01}}},
    "hpz": {"stage": 3, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
    "mics": {"stage": 3, "zero_optimization": {"stage": 3, "mics_shard_size": 2}},
}


@pytest.mark.fast_cases("offload")
@pytest.mark.parametrize("key", KEYS)
def test_keys_that_move_states(key: str, tmp_path: Path) -> None:
    ranks = 4 if key in ("hpz", "mics") else 2
    warm = 1 if key == "adafactor" else 0
    found = run_ranks(ranks, states.by_keys, KEYS[key], str(tmp_path / "saved"), warm)
    assert found == [[]] * ranks


ZENFLOW = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {"topk_ratio": 0.5}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "zenflow": ({"stage": 2, "zero_optimization": ZENFLOW}, "'zero_optimization.zenflow'"),
    "onebit": (
        {"stage": 0, "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01}}},
        "'OneBitAdam' do not go together: it keeps a state of each rank's own",
    ),
    "soap": (
        {"stage": 1, "optimizer": {"type": "SOAP", "params": {"lr": 0.01}}},
        "'SOAP' do not go together: it keeps states that are no parameter's",
    ),
    "8bit": (
        {
            "stage": 0,
            "optimizer": {"type": "Adam8bit", "params": {"lr": 0.01, "min_8bit_size": 16}},
        },
        "engine.save_checkpoint",
    ),
}


@pytest.mark.fast_cases("zenflow")
@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_view_is_refused_by_its_key(what: str) -> None:
    more, text = REFUSED[what]
    said = run_ranks(2, states.refusal, more)
    assert text in said[0] and said[0] == said[1]


@pytest.mark.slow
def test_a_disk_is_refused(tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    more = {"stage": 3, "zero_optimization": {"stage": 3, "offload_optimizer": disk}}
    said = run_ranks(2, states.refusal, more)
    assert "with device 'nvme'" in said[0] and said[0] == said[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipeline", "moe"])
def test_ranks_with_other_parameters_are_refused(kind: str) -> None:
    said = run_ranks(2, states.refused_layout, kind)
    assert f"dscore-dtensor and '{kind}'" in said[0] and said[0] == said[1]
    assert "engine.save_checkpoint" in said[0]
