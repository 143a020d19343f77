"""The topology of a `PipelineModule`, and what the engine of a pipeline reports."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from ds_testing import run_ranks
from pipe_models import MICRO, Plain, batch, pipeline, specs
from pipe_steps import linears, pipeline_engine, plain_step, rows, squares, trains_like

import ds_core
from ds_core import comm
from ds_core.errors import ConfigError, UsageError
from ds_core.mesh import plan_mesh
from ds_core.setup.compose import compose

# -- topologies and the mpu ------------------------------------------------------------------------


def has_grids_alone() -> None:
    """A grid of a process group, without a model: all ranks, or half of them."""
    from ds_pipeline import PipeDataParallelTopology, PipelineParallelGrid

    alone = PipelineParallelGrid()
    assert (alone.get_data_parallel_world_size(), alone.get_data_parallel_rank()) == (
        4,
        comm.rank(),
    )
    halves = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    half, other = halves[:: 1 if comm.rank() < 2 else -1]
    inner = PipelineParallelGrid(PipeDataParallelTopology(2, 1), half)
    assert (inner.get_global_rank(), inner.get_stage_id()) == (comm.rank(), comm.rank() % 2)
    assert inner.stage_to_global(0) == comm.rank() // 2 * 2
    assert PipelineParallelGrid(process_group=half).get_data_parallel_world_size() == 2
    with pytest.raises(UsageError, match="the topology has 4 ranks, process_group 2"):
        PipelineParallelGrid(PipeDataParallelTopology(2, 2), half)
    with pytest.raises(UsageError, match=f"rank {comm.rank()} is not in process_group"):
        PipelineParallelGrid(process_group=other)


def has_a_topology() -> None:
    """The mpu of an engine over a topology that the user gave."""
    from ds_pipeline import PipeDataParallelTopology, PipelineModule

    has_grids_alone()
    model = PipelineModule(linears(4), topology=PipeDataParallelTopology(2, 2), loss_fn=squares)
    with pytest.raises(
        UsageError, match="once ds_core.initialize has been called with the module, without mpu="
    ):
        model.mpu().get_pipe_parallel_group()
    engine = pipeline_engine(model)
    mpu = engine.mpu()
    rank = comm.rank()
    assert engine.topology().get_axis_names() == ["pipe", "data"]
    assert engine.num_pipeline_stages() == mpu.get_pipe_parallel_world_size() == 2
    assert (mpu.get_global_rank(), mpu.get_pipe_parallel_rank(), mpu.get_data_parallel_rank()) == (
        rank,
        rank // 2,
        rank % 2,
    )
    groups = {"pipe": mpu.get_pipe_parallel_group(), "data": mpu.get_data_parallel_group()}
    for axis, group in groups.items():
        mine = next(r for r in engine.topology().get_axis_comm_lists(axis) if rank in r)
        assert torch.distributed.get_process_group_ranks(group) == mine
    assert comm.world_size(
        mpu.get_model_parallel_group() if engine.ctx.mesh.has("tp") else None
    ) in (1, 4)
    assert mpu.stage_to_global(1) == 2 + rank % 2
    assert engine.is_first_stage() == mpu.is_first_stage == (rank < 2)
    engine.destroy()
    refuses_what_does_not_fit(mpu)


def refuses_what_does_not_fit(mpu: Any) -> None:
    """Topologies of another size, and an `mpu` beside the module's own."""
    from ds_pipeline import (
        PipeDataParallelTopology,
        PipelineModule,
        PipeModelDataParallelTopology,
    )

    wrong = [
        (PipeDataParallelTopology(4, 2), "the topology has 8 ranks in 4 stages, this run 4 in 4"),
        (PipeModelDataParallelTopology(2, 2, 1), "leave topology out and give num_stages"),
    ]
    for topology, why in wrong:
        with pytest.raises(UsageError, match=why):
            pipeline_engine(PipelineModule(linears(4), topology=topology, loss_fn=squares))

    units = ModuleType("own_units")  # makes a mesh of any unit
    vars(units)["ds_mesh"] = lambda rank, world_size: plan_mesh([], world_size, rank)
    sys.modules[units.__name__] = units
    with pytest.raises(UsageError, match="brings its own mpu"):
        ds_core.initialize(
            model=PipelineModule(linears(4), num_stages=2, loss_fn=squares),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": "SGD"},
                "plugins": {"load": [units.__name__]},
            },
            mpu=mpu,
        )


def stands_beside_another_axis() -> list[Any]:
    """An axis that the documents do not know is in the topology too."""
    config = {
        "fake_axes": {"axes": {"cp": 2}},
        "plugins": {"load": ["fake_axes=ds_testing.kits.parallel.fake_axes"]},
    }
    engine = pipeline_engine(pipeline(2), **config)
    truth = Plain()
    assert set(engine.topology().get_axis_names()) == {"pipe", "cp", "data"}
    ours = engine.train_batch(iter([batch(0, m, 0) for m in range(2)])).item()
    assert ours == pytest.approx(
        sum(truth(*batch(0, m, 0)).item() for m in range(2)) / 2, rel=1e-12
    )
    answer = [engine.mpu().get_global_rank(), engine.mpu().stage_to_global(1)]
    engine.destroy()
    return answer


def test_a_topology_of_ones_own_and_the_mpu() -> None:
    run_ranks(4, has_a_topology)


def test_names_of_deepspeed_s_module_say_what_there_is_instead() -> None:
    from ds_pipeline import PipelineModule

    model = PipelineModule(linears(1), num_stages=1, loss_fn=squares)
    with pytest.raises(AttributeError, match="train_batch sums the gradients of tied weights"):
        _ = model.allreduce_tied_weight_gradients
    with pytest.raises(AttributeError, match="^'PipelineModule' object has no attribute 'other'$"):
        _ = model.other
    engine = pipeline_engine(model)
    with pytest.raises(
        AttributeError, match="^a PipelineModule has no allreduce_tied_weight_gradients"
    ):
        _ = engine.allreduce_tied_weight_gradients


@pytest.mark.slow
def test_other_axes() -> None:
    told = run_ranks(4, stands_beside_another_axis)
    assert [t[0] for t in told] == [0, 1, 2, 3]
    assert [t[1] for t in told] == [2, 3, 2, 3]


# -- the engine ------------------------------------------------------------------------------------


def reports(folder: Path) -> None:
    """Additional losses, monitors, compile: what the engine has runs with pipelines as well."""
    from ds_pipeline import PipelineModule

    class Tells(PipelineModule):
        def get_additional_losses(self) -> dict[str, Tensor] | None:
            return (
                {"micro": torch.tensor(float(self._micro_offsets[0]))}
                if self.is_last_stage()
                else None
            )

    layers = linears(4)
    truth = copy.deepcopy(layers)
    monitor = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    model = Tells(layers, num_stages=2, loss_fn=squares, partition_method="uniform")
    engine = pipeline_engine(
        model,
        gas=3,
        csv_monitor=monitor,
        steps_per_print=1,
        comms_guard={"enabled": True},
    )
    engine.compile(backend="eager")
    assert engine.train_batch(iter(rows(3, 9))).item() == pytest.approx(
        plain_step(truth, rows(3, 9)), rel=1e-12
    )
    trains_like(engine, truth)
    assert engine.runner.additional_losses == ({"micro": 8.0} if engine.is_last_stage() else {})
    assert engine.was_step_applied()
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 9, 3 * 3 * MICRO)
    engine.reset_activation_shape()
    trains_like(engine, truth)
    engine.destroy()
    if engine.ctx.mesh.rank == 0:
        found = {p.name for p in (folder / "job").iterdir()}
        assert any("loss" in name for name in found), found


def only_evaluates(zero: int) -> None:
    """Without an optimizer; and in turns with training, under every stage of ZeRO."""
    truth = Plain()
    wanted = sum(truth(*batch(0, m, 0)).item() for m in range(2)) / 2
    if zero == 0:
        engine, optimizer, *_ = ds_core.initialize(
            model=pipeline(2),
            config={"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": 2},
        )
        assert optimizer is None
        for _ in range(2):
            ours = engine.eval_batch(iter([batch(0, m, 0) for m in range(2)])).item()
            assert ours == pytest.approx(wanted, rel=1e-12)
        unlabelled = iter([(batch(0, 0, 0)[0], None)])
        outputs = engine.eval_batch(unlabelled, compute_loss=False, num_micro_batches=1)
        assert (outputs is not None) == engine.is_last_stage()
        engine.destroy()
    for chunks in (1, 2):
        section = {"stage": zero, "reduce_bucket_size": 300, "param_persistence_threshold": 8}
        engine = pipeline_engine(pipeline(2, chunks), zero_optimization=section)
        truth = Plain()
        for step in range(2):
            given = [batch(step, m, 0) for m in range(2)]
            params = list(truth.parameters())
            losses = [truth(*b) / 2 for b in given]
            wanted = sum(x.item() for x in losses)
            assert engine.eval_batch(iter(given)).item() == pytest.approx(wanted, rel=1e-12)
            assert engine.train_batch(iter(given)).item() == pytest.approx(wanted, rel=1e-12)
            for param, grad in zip(params, torch.autograd.grad(sum(losses), params), strict=True):
                param.data -= 0.1 * grad
        engine.destroy()


def misuses() -> None:
    """Ranks that are not at the same work all say so, and can go on; buffers that are filled again
    are noticed.
    """
    engine = pipeline_engine(pipeline(2))
    first = comm.rank() == 0
    pattern = "ranks do not make the same call: this one is in "
    given = [batch(0, m, 0) for m in range(3)]
    with pytest.raises(
        UsageError,
        match=pattern + f"eval_batch of {2 + first} micro-batches, another in eval_batch",
    ):
        engine.eval_batch(iter(given), num_micro_batches=2 + first)
    with pytest.raises(UsageError, match=pattern + ("train" if first else "eval")):
        (engine.train_batch if first else engine.eval_batch)(iter(given))
    with pytest.raises(
        UsageError, match=pattern + "eval_batch of 2 micro-batches" + (" without" if first else ",")
    ):
        engine.eval_batch(iter(given), compute_loss=not first)
    with pytest.raises(StopIteration):
        engine.train_batch(iter(given[:1]))
    (tokens, mask), labels = batch(0, 0, 0)

    def filled_again() -> Any:
        for m in range(2):
            labels.copy_(batch(0, m, 0)[1])
            yield (tokens, mask), labels

    with pytest.raises(UsageError, match="needs its own tensors"):
        engine.train_batch(filled_again())
    assert engine.global_steps == 0
    engine.train_batch(iter(given))
    engine.destroy()


def test_reports(tmp_path: Path) -> None:
    run_ranks(2, reports, tmp_path)


@pytest.mark.fast_cases("3")
@pytest.mark.parametrize("zero", [0, 3])
def test_evaluation_alone_and_in_turns(zero: int) -> None:
    run_ranks(2, only_evaluates, zero)


def test_misuse_is_told_on_every_rank() -> None:
    run_ranks(2, misuses)


def test_specs_say_what_they_build() -> None:
    assert repr(specs()[1]) == "Block(6)"
    assert repr(specs()[0]) == "Embedding(11, 6)"


def test_keys_that_a_pipeline_has_no_use_for_are_told() -> None:
    with pytest.raises(
        ConfigError, match="managed_gradient_accumulation: false is not possible with a pipeline"
    ):
        compose({"pipeline": {"stages": 2}, "managed_gradient_accumulation": False})
    (note,) = compose({"pipeline": {"partition": "type:Block"}}).notes
    assert str(note).startswith("pipeline.partition: has no effect: ")
