"""The conformance kit of pipeline schedules: the hook `ds_pipeline_schedules`.

It needs dscore-testing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ds_testing.pool import run_ranks

from ds_core.plugins import Plugins
from ds_core.plugins.registry import PluginSettings
from ds_pipeline.schedules.choose import find_schedule
from ds_pipeline.schedules.validate import ScheduleError, check

if TYPE_CHECKING:
    from ds_pipeline.layers.module import PipelineModule
    from ds_pipeline.schedules.schedule import PipeSchedule

WIDTH = 6
LAYERS = 5
MICRO = 2
STEPS = 3
TOLERANCE = 1e-12  # in fp64, where micro-batches are summed in another order


class PipelineScheduleConformance:
    """Inherit, and set `name` and `plugin`; the class's name must start with Test.

    name: what configs call the schedule.
    plugin: its declaration module, where that is not installed.
    chunks: parts of the model on each stage.
    shapes: (stages, micro-batches) that it must serve.
    """

    name: str = ""
    plugin: str = ""
    chunks: ClassVar[int] = 1
    shapes: ClassVar[Sequence[tuple[int, int]]] = (
        (1, 1),
        (1, 4),
        (2, 1),
        (2, 4),
        (3, 5),
        (4, 8),
        (8, 8),
    )
    timeout: ClassVar[float] = 300.0

    def make(self) -> Callable[[int, int, int], PipeSchedule]:
        """What the config's name stands for."""

        load = [self.plugin] if self.plugin else []
        found = find_schedule(self.name, Plugins(PluginSettings(load=load)))
        assert found is not None, f"{self.name!r} is dscore-pipeline's own; choose another name"
        return found

    def test_every_shape_is_proven(self) -> None:
        """Complete, free of deadlock, every micro-batch once, nothing after the reduction."""
        make = self.make()
        for stages, count in self.shapes:
            try:
                proof = check(lambda stage, m=count, s=stages: make(m, s, stage))  # type: ignore[misc]
            except ScheduleError as error:
                raise AssertionError(f"{stages} stages, {count} micro-batches: {error}") from error
            assert len(proof.spans) == stages

    def test_a_buffer_for_each_that_is_kept(self) -> None:
        """`num_pipe_buffers` is enough, and no more than there are micro-batches and parts."""
        make = self.make()
        for stages, count in self.shapes:
            for stage in range(stages):
                buffers = make(count, stages, stage).num_pipe_buffers()
                assert 1 <= buffers <= max(2, count * self.chunks), (
                    f"stage {stage} of {stages} has {buffers} buffers for {count} micro-batches"
                )

    def test_it_trains_as_one_process(self) -> None:
        """Losses and weights of two stages are those of the plain model."""
        answers = run_ranks(2, _train, self.name, self.plugin, self.chunks, timeout=self.timeout)
        truth = run_ranks(1, _train_plainly, timeout=self.timeout)[0]
        for rank, (losses, weights) in enumerate(answers):
            for step, (ours, theirs) in enumerate(zip(losses, truth[0], strict=True)):
                assert abs(ours - theirs) <= TOLERANCE, (
                    f"rank {rank}: the loss of step {step} is {ours}, not {theirs}"
                )
            for index, total in weights.items():
                wanted = truth[1][index]
                assert abs(total - wanted) <= TOLERANCE * abs(wanted), (
                    f"the weights of layer {index} differ"
                )


def _layers() -> list[Any]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH).double() for _ in range(LAYERS)]


def _batch(step: int, micro: int) -> Any:
    import torch

    rows = torch.randn(
        MICRO,
        WIDTH,
        generator=torch.Generator().manual_seed(100 * step + micro),
        dtype=torch.float64,
    )
    return rows, rows.roll(1, -1)


COUNT = 4  # micro-batches of a step


def _train(name: str, plugin: str, chunks: int) -> tuple[list[float], dict[str, float]]:
    from torch import nn

    import ds_core
    from ds_pipeline.layers.module import PipelineModule

    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": COUNT,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "pipeline": {"schedule": name},
        "plugins": {"load": [plugin] if plugin else []},
    }
    given = _layers()
    model: PipelineModule = PipelineModule(
        given,
        num_stages=2,
        loss_fn=nn.functional.mse_loss,
        chunks=chunks,
        partition_method="uniform",
    )
    engine, *_ = ds_core.initialize(model=model, config=config)
    losses = [
        engine.train_batch(iter([_batch(s, m) for m in range(COUNT)])).item() for s in range(STEPS)
    ]
    mine = {id(p) for p in engine.module.parameters()}
    weights = {
        str(i): float(layer.weight.detach().abs().sum())
        for i, layer in enumerate(given)
        if id(layer.weight) in mine
    }
    engine.destroy()
    return losses, weights


def _train_plainly() -> tuple[list[float], dict[str, float]]:
    import torch
    from torch import nn

    layers = _layers()
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for micro in range(COUNT):
            rows, wanted = _batch(step, micro)
            loss = nn.functional.mse_loss(model(rows), wanted) / COUNT
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {
        str(i): float(layer.weight.detach().abs().sum()) for i, layer in enumerate(layers)
    }
