"""Blocks of a transformers model that tensor or sequence parallelism divides: compiled without a
graph break.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from ds_testing.truth import difference
from torch import Tensor

from ds_core import comm

STEPS = 2
BATCH = 2
LENGTH = 8
VOCABULARY = 48


def llama() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as hf

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 28,
        "use_cache": False,
    }
    torch.manual_seed(5)
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = hf.LlamaConfig(max_position_embeddings=32, **heads, **sizes)
    return hf.LlamaForCausalLM(config).double()


def tokens(step: int) -> Tensor:
    return torch.randint(
        0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step)
    )


def trained(sections: dict[str, Any], backend: str | None) -> tuple[list[float], list[int]]:
    """Losses, and graphs and graph breaks, of a run on the same data on all ranks."""
    from torch._dynamo.utils import counters

    import ds_core

    torch._dynamo.reset()
    counters.clear()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        **sections,
    }
    engine, *_ = ds_core.initialize(model=llama(), config=config)
    if backend is not None:
        engine.compile(backend, compile_kwargs={"fullgraph": True})
    losses = []
    for step in range(STEPS):
        ids = tokens(step)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.destroy()
    assert comm.world_size() == 2
    return losses, [counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())]


def divided(size: int) -> dict[str, Any]:
    """The pass that asserts divided layers changes nothing."""
    return {
        "tensor_parallel": {"autotp_size": size},
        "compile": {"deepcompile": True, "passes": ["autotp"]},
    }


def test_the_pass_autotp_needs_divided_layers() -> None:
    with pytest.raises(
        Exception,
        match="'autotp' needs tensor_parallel.autotp_size of 2 or more, and the size is 1",
    ):
        run_ranks(1, trained, divided(1), "aot_eager")


RECOMPUTED = {"activation_checkpointing": {"policy": "keep_attention"}}
SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "stage", "backend"),
    [
        (divided(2), 2, "aot_eager"),
        pytest.param({"sequence_parallel_size": 2}, 2, "aot_eager", marks=SLOW),
        pytest.param(divided(2), 3, "aot_eager", marks=SLOW),
        pytest.param({"sequence_parallel_size": 2}, 3, "aot_eager", marks=SLOW),
        pytest.param({}, 0, "inductor", marks=SLOW),
        pytest.param({}, 3, "inductor", marks=SLOW),
        pytest.param(RECOMPUTED, 0, "inductor", marks=SLOW),
        pytest.param(RECOMPUTED, 3, "aot_eager", marks=SLOW),
    ],
)
def test_no_graph_breaks(section: dict[str, Any], stage: int, backend: str) -> None:
    zero = {"stage": stage, **({"param_persistence_threshold": 0} if stage == 3 else {})}
    sections = section | {"zero_optimization": zero}
    wanted = run_ranks(2, trained, sections, None)
    for (losses, graphs), (eager, _) in zip(
        run_ranks(2, trained, sections, backend), wanted, strict=True
    ):
        assert difference(losses, eager) < 1e-12
        assert 1 <= graphs[0] <= 2 and graphs[1] == 0  # all blocks have the same
