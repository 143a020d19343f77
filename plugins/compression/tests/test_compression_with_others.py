"""Compression beside bf16, pipelines, zero.Init, recomputation and models of the transformers
library.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from ds_compression.config import CompressionConfig
from ds_testing import GradientsConformance
from torch import Tensor, nn

from ds_core import comm
from ds_core.errors import ConfigError
from ds_core.setup.compose import compose

sys.path.insert(0, str(Path(__file__).parent))
from compressed_runs import BATCH, STEPS, WIDTH, batch, config, loss_of, net, off, trained  # noqa: E402
from ds_testing.truth import difference
from test_compression_numbers import BODY, CASES, symmetric, technique, through  # noqa: E402

STAGE = {stage: {"zero_optimization": {"stage": stage}} for stage in (0, 1, 2, 3)}
BITS = technique(
    "weight_quantization", {}, {"start_bits": 6, "target_bits": 4, "quantization_period": 2}, BODY
)
ANY = {
    **technique(
        "weight_quantization", {"quantize_groups": 2}, {"start_bits": 6, "target_bits": 4}, ["*"]
    ),
    **technique(
        "sparse_pruning", {"schedule_offset": 2, "method": "l1"}, {"dense_ratio": 0.5}, ["*"]
    ),
    **technique("activation_quantization", {"schedule_offset": 1}, {"bits": 8}, ["*"]),
}
"""Whose numbers do not depend on names."""


# -- bf16 ------------------------------------------------------------------------------------------


def in_bf16() -> tuple[list[float], dict[str, Tensor]]:
    """Plain torch: masters in fp32, and 16-bit weights that are quantised where they are used."""
    model = net(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x = batch(step, torch.bfloat16)
        rounded = {n: p.detach().bfloat16().requires_grad_() for n, p in model.named_parameters()}

        def layer(
            name: str, value: Tensor, rounded: dict[str, Tensor] = rounded, step: int = step
        ) -> Tensor:
            weight = rounded[f"{name}.weight"]
            if name in BODY:
                fine = symmetric(weight.detach().float(), max(4, 6 - step // 2)).bfloat16()
                weight = through(weight, fine)
            return nn.functional.linear(value, weight, rounded.get(f"{name}.bias"))

        loss = loss_of(layer("head", x + layer("down", torch.tanh(layer("up", x)))), x)
        loss.backward()
        for name, param in model.named_parameters():
            grad = rounded[name].grad
            assert grad is not None
            param.grad = grad.float()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def bf16_runs(section: Any, gas: int, stage: int) -> Any:
    return trained(
        section,
        gas,
        {"bf16": {"enabled": True}, **STAGE[stage]},
        dtype=torch.float32,
        inputs=torch.bfloat16,
    )


def test_bf16_is_a_master_in_fp32_and_quantised_16_bit_weights(clean_ds: None) -> None:
    truth = in_bf16()
    for stage in (0, 3):
        found = bf16_runs(BITS, 1, stage)
        assert off(found, truth) < 1e-2  # x + (q - x) is rounded in the reference
    assert off(trained(BITS), truth) > 0  # the comparison can fail


def test_bf16_on_two_ranks(ranks: Any) -> None:
    section = CASES["snip_momentum"][0] | BITS
    (truth,) = ranks(1, bf16_runs, section, 1, 0)
    for found in ranks(2, bf16_runs, section, 1, 3):
        assert off(found, truth) < 2e-2
        for name in ("up", "down"):
            assert torch.equal(
                found[1][f"{name}.sparse_pruning_mask"], truth[1][f"{name}.sparse_pruning_mask"]
            )


# -- pipelines -------------------------------------------------------------------------------------


def layers() -> list[nn.Module]:
    torch.manual_seed(4)
    return [nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)]


def micros(gas: int) -> Any:
    for step in range(STEPS):
        for part in batch(step).float().chunk(gas):
            yield part, part


def in_a_pipeline(section: Any, stage: int) -> list[float]:
    from ds_pipeline import PipelineModule

    import ds_core

    model = PipelineModule(layers(), num_stages=2, loss_fn=loss_of, partition_method="uniform")
    engine, *_ = ds_core.initialize(model=model, config=config(section, 4, **STAGE[stage]))
    data = micros(4)
    losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
    engine.destroy()
    return losses


def alone(section: Any) -> list[float]:
    import ds_core

    engine, *_ = ds_core.initialize(model=nn.Sequential(*layers()), config=config(section, 4))
    data = micros(4)
    losses = []
    for _ in range(STEPS):
        total = 0.0
        for _ in range(4):
            x, target = next(data)
            loss = loss_of(engine(x), target)
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / 4
        losses.append(total)
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_pipelines(ranks: Any, stage: int) -> None:
    section = ANY | technique(
        "sparse_pruning",
        {
            "schedule_offset": 2,
            "schedule_offset_end": 4,
            "method": "snip_momentum",
            "block_pattern": "2x1",
        },
        {"dense_ratio": 0.5},
        ["*"],
    )
    (truth,) = ranks(1, alone, section)
    (plain,) = ranks(1, alone, {})
    assert difference(truth, plain) > 1e-3
    for found in ranks(2, in_a_pipeline, section, stage):
        assert found == pytest.approx(truth, abs=2e-5)


# -- zero.Init and recomputation -------------------------------------------------------------------


def under_init(section: Any) -> float:
    """A model whose weights are partitioned while it is built is compressed like another."""
    import ds_zero

    import ds_core

    settings = config(section, **STAGE[3])
    losses = []
    for partitioned in (True, False):
        with ds_zero.Init(enabled=partitioned, config_dict_or_path=settings):
            model = net()
        engine, *_ = ds_core.initialize(model=model, config=settings)
        found = []
        for step in range(STEPS):
            x = batch(step).chunk(comm.world_size())[comm.rank()]
            loss = loss_of(engine(x), x)
            engine.backward(loss)
            engine.step()
            found.append(float(loss.detach()))
        losses.append(found)
        engine.destroy()
    return difference(*losses)


def test_zero_init(ranks: Any) -> None:
    section = CASES["row topk"][0] | CASES["snip_momentum"][0] | BITS
    assert max(ranks(2, under_init, section)) == 0


def recomputed(section: Any) -> Any:
    more = {"activation_checkpointing": {"modules": ["up", "down"]}, **STAGE[3]}
    return trained(section, 1, more)


def test_recomputation(ranks: Any) -> None:
    noisy = technique(
        "weight_quantization", {"rounding": "stochastic"}, {"start_bits": 4, "target_bits": 4}, BODY
    )
    section = noisy | CASES["row topk"][0] | CASES["inputs, static"][0]
    (truth,) = ranks(1, trained, section)
    for found in ranks(2, recomputed, section):
        assert off(found, truth) < 1e-6


# -- transformers ----------------------------------------------------------------------------------


def bert_losses(stage: int, gas: int) -> list[float]:
    """The tutorial's compression of a small BERT; the global batches are the same on any number of
    ranks.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as hf
    from test_compression_clean import TUTORIAL

    import ds_core

    sizes: Any = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(5)
    settings = hf.BertConfig(vocab_size=32, max_position_embeddings=16, num_labels=3, **sizes)
    settings.hidden_dropout_prob = settings.attention_probs_dropout_prob = 0.0
    model = hf.BertForSequenceClassification(settings).double()
    section = TUTORIAL | technique(
        "weight_quantization", {}, {"start_bits": 8, "target_bits": 5}, ["attention", "embed"]
    )
    engine, *_ = ds_core.initialize(model=model, config=config(section, gas, **STAGE[stage]))
    world = comm.world_size() if comm.is_initialized() else 1
    rank = comm.rank()
    losses = []
    for step in range(4):
        ids = torch.randint(0, 32, (BATCH, 6), generator=torch.Generator().manual_seed(step))
        total = torch.zeros((), dtype=torch.float64)
        for part in ids.chunk(world * gas)[rank::world]:
            loss = engine(part, labels=part[:, 0] % 3).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach() / gas
        if world > 1:
            comm.all_reduce(total)
        losses.append(float(total) / world)
    engine.destroy()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("stage, gas", [(0, 2), (2, 1), (3, 1)])
def test_bert(ranks: Any, stage: int, gas: int) -> None:
    pytest.importorskip("transformers")
    (truth,) = ranks(1, bert_losses, 0, 1)
    for found in ranks(2, bert_losses, stage, gas):
        assert found == pytest.approx(truth, abs=1e-9)


# -- the rest of the family ------------------------------------------------------------------------


class TestGradients(GradientsConformance):
    """Not changed by the hook, but by masks: the kit compares ranks, partitioners and loss
    scales."""

    config: ClassVar[Any] = {
        "compression_training": {
            "sparse_pruning": {
                "shared_parameters": {
                    "enabled": True,
                    "method": "snip_momentum",
                    "schedule_offset": 1,
                    "block_pattern": "1x1",
                    "dense_ratio": 0.5,
                }
            }
        }
    }
    partitioners: ClassVar[Any] = {"stage 3": {"zero_optimization": {"stage": 3}}}


def test_tutorial_configs() -> None:
    folder = Path(__file__).parents[2] / "deepspeed_compat" / "tests" / "configs"
    for name in ("compression_quantization", "compression_pruning"):
        composed = compose(json.loads((folder / f"{name}.json").read_text()))
        assert isinstance(composed.config.section("compression_training"), CompressionConfig)


def test_tensor_parallel_is_refused(ranks: Any) -> None:
    assert all("whole ones" in text for text in ranks(2, refused))


def refused() -> str:
    import ds_core

    settings = config(
        ANY, tensor_parallel={"autotp_size": 2, "partition_config": {"use_default_specs": True}}
    )
    settings["train_batch_size"] = 8
    with pytest.raises(ConfigError) as caught:
        ds_core.initialize(model=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), config=settings)
    return str(caught.value)
