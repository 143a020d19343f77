"""``engine.generate`` between training steps: the texts are those of a plain module with the same
weights.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from ds_testing.truth import tiny
from torch import Tensor, nn

from ds_core.errors import ConfigError, UsageError

STEPS = 3
WORDS = 48
NEW = 5


def llama(layers: int = 2, dropout: float = 0.3) -> Any:
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 28}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": dropout}
    tokens = {"eos_token_id": None, "pad_token_id": 0, "use_cache": True}
    return tiny("llama", seed=5, num_hidden_layers=layers, **sizes, **heads, **tokens)


def settings(stage: int, **hybrid: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage, "param_persistence_threshold": 20},
        "hybrid_engine": {"enabled": True, "max_out_tokens": 32, **hybrid},
    }


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(
        0, WORDS, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank)
    )


def prompts(rank: int) -> dict[str, Tensor]:
    """Two of unequal lengths, padded on the left; others on each rank."""
    ids = batch(99, rank)[:, :7]
    ids[1, :3] = 0
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def make_step(engine: Any, step: int) -> None:
    from ds_core import comm

    ids = batch(step, comm.rank())
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


def same_text(engine: Any, **keywords: Any) -> Tensor:
    """What it writes, which is what a copy of its module writes."""
    from ds_core import comm

    given = prompts(comm.rank())
    found: Tensor = engine.generate(**given, max_new_tokens=NEW, do_sample=False, **keywords)
    plain: Any = copy.deepcopy(engine.module).eval()
    wanted = plain.generate(**given, max_new_tokens=NEW, do_sample=False, **keywords)
    assert torch.equal(found, wanted), (found, wanted)
    return found


def in_turn(folder: str) -> None:
    from ds_inference.hybrid import _state

    import ds_core
    from ds_core import comm

    texts: dict[int, list[Any]] = {}
    for stage in range(4):
        engine, *_ = ds_core.initialize(
            model=llama(), config=settings(stage, tp_gather_partition_size=3)
        )
        engine.train()
        texts[stage] = [same_text(engine).tolist()]
        for step in range(STEPS):
            make_step(engine, step)
            texts[stage].append(
                same_text(engine, num_beams=2).tolist() if step else same_text(engine).tolist()
            )
            assert engine.module.training and not any(
                p.grad is not None for p in engine.module.parameters()
            )
        engine.save_checkpoint(f"{folder}/{stage}")
        make_step(engine, 9)
        after = same_text(engine, num_beams=2).tolist()
        engine.load_checkpoint(f"{folder}/{stage}")
        assert same_text(engine, num_beams=2).tolist() == texts[stage][-1] != after
        assert _state(engine.ctx).model.lowered is not None  # type: ignore[union-attr]
        stats = engine.generation_stats()
        assert stats.calls == STEPS + 3 and stats.new_tokens >= 2 * NEW * stats.calls
        assert 0 < stats.last_seconds < stats.seconds and stats.train_seconds > 0
        engine.destroy()
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert len({str(t) for t in texts[0]}) > 2, "the texts do not depend on training"
    comm.barrier()


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_it_trains_and_generates_in_turn(world: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run_ranks(world, in_turn, str(tmp_path))


def away(folder: str) -> None:
    """Weights on disk: ranks write texts of unlike lengths, which takes them equally many passes
    over the weights.
    """
    import ds_core
    from ds_core import comm

    config = settings(3)
    config["zero_optimization"]["offload_param"] = {
        "device": "nvme",
        "nvme_path": folder,
        "max_in_cpu": 0,
    }
    engine, *_ = ds_core.initialize(model=llama(), config=config)
    for step in range(2):
        make_step(engine, step)
        plain: Any = copy.deepcopy(engine.module).eval()
        given = prompts(comm.rank())
        new = 3 + 4 * comm.rank()
        found = engine.generate(**given, max_new_tokens=new, do_sample=False)
        assert torch.equal(found, plain.generate(**given, max_new_tokens=new, do_sample=False))
    engine.destroy()


def test_weights_on_disk(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run_ranks(2, away, str(tmp_path))


class Adapted(nn.Linear):
    """A layer with an adapter that is not fused."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.weight = layer.weight
        self.a = nn.Linear(layer.in_features, 2, bias=False)
        self.b = nn.Linear(2, layer.out_features, bias=False)
        nn.init.normal_(self.b.weight, std=9.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) + self.b(self.a(x))
        return out


def adapters() -> None:
    from ds_inference.hybrid import _state

    import ds_core

    for stage in (0, 3):
        model = llama()
        for param in model.parameters():
            param.data.normal_(0, 0.3)
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        engine, *_ = ds_core.initialize(model=model, config=settings(stage))
        before = same_text(engine).tolist()
        for step in range(3):
            make_step(engine, step)
            after = same_text(engine).tolist()
        assert _state(engine.ctx).model.lowered is None  # type: ignore[union-attr]
        assert after != before
        engine.destroy()


def test_adapters_that_are_not_fused() -> None:
    pytest.importorskip("transformers")
    run_ranks(2, adapters)


def divided() -> None:
    """Layers divided over two ranks, in training and in the program."""
    from ds_inference.hybrid import _state

    import ds_core

    plain = llama(dropout=0.0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    config = settings(0, inference_tp_size=2)
    config["tensor_parallel"] = {"autotp_size": 2, "tensor_parallel": {"tp_grain_size": 1}}
    del config["zero_optimization"]
    engine, *_ = ds_core.initialize(model=llama(dropout=0.0), config=config)
    for step in range(3):
        ids = batch(step, 0)
        given = prompts(0)
        found = engine.generate(**given, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(
            found, plain.eval().generate(**given, max_new_tokens=NEW, do_sample=False)
        )
        drawn = engine.generate(**given, max_new_tokens=NEW, do_sample=True, temperature=2.0)
        assert drawn.tolist() == every_rank(drawn.tolist())[0]
        plain.train()(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    assert _state(engine.ctx).model.lowered is not None  # type: ignore[union-attr]
    engine.destroy()


def every_rank(value: Any) -> list[Any]:
    from ds_core import comm

    found: list[Any] = comm.all_gather_json(value)
    return found


def test_layers_divided_over_ranks() -> None:
    pytest.importorskip("transformers")
    run_ranks(2, divided)


class Plain(nn.Module):
    """Not of transformers, and without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.embed(tokens).cumsum(1)))
        return out


def test_a_module_of_ones_own() -> None:
    import ds_core

    torch.manual_seed(1)
    config = settings(0, release_inference_cache=True, max_out_tokens=12)
    engine, *_ = ds_core.initialize(model=Plain(), config=config)
    text = torch.tensor([[1, 2, 3]])
    found = engine.generate(text, max_new_tokens=4)
    for _ in range(4):
        text = torch.cat([text, engine.module(text)[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, text)
    drawn = engine.generate(
        text[:, :3], max_new_tokens=4, do_sample=True, num_return_sequences=3, seed=7
    )
    assert drawn.shape == (3, 7) and len({tuple(row) for row in drawn.tolist()}) > 1
    assert torch.equal(
        drawn,
        engine.generate(
            text[:, :3], max_new_tokens=4, do_sample=True, num_return_sequences=3, seed=7
        ),
    )
    from ds_inference.hybrid import metrics

    told = metrics(engine.ctx)
    assert (
        told["Train/Generation/new_tokens"] == 28 and told["Train/Generation/tokens_per_second"] > 0
    )
    assert metrics(engine.ctx) == {}
    with pytest.raises(
        UsageError, match=r"more than 12 positions .*or hybrid_engine.max_out_tokens"
    ):
        engine.generate(text, max_new_tokens=20)
    with pytest.raises(UsageError, match=r"no keyword 'top_kk'.*top_k"):
        engine.generate(text, top_kk=3)
    engine.destroy()


@pytest.mark.parametrize(
    ("section", "zero", "said"),
    [
        (
            {"enable_cuda_graph": True, "release_inference_cache": True},
            0,
            "enable_cuda_graph: .*release_inference_cache",
        ),
        ({"enable_cuda_graph": True}, 3, "enable_cuda_graph: stage 3"),
        ({"enable_cuda_graph": True}, 0, "hybrid_engine.enable_cuda_graph: the model is on cpu"),
        ({"inference_tp_size": 2}, 0, "inference_tp_size: 2, but .*autotp_size"),
    ],
)
def test_what_keys_exclude(section: dict[str, Any], zero: int, said: str) -> None:
    import ds_core

    with pytest.raises(ConfigError, match=said):
        ds_core.initialize(model=Plain(), config=settings(zero, **section))


def test_off_is_off() -> None:
    import ds_core

    engine, *_ = ds_core.initialize(
        model=Plain(), config={"train_batch_size": 1, "hybrid_engine": {"enabled": False}}
    )
    with pytest.raises(AttributeError, match="generate"):  # the module's own, which has none
        engine.generate(torch.ones(1, 2, dtype=torch.long))
