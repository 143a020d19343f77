"""Runs in several layouts are equal to one process, and planted faults are named."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ds_zero  # noqa: F401  what the runs need, beside what dscore-verify declares
import pytest
import torch
from ds_command_kit.app import make_app
from ds_run_state.slices import Box
from ds_testing import CommandConformance, run_ranks
from ds_verify.page import make_page
from ds_verify.recording.records import decode, encode
from ds_verify.recording.sampling import sample_box, sample_range, sample_size
from ds_verify.report import as_data, describe
from typer.testing import CliRunner

from ds_core.errors import UsageError

sys.path.insert(0, str(Path(__file__).parent))

import verified_runs
from verified_runs import verify

ZERO = {f"stage {stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)}
ZERO["stage 3, all sharded"] = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}
}
BF16 = {
    f"bf16, stage {stage}": {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    for stage in (1, 3)
}
OFFLOAD = {"offload": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}}
CLEAN: dict[str, dict[str, Any]] = {**ZERO, **BF16, **OFFLOAD}
FAST = ("stage 1", "stage 3, all sharded", "bf16, stage 3")


class TestCommand(CommandConformance):
    plugin = "ds_verify.plugin"


def _slow_but(name: str, fast: bool) -> Any:
    return pytest.param(name, marks=() if fast else pytest.mark.slow)


@pytest.mark.fast_cases("bf16, stage 3")
@pytest.mark.parametrize("layout", [_slow_but(name, name in FAST) for name in CLEAN])
def test_a_right_run_is_equal(tmp_path: Path, layout: str) -> None:
    report = verify(run_ranks, tmp_path, CLEAN[layout])
    assert report.first is None, (report.first, report.cause)
    assert report.largest > 0, "sums in another order round differently"
    assert {row.rank for row in report.rows} == {0, 1}
    kinds = {row.kind for row in report.rows}
    assert kinds >= {"forward", "backward", "local gradient", "gradient", "norm", "weight", "state"}


def test_a_loss_inside_the_model_is_counted_once(tmp_path: Path) -> None:
    """Logits get a gradient through the loss that the model makes of them; the replay gives it
    once.
    """
    config = {"zero_optimization": {"stage": 2}}
    report = verify(run_ranks, tmp_path, config, script=verified_runs.train_batches)
    assert report.first is None, (report.first, report.cause)


def test_losses_that_are_scaled_in_place_and_methods_in_place_of_forward(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2}}
    report = verify(run_ranks, tmp_path, config, script=verified_runs.train_in_place)
    assert report.first is None, (report.first, report.cause)
    assert "gradient" in {row.kind for row in report.rows}


@pytest.mark.slow
def test_a_script_for_deepspeed(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 3}}
    report = verify(run_ranks, tmp_path, config, script=verified_runs.train_as_deepspeed)
    assert report.first is None, (report.first, report.cause)


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_slices_of_tensor_parallelism_are_placed(tmp_path: Path, bf16: bool) -> None:
    """Parameters of which ranks have slices are compared; parts of logits are said not to be."""
    config = {
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": 2},
        "bf16": {"enabled": bf16},
    }
    report = verify(run_ranks, tmp_path, config, script=verified_runs.train_llama)
    assert report.first is None, (report.first, report.cause)
    assert report.skipped == ("forward lm_head, output 0",)
    names = {row.name for row in report.rows if row.kind == "gradient"}
    assert any("q_proj" in name for name in names) and any("down_proj" in name for name in names)


SCRIPT = """
import sys
sys.path.insert(0, FOLDER)
import ds_core, torch
from torch import nn
from verified_runs import BASE, Net
torch.manual_seed(0)
engine, *_ = ds_core.initialize(model=Net(), config=dict(BASE))
for step in range(6 if "short" not in sys.argv else 0):
    x = torch.randint(0, 30, (2, 7))
    out = engine(x[:, :-1]).flatten(0, 1)
    engine.backward(nn.functional.cross_entropy(out, x[:, 1:].flatten()))
    engine.step()
"""


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """A script without any change: 0 where it is right, 1 where not, 2 where it has no steps."""
    script = tmp_path / "train.py"
    folder = str(Path(__file__).parent)
    script.write_text(SCRIPT.replace("FOLDER", repr(folder)))
    fault = tmp_path / "fault.json"
    fault.write_text(json.dumps({"plugins": {"load": ["fault=faults"]}, "fault": {"kind": "zero"}}))
    page = tmp_path / "page.html"
    words = ["verify", "--steps", "1"]

    def run(*more: str) -> Any:
        return CliRunner(env={"PYTHONPATH": os.pathsep.join([folder, *sys.path])}).invoke(
            make_app(), [*words, *more]
        )

    right = run("--html", str(page), str(script))
    assert right.exit_code == 0 and right.output.startswith("equal: "), right.output
    assert "<svg" in page.read_text()
    wrong = run("--config", str(fault), str(script))
    assert wrong.exit_code == 1 and "gradient of blocks.1.up.weight" in wrong.output, wrong.output
    none = run(str(script), "short")
    assert none.exit_code == 2 and "did not come to its end" in none.output, none.output


FAULTS = [
    ("not_reduced", 0, "gradient", "blocks.1.up.weight", "a reduction"),
    ("not_reduced", 2, "gradient", "blocks.1.up.weight", "a reduction"),
    ("wrong_divisor", 1, "gradient", "blocks.2.down.bias", "number of data-parallel ranks"),
    ("last_micro", 0, "gradient", "blocks.2.down.bias", "micro-batch 1 of the step is missing"),
    ("lost_use", 1, "local gradient", "shared.weight", "a use of the parameter is missing"),
    ("half_updated", 0, "weight", "blocks.1.up.weight", "its gradient is right"),
    ("stale", 0, "forward", "blocks.1", "weights were equal"),
    ("norm", 2, "norm", "the global norm", "elements of other ranks are missing"),
    ("bfloat16", 0, "gradient", "blocks.1.up.weight", "rounding of bfloat16"),
    ("untied", 0, "local gradient", "tok.weight", "a use of the parameter is missing"),
    ("not_published", 1, "weight", "blocks.1.up.weight", "on rank 1 alone"),
    ("other_eps", 1, "forward", "blocks.1", "computes something else"),
    ("swapped", 0, "weight", "blocks.1.up.weight", "begin with different weights"),
    ("zero", 1, "gradient", "blocks.1.up.weight", "dropped"),
    ("half_reduced", 0, "gradient", "blocks.1.up.weight", "of its elements differ"),
    # Of the model.
    ("no_dropout", 0, "forward", "blocks.1", "computes something else"),
    ("own_dropout", 2, "forward", "blocks.1", "computes something else"),
    ("cast", 1, "forward", "blocks.1", "computes something else"),
    ("detached", 0, "backward", "blocks.1", "the backward of this module"),
    ("no_residual", 1, "forward", "blocks.1", "computes something else"),
    ("no_bias", 0, "forward", "blocks.1", "computes something else"),
    # Of reduced gradients.
    ("by_gas", 0, "gradient", "blocks.2.down.bias", "number of"),
    ("first_micro", 0, "gradient", "blocks.1.up.weight", "micro-batch 0 of the step is missing"),
    ("twice_micro", 0, "gradient", "blocks.1.up.weight", "with these weights"),
    ("rank_0", 0, "gradient", "blocks.1.up.weight", "data-parallel rank 0 alone"),
    ("other_step", 0, "gradient", "blocks.1.up.weight", "no sum of"),
    ("row_lost", 2, "gradient", "blocks.1.up.weight", "elements differ"),
    ("negative", 1, "gradient", "blocks.1.up.weight", "-1 times"),
    ("rolled", 0, "gradient", "blocks.1.up.weight", ""),
    ("float16", 1, "gradient", "blocks.1.up.weight", "rounding of float16"),
    ("not_a_number", 0, "gradient", "blocks.1.up.weight", "not finite"),
    # Of norms and updates.
    ("large_norm", 0, "norm", "the global norm", "count several times"),
    ("rank_lr", 0, "weight", "", "on rank 1 alone"),
    ("not_updated", 0, "weight", "blocks.1.up.weight", "has not changed"),
    ("drift", 0, "weight", "blocks.1.up.weight", "begin with different weights"),
    # More of the model.
    ("permuted", 0, "forward", "blocks.1", "computes something else"),
    ("head_scaled", 1, "forward", "head", "computes something else"),
    ("clamped", 2, "forward", "blocks.1", "computes something else"),
    ("shifted_time", 0, "forward", "shared", "computes something else"),
    ("mixed_samples", 0, "forward", "shared", "computes something else"),
    ("shifted", 0, "forward", "tok", "computes something else"),
    ("without_affine", 0, "local gradient", "blocks.1.norm", "does not arrive"),
    ("noisy_weight", 2, "forward", "blocks.1", "computes something else"),
    ("half_norm", 0, "forward", "blocks.1", "computes something else"),
    ("scaled_backward", 0, "local gradient", "blocks.1.down", "2 times"),
    ("embedding_detached", 0, "local gradient", "tok.weight", "a use of the parameter is missing"),
    ("twice_counted", 1, "local gradient", "shared.weight", "2 times"),
    # More of reduced gradients.
    ("scaled_slightly", 0, "gradient", "blocks.1.up.weight", "1.02 times"),
    ("by_both", 1, "gradient", "blocks.1.up.weight", "times the reference"),
    ("largest", 0, "gradient", "blocks.1.up.weight", ""),
    ("in_8_bits", 0, "gradient", "blocks.1.up.weight", ""),
    ("signs", 0, "gradient", "blocks.1.up.weight", "no sum of"),
    ("rank_1_twice", 0, "gradient", "blocks.1.up.weight", "with these weights"),
    ("overwritten", 0, "gradient", "blocks.1.up.weight", "micro-batch 1 of the step is missing"),
    ("transposed", 0, "gradient", "blocks.1.up.weight", ""),
    ("infinite", 0, "gradient", "blocks.1.up.weight", "not finite"),
    ("swapped_gradients", 0, "gradient", "blocks.", "no sum of"),
    # More of norms and updates.
    ("norm_without", 0, "norm", "the global norm", "missing in it"),
    ("norm_squared", 0, "norm", "the global norm", "times the reference's"),
    ("decay", 0, "weight", "", "on every rank"),
    ("betas", 0, "state", "", "on every rank"),
    ("large_eps", 0, "weight", "", "on every rank"),
    ("two_steps", 0, "state", "", "on every rank"),
    ("lost_states", 0, "state", "", "on every rank"),
    ("rounded", 0, "weight", "", "on every rank"),
]


QUICK = ("not_reduced", "last_micro", "lost_use", "norm", "stale", "not_published")


@pytest.mark.parametrize(
    ("fault", "stage", "kind", "name", "cause"),
    [
        pytest.param(
            *row,
            marks=() if row[0] in QUICK and row[:2] != ("not_reduced", 2) else pytest.mark.slow,
        )
        for row in FAULTS
    ],
)
def test_a_planted_fault_is_named(
    tmp_path: Path, fault: str, stage: int, kind: str, name: str, cause: str
) -> None:
    config = {
        "zero_optimization": {"stage": stage},
        "plugins": {"load": ["fault=faults"]},
        "fault": {"kind": fault},
    }
    first = (report := verify(run_ranks, tmp_path, config)).first
    assert first is not None, report.largest
    assert first.kind == kind and name in first.name, (first, report.cause)
    assert cause in report.cause, (first, report.cause)
    text = describe(report)
    assert text.startswith("different: ") and first.name in text and report.cause in text
    data = json.loads(json.dumps(as_data(report)))
    assert data["first"]["name"] == first.name and len(data["tensors"]) == len(report.rows)
    assert first.name in make_page(report, "train.py")


def test_a_difference_stays_in_its_step(tmp_path: Path) -> None:
    """Each step of the reference begins with what the subject has then: weights and states."""
    config = {
        "zero_optimization": {"stage": 1},
        "plugins": {"load": ["fault=faults"]},
        "fault": {"kind": "once"},
    }
    report = verify(run_ranks, tmp_path, config)
    assert {row.step for row in report.wrong} == {0}
    assert {row.step for row in report.rows} == {0, 1}


def test_shards_have_parts_of_one_sample() -> None:
    """Ranges and boxes of a tensor give the elements that the sample of the whole has."""
    whole = torch.arange(30.0 * 14).view(30, 14)
    sample, first = sample_range(whole, 0, whole.numel(), 100)
    assert first == 0 and sample.numel() == sample_size(whole.shape, 100) == 84
    parts = [sample_range(whole.reshape(-1)[a:b], a, 420, 100) for a, b in ((0, 77), (77, 420))]
    assert torch.equal(torch.cat([values for values, _ in parts]), sample)
    assert [first for _, first in parts] == [0, 16]
    box = Box((10, 3), (20, 7))
    values, places = sample_box(whole[10:, 3:10], 0, box, whole.shape, 100)
    assert torch.equal(values, sample[places]) and values.numel() == 28


def test_only_data_is_recorded() -> None:
    """Arguments come back as they were; what is no data is refused, with a name."""
    kept: dict[str, torch.Tensor] = {}

    def put(tensor: torch.Tensor) -> str:
        kept[str(len(kept))] = tensor
        return str(len(kept) - 1)

    given = {"x": (torch.ones(2), [1, None, "a"]), "dtype": torch.bfloat16}
    back = decode(encode(given, put, "inputs"), kept.__getitem__)
    assert torch.equal(back["x"][0], torch.ones(2))
    assert back["x"][1] == [1, None, "a"] and back["dtype"] is torch.bfloat16
    with pytest.raises(UsageError, match="a object"):
        encode(object(), put, "inputs")
