"""Recomputation beside what divides a model among ranks: the same bits as without, and the memory
of the formula.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from block_models import WIDTH, config  # noqa: E402

import ds_core  # noqa: E402
from ds_core import comm  # noqa: E402

AUTO = {"modules": "auto"}


def check_same_bits(
    build: Callable[[], nn.Module],
    step: Callable[[Any, int], Tensor],
    sections: Any,
    recompute: Any,
) -> None:
    """Two steps with `recompute` as the section activation_checkpointing, and without: the same
    bits on each rank.
    """
    found = []
    for section in ({}, {"activation_checkpointing": recompute}):
        torch.manual_seed(2)
        engine, *_ = ds_core.initialize(model=build(), config=config(**sections, **section))
        torch.manual_seed(3 + engine.ctx.mesh.index("dp"))
        losses = [step(engine, index) for index in range(2)]
        engine.destroy()
        found.append([*losses, *engine.module.state_dict().values()])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs), f"{sections} {recompute}: {mine} {theirs}"


# -- pipelines -------------------------------------------------------------------------------------


class PipeBlock(nn.Module):
    """Takes and gives (hidden, mask), with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 24)
        self.down = nn.Linear(24, WIDTH)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = given
        out = nn.functional.dropout(torch.tanh(self.up(hidden)), 0.3)
        return hidden + self.down(out) * mask.unsqueeze(-1), mask


def last(given: tuple[Tensor, Tensor]) -> Tensor:
    return given[0]


def pipelines() -> None:
    from ds_pipeline import LayerSpec, PipelineModule

    def loss(out: Tensor, labels: Tensor) -> Tensor:
        return (out - labels).square().mean()

    def micros() -> Any:
        generator = torch.Generator().manual_seed(7)
        while True:
            x = torch.randn(4, WIDTH, generator=generator)
            yield (x, torch.rand(4, generator=generator) > 0.3), x.flip(0)

    def build(blocks: int, **options: Any) -> Callable[[], nn.Module]:
        layers = [*(LayerSpec(PipeBlock) for _ in range(blocks)), last]
        return lambda: PipelineModule(
            layers, num_stages=2, loss_fn=loss, partition_method="uniform", **options
        )

    def step(engine: Any, index: int) -> Tensor:
        return engine.train_batch(micros()).detach()  # type: ignore[no-any-return]

    several = {"gradient_accumulation_steps": 3}
    check_same_bits(build(4), step, several, AUTO)
    # one per stage
    check_same_bits(
        build(2), step, several | {"zero_optimization": {"stage": 1}}, {"modules": ["PipeBlock"]}
    )
    check_same_bits(build(2), step, several, {"policy": "keep_matmuls", "budget": 6000})
    check_same_bits(
        build(4, activation_checkpoint_interval=2), step, several, {"cpu_checkpointing": True}
    )
    check_same_bits(build(4), step, several | {"pipeline": {"schedule": "zero_bubble"}}, AUTO)


def test_pipelines() -> None:
    run_ranks(2, pipelines)


# -- experts ---------------------------------------------------------------------------------------


class ExpertBlock(nn.Module):
    """A MoE layer whose choices are random, with few places."""

    def __init__(self) -> None:
        from ds_moe import MoE

        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 24), nn.SiLU(), nn.Linear(24, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = MoE(
            WIDTH,
            expert,
            4,
            ep_size=2,
            k=1,
            noisy_gate_policy="Jitter",
            capacity_factor=0.5,
            use_rts=True,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, aux, _ = self.moe(self.norm(x))
        return x + out, aux


class ExpertNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ExpertBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for block in self.blocks:
            x, aux = block(x)
            total = total + aux
        return x.square().mean() + total


def experts() -> None:
    from ds_moe.expert_load import EXPERT_LOADS

    totals: list[float] = []

    def step(engine: Any, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * index + comm.rank())
        loss = engine(torch.randn(12, WIDTH, generator=generator))
        engine.backward(loss)
        loads = engine.ctx.stash[EXPERT_LOADS]
        if index == 0:
            totals.append(sum(float(load.totals[:4].sum()) for load in loads.values()))
        engine.step()
        return loss.detach()  # type: ignore[no-any-return]

    for stage in (1, 3):
        check_same_bits(ExpertNet, step, {"zero_optimization": {"stage": stage}}, AUTO)
    assert totals == [24] * 4, totals  # a token is counted once, however often its layer runs


def test_experts() -> None:
    run_ranks(2, experts)


# -- tensor and sequence parallelism ---------------------------------------------------------------


def llama() -> Any:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).train()


def dropping() -> Any:
    """Dropout everywhere: on scores, between layers, on embeddings."""
    import transformers

    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).train()


def divided(sections: Any, recompute: Any) -> None:
    def step(engine: Any, index: int) -> Tensor:
        ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(index))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()  # type: ignore[no-any-return]

    check_same_bits(llama if comm.world_size() == 2 else dropping, step, sections, recompute)


PARTS = {**AUTO, "partition_activations": True}


@pytest.mark.parametrize(
    "sections, recompute",
    [
        ({"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 3}}, PARTS),
        (
            {"sequence_parallel": {"size": 2}, "zero_optimization": {"stage": 2}},
            {**AUTO, "policy": "keep_matmuls"},
        ),
    ],
    ids=["tp", "sp"],
)
def test_divided_models(sections: Any, recompute: Any) -> None:
    run_ranks(2, divided, sections, recompute)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"sequence_parallel": True}], ids=["whole", "tokens"])
@pytest.mark.parametrize("stage", [0, 3])
def test_dropout_of_models_that_are_divided_twice(stage: int, more: Any) -> None:
    """With `sequence_parallel` of the layers, four of them; otherwise sequences are divided by two,
    too.
    """
    size = 4 if more else 2
    sections: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    sections |= {"tensor_parallel": {"autotp_size": size, **more}}
    sections |= {} if more else {"sequence_parallel": {"size": 2}}
    run_ranks(4, divided, sections, PARTS if not more else AUTO)


# -- memory ----------------------------------------------------------------------------------------


def left(run: Callable[[], Any]) -> int:
    """Bytes that a forward leaves for backward, by torch's allocator."""
    with torch.profiler.profile(profile_memory=True) as profile:
        out = run()
    total = sum(event.self_cpu_memory_usage for event in profile.key_averages())
    del out
    return int(total)


def memory(axis: str) -> list[int]:
    """Bytes with all inputs of six blocks kept, and with a part of each; rows that do not
    divide."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in "abcdef"
            )

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x.sum()

    x = torch.randn(1001, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = []
    for section in ({}, {"partition_activations": True, "partition_axis": axis}):
        fake = {
            "plugins": {"load": ["fake_axes=ds_testing.kits.parallel.fake_axes"]},
            "fake_axes": {"axes": {axis: 2}},
        }
        section = {"activation_checkpointing": {"modules": "auto", **section}}
        engine, *_ = ds_core.initialize(model=Step(), config=config(**fake, **section))
        for _ in range(2):  # the first forwards compare ranks
            engine(x).backward()
        found.append(left(lambda engine=engine: engine(x)))
        engine.destroy()
    return found


@pytest.mark.parametrize("axis", ["tp", "mine"])
def test_memory_is_that_of_the_formula(axis: str) -> None:
    row = 64 * 4
    random = 6 * len(torch.get_rng_state())
    for whole, part in run_ranks(2, memory, axis):
        # the first input is the caller's
        assert whole == pytest.approx(5 * 1001 * row + random, rel=0.05)
        assert part == pytest.approx(6 * 1001 * row / 2 + random, rel=0.05)
