"""The section ``flops_profiler``: one step of a run is profiled, and no other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from ds_testing import ObserverConformance, PluginConformance

import ds_core

sys.path.insert(0, str(Path(__file__).parent))

from profiled import Net, lines


class TestPlugin(PluginConformance):
    entry_point = "ds_flops_profiler.plugin"
    section = "flops_profiler"
    good_config: ClassVar[Any] = {
        "enabled": True,
        "profile_step": 3,
        "module_depth": 2,
        "output_file": "x.txt",
    }
    bad_configs: ClassVar[Any] = [
        *({"enabled": "yes"}, {"profile_step": -1}, {"module_depth": -2}, {"top_modules": 0}),
        *({"recompute_fwd_factor": -1.0}, {"profile_stpe": 1}, {"output_file": 3}),
    ]


class TestTraining(ObserverConformance):
    config: ClassVar[Any] = {
        "flops_profiler": {"enabled": True, "profile_step": 0, "peak_tflops": 1e-6}
    }

    def test_each_step_after_the_profiled_one_has_a_rate(self) -> None:
        for world in (1, 2):
            told = self._run(world, self.config, self.load)[0]["told"]
            rates = [value for name, value in told if name == "Train/Samples/tflops_per_second"]
            shares = [value for name, value in told if name == "Train/Samples/mfu"]
            assert len(rates) == len(shares) == self.steps - 1
            assert all(
                rate > 0 and abs(share * 1e-6 / rate - 1) < 1e-6
                for rate, share in zip(rates, shares, strict=True)
            )


def run(steps: int, file: str, **config: Any) -> dict[str, str]:
    """Trains; the text that each step has written."""
    path = Path(file)
    engine, *_ = ds_core.initialize(
        model=Net(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "flops_profiler": {
                "enabled": True,
                "output_file": file,
                **config.pop("flops_profiler", {}),
            },
            **config,
        },
    )
    written = {}
    x = torch.ones(9, 8, dtype=next(engine.module.parameters()).dtype)
    for step in range(steps):
        for _ in range(2):
            engine.module.eval()
            with torch.no_grad():
                engine(x)  # an evaluation does not count
            engine.module.train()
            engine.backward(engine(x[:2]))
            engine.step()
        if path.exists() and engine.ctx.rank == 0:
            written[str(step)] = path.read_text()
            path.unlink()
    engine.destroy()
    return written


FORWARD = 2 * 2 * (64 + 32)


@pytest.mark.usefixtures("clean_ds")
def test_one_step_is_profiled(tmp_path: Path) -> None:
    section = {"profile_step": 2, "recompute_fwd_factor": 0.5, "detailed": True}
    written = run(4, str(tmp_path / "profile.txt"), flops_profiler=section)
    assert list(written) == ["2"]
    found = lines(written["2"])
    assert "flops profiler: step 2" in written["2"]
    assert found["micro-batches per step"] == "2"
    assert (
        found["parameters of the model"]
        == found["parameters of this rank's part of the model"]
        == "96"
    )
    assert found["forward MACs per rank"] == f"{FORWARD // 2} MACs"
    assert found["forward FLOPs per rank"] == str(FORWARD)
    assert found["backward FLOPs per rank, assumed: 2.5 x forward".partition(": ")[0]].endswith(
        "960"
    )
    # not for the batch
    assert found["backward FLOPs per rank, measured"] == str(2 * 2 * (32 + 32 + 64))
    assert float(found["samples per second, all ranks"]) > 0
    assert (
        "(first) Linear(in_features=8, out_features=8, bias=False): 64 params 66.67%, 128 MACs "
        "66.67%" in written["2"]
    )


@pytest.mark.usefixtures("clean_ds")
def test_a_step_that_has_passed_and_a_section_that_is_off(tmp_path: Path) -> None:
    file = str(tmp_path / "profile.txt")
    assert run(2, file, flops_profiler={"enabled": False}) == {}
    assert run(1, file, flops_profiler={"profile_step": 1}) == {}
    assert list(run(1, file, flops_profiler={"profile_step": 0})) == ["0"]
