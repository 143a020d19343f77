"""Numbers of a pipeline in 16 bits, with many stages, and beside other mesh axes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from ds_testing import run_ranks
from pipe_models import MICRO, Plain, pipeline
from pipe_runs import batches, close, numbers, pipeline_engine, plain_loss, squares

# -- precision -------------------------------------------------------------------------------------


def trains_in(name: str, schedule: str, stages: int, chunks: int, zero: int) -> list[Any]:
    """(losses, weights, skipped) after 4 steps, the second of which overflows in fp16."""
    from ds_testing.truth import whole_weights

    sections: dict[str, dict[str, Any]] = {
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}},
        "bf16": {"bf16": {"enabled": True}},
        "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    }
    config = {**sections[name], "zero_optimization": {"stage": zero}}
    engine = pipeline_engine(pipeline(stages, chunks).float(), gas=3, schedule=schedule, **config)
    losses = []
    for step in range(4):
        if name == "fp16" and step == 1:
            engine.scaler.scale = 1e30
        losses.append(engine.train_batch(batches(3, step)).item())
        if name == "fp16":
            engine.scaler.scale = 256.0
    weights = {n: w.float() for n, w in whole_weights(engine).items()}
    answer = [losses, weights, engine.skipped_steps]
    engine.destroy()
    return answer


@pytest.mark.fast_cases("bf16-zero_bubble-1-2", "fp16-1f1b-1-0")
@pytest.mark.parametrize(
    ("schedule", "chunks", "zero"), [("1f1b", 1, 0), ("zero_bubble", 1, 2), ("interleaved", 2, 1)]
)
@pytest.mark.parametrize("name", ["fp16", "bf16", "autocast"])
def test_sixteen_bits_are_as_in_one_process(
    name: str, schedule: str, chunks: int, zero: int
) -> None:
    (losses, weights, skipped), *_ = run_ranks(1, trains_in, name, schedule, 1, chunks, zero)
    assert skipped == (name == "fp16")
    seen = set()
    for ours, mine, times in run_ranks(2, trains_in, name, schedule, 2, chunks, zero):
        assert times == skipped
        assert ours == pytest.approx(losses, rel=5e-3)
        for key, value in mine.items():
            seen.add(key)
            assert (value - weights[key]).abs().max() <= 1e-2, key
    assert seen == set(weights)


# -- many stages, other axes -----------------------------------------------------------------------


def trains_few_layers() -> None:
    from ds_pipeline import LayerSpec, PipelineModule

    specs = [LayerSpec(nn.Linear, 6, 6), torch.tanh, LayerSpec(nn.Linear, 6, 6)]
    for schedule in ("1f1b", "zero_bubble"):
        options = {"seed_layers": True, "base_seed": 3, "partition_method": "uniform"}
        model = PipelineModule(specs, num_stages=4, loss_fn=squares, **options).double()
        engine = pipeline_engine(model, gas=2, schedule=schedule)
        assert model.partitions() == [0, 1, 2, 3, 3]
        truth = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
        for index in (0, 2):
            torch.manual_seed(3 + index)
            truth[index] = nn.Linear(6, 6).double()
        optimizer = torch.optim.AdamW(truth.parameters(), lr=0.01)
        for step in range(2):
            ours = engine.train_batch(iter([numbers(step, m) for m in range(2)]))
            losses = [
                squares(truth(numbers(step, m)[0]), numbers(step, m)[1]) / 2 for m in range(2)
            ]
            sum(losses).backward()  # type: ignore[union-attr]
            torch.nn.utils.clip_grad_norm_(truth.parameters(), 0.4)
            optimizer.step()
            optimizer.zero_grad()
            assert close(ours, sum(x.item() for x in losses))
        engine.destroy()


def test_stages_without_layers() -> None:
    run_ranks(4, trains_few_layers)


def trains_beside_tp(pipe_partitioned: bool) -> int:
    from ds_core import comm

    sent = comm.isend
    sizes = []

    def counting(tensor: Tensor, *rest: Any) -> Any:
        sizes.append(tensor.numel())
        return sent(tensor, *rest)

    comm.isend = counting
    try:
        config = {
            "fake_axes": {"axes": {"tp": 2}},
            "plugins": {"load": ["fake_axes=ds_testing.kits.parallel.fake_axes"]},
            "pipeline": {"pipe_partitioned": pipe_partitioned, "schedule": "zero_bubble"},
        }
        engine = pipeline_engine(pipeline(2), gas=3, **config)
        truth = Plain()
        optimizer = torch.optim.AdamW(truth.parameters(), lr=0.01)
        assert engine.mpu().get_model_parallel_world_size() == 2
        for step in range(2):
            assert close(engine.train_batch(batches(3, step)), plain_loss(truth, 3, step))
            for one in batches(3, step):
                (truth(*one) / 3).backward()
            torch.nn.utils.clip_grad_norm_(truth.parameters(), 0.4)
            optimizer.step()
            optimizer.zero_grad()
        engine.destroy()
    finally:
        comm.isend = sent
    return sum(sizes)


def test_activations_are_shared_out_over_tensor_parallel_ranks() -> None:
    whole = run_ranks(4, trains_beside_tp, False)
    shares = run_ranks(4, trains_beside_tp, True)
    assert all(a < 0.75 * b for a, b in zip(shares, whole, strict=True)), (shares, whole)


class Seeded(nn.Linear):
    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        super().__init__(width, width)


def ties_all() -> tuple[list[Tensor], list[str]]:
    """Weights of a tied layer with a bias after two steps, on one stage and over two; and what the
    log says.
    """
    import logging

    from ds_pipeline import PipelineModule, TiedLayerSpec

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ds_pipeline")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    layers = [TiedLayerSpec("t", Seeded, 4), nn.Tanh(), TiedLayerSpec("t", Seeded, 4)]
    net = PipelineModule(layers, num_stages=2, loss_fn=lambda out, y: (out - y).square().mean())
    engine = pipeline_engine(net, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    x = torch.linspace(-1, 1, 4 * MICRO).view(MICRO, 4)
    for _ in range(2):
        engine.train_batch(iter([(x, x)] * 2))
    engine.destroy()
    log.removeHandler(handler)
    return [p.detach() for p in net.tied["t"].parameters()], told


def test_ties_are_of_whole_modules_and_the_log_says_so() -> None:
    plain = Seeded(4)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 4 * MICRO).view(MICRO, 4)
    for _ in range(2):
        (plain(torch.tanh(plain(x))) - x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.4)
        optimizer.step()
        optimizer.zero_grad()
    (first, told), (second, _) = run_ranks(2, ties_all)
    for a, b, c in zip(first, second, plain.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.allclose(a, c, atol=1e-5)
    assert [t for t in told if t.startswith("TiedLayerSpec 't': bias are tied too")]
