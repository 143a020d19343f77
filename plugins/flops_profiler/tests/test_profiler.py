"""`FlopsProfiler` and `get_model_profile`: methods, arguments, the printed profile, and what is
refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ds_flops_profiler import (
    FlopsProfiler,
    bytes_to_string,
    duration_to_string,
    flops_to_string,
    get_model_profile,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from torch import Tensor, nn

from ds_core.errors import UsageError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4)])
        self.loss = nn.MSELoss()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.loss(x, torch.zeros_like(x))

    def generate(self, x: Tensor, length: int) -> Tensor:
        for _ in range(length):
            y = self(x)
        return y


X = torch.ones(3, 8)
MACS = 3 * (64 + 32)


def test_a_training_loop() -> None:
    model = Net()
    profiler = FlopsProfiler(model)
    for step in range(3):
        if step == 1:
            profiler.start_profile()
        loss = model(X)
        if step == 1:
            profiler.stop_profile()
            assert profiler.get_total_macs() == MACS
            assert profiler.get_total_flops() == 2 * MACS
            assert profiler.get_total_flops(as_string=True) == "576 "
            assert profiler.get_total_macs(as_string=True) == "288 MACs"
            assert profiler.get_total_params() == 108
            assert profiler.get_total_params(as_string=True) == "108"
            assert 0 < profiler.get_total_duration() < 60
            assert profiler.get_total_duration(as_string=True).endswith("s")
            profiler.end_profile()
        loss.backward()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_counts_start_from_zero_and_can_be_reset() -> None:
    model = Net()
    profiler = FlopsProfiler(model)
    for _ in range(2):
        profiler.start_profile()
        model(X)
        assert profiler.get_total_macs() == MACS
    profiler.reset_profile()
    model(X)
    model(X)
    assert profiler.get_total_macs() == 2 * MACS
    profiler.stop_profile()
    model(X)
    assert profiler.get_total_macs() == 2 * MACS
    profiler.end_profile()
    profiler.end_profile()
    with pytest.raises(UsageError, match=r"there is no profile: call start_profile\(\) before"):
        profiler.get_total_flops()


def test_an_exception_in_a_forward_leaves_the_counts_sound() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    model = nn.Sequential(nn.Linear(8, 8), Fails())
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model(X)
    assert profiler.get_total_macs() == 2 * 3 * 64
    profiler.end_profile()


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "profile.txt"
    given = get_model_profile(Net(), args=[X], top_modules=2, output_file=str(file))
    assert given == ("576 ", "288 MACs", "108")
    assert capsys.readouterr().out == ""
    text = file.read_text()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "flops profiler: step 1" in text
    for wanted in ("parameters: 108", "forward MACs: 288 MACs", "forward FLOPs: 576", "depth 2"):
        assert wanted in lines
    start = text.index("depth 2")
    assert "params Linear 108" in " ".join(text[start:].split())
    assert "(layers) ModuleList: 108 params 100%, 288 MACs 100%" in text
    assert (
        "    (1) Linear(in_features=8, out_features=4, bias=True): 36 params 33.33%, 96 MACs 33.33%"
        in text
    )
    assert "(loss) MSELoss: 0 params 0%, 0 MACs 0%" in text


def test_depth_and_details(capsys: pytest.CaptureFixture[str]) -> None:
    get_model_profile(Net(), args=[X], module_depth=1)
    shallow = capsys.readouterr().out
    assert "depth 1" in shallow and "depth 2" not in shallow
    assert "(layers) ModuleList" in shallow and "(0) Linear" not in shallow
    get_model_profile(Net(), args=[X], detailed=False)
    assert "(layers)" not in capsys.readouterr().out
    get_model_profile(Net(), args=[X], print_profile=False)
    assert capsys.readouterr().out == ""


def test_ignored_modules_count_at_their_callers(capsys: pytest.CaptureFixture[str]) -> None:
    flops, *_ = get_model_profile(Net(), args=[X], ignore_modules=[nn.Linear], as_string=False)
    assert flops == 2 * MACS
    out = capsys.readouterr().out
    assert (
        "(0) Linear(in_features=8, out_features=8, bias=True): 72 params 66.67%, 0 MACs 0%, 0 s 0%"
        in out
    )
    assert "Net: 108 params 100%, 288 MACs 100%" in out


def test_modes_and_warm_up() -> None:
    calls: list[int] = []
    model = Net()
    model.register_forward_hook(lambda *_: calls.append(1))
    options: dict[str, Any] = {"print_profile": False, "as_string": False}
    model.train()
    assert get_model_profile(model, kwargs={"x": X}, warm_up=3, **options)[1] == MACS
    assert len(calls) == 4 and model.training
    assert (
        get_model_profile(model, args=[X], kwargs={"length": 2}, mode="generate", **options)[1]
        == 2 * MACS
    )
    assert get_model_profile(nn.Linear(4, 2, dtype=torch.float64), (3, 4), **options)[1] == 24


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "needs input_shape, or the arguments of a call"),
        ({"input_shape": ()}, r"input_shape=\(\); it is a tuple of at least one number"),
        ({"input_shape": 8}, "input_shape=8; it is a tuple"),
        ({"args": [X], "mode": "train"}, "mode='train'; it is 'forward' or 'generate'"),
        ({"args": [X], "device": "cuda"}, "device='cuda'; it is 'meta'"),
        ({"args": [X], "device": "meta", "mode": "generate"}, "no values to generate from"),
    ],
)
def test_what_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        get_model_profile(Net(), **given)


def test_a_profiler_takes_modules() -> None:
    with pytest.raises(UsageError, match=r"takes a torch.nn.Module or an engine, not int"):
        FlopsProfiler(3)


def test_numbers_with_units() -> None:
    assert [number_to_string(n) for n in (0, 12, 1234, 1.5e6, 2e9, 3.21e15, 0.0125, 1e-7)] == [
        *("0 ", "12 ", "1.23 K", "1.5 M", "2 G", "3210 T", "12.5 m", "0.1 u"),
    ]
    assert number_to_string(1234, units="M", precision=4) == "0.0012 M"
    assert number_to_string(1234, units="") == "1234 "
    assert flops_to_string(2.5e12) == "2.5 TFLOPS" and macs_to_string(10) == "10 MACs"
    assert params_to_string(7e9) == "7 B" and params_to_string(7e9, units="M") == "7000 M"
    assert params_to_string(7e9, units="B") == "7 B"
    assert duration_to_string(0.0021) == "2.1 ms" and bytes_to_string(1e9) == "1 GB"
    with pytest.raises(UsageError, match="units='X'; it is one of"):
        number_to_string(1, units="X")
