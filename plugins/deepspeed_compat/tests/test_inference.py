"""Scripts that serve a model with DeepSpeed, as they are: what they say equals transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ds_testing import run_ranks

TOKENS = 5


def small() -> Any:
    """A llama with random weights."""
    import os

    import torch

    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as hf

    sizes = {
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    }
    config = hf.LlamaConfig(
        vocab_size=66, num_hidden_layers=2, max_position_embeddings=64, pad_token_id=2, **sizes
    )
    torch.manual_seed(5)
    return hf.AutoModelForCausalLM.from_config(config).eval()


def generated(injected: bool) -> tuple[float, int]:
    """DeepSpeed's tutorial: half precision, two ranks, a pipeline's model."""
    import ds_core.compat

    ds_core.compat.install()
    import deepspeed  # type: ignore[import-not-found]
    import torch

    model = small()
    prompts = torch.randint(3, 66, (2, 7), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        wanted = model(input_ids=prompts).logits
    engine = deepspeed.init_inference(
        model,
        tensor_parallel={"tp_size": 2},
        dtype=torch.float16,
        replace_with_kernel_inject=injected,
    )
    assert isinstance(engine, deepspeed.InferenceEngine)
    far = float((engine(input_ids=prompts).logits - wanted).abs().max() / wanted.abs().max())
    return far, engine.generate(prompts, max_new_tokens=TOKENS, do_sample=False).shape[1]


@pytest.mark.parametrize("injected", [True, False])
def test_the_tutorial(injected: bool) -> None:
    for far, length in run_ranks(2, generated, injected):
        assert far < 0.01
        assert 7 < length <= 7 + TOKENS


def emptied(folder: str) -> float:
    """The other tutorial: a model on the device meta, and a JSON file of checkpoint files."""
    import ds_core.compat

    ds_core.compat.install()
    import deepspeed
    import torch
    import transformers as hf

    model = small()
    prompts = torch.randint(3, 66, (2, 7), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        wanted = model(input_ids=prompts).logits
    with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
        empty = hf.AutoModelForCausalLM.from_config(model.config).eval()
    config = deepspeed.inference.config.DeepSpeedInferenceConfig(
        dtype=torch.float,
        mp_size=2,
        checkpoint=folder + "/checkpoints.json",
        replace_with_kernel_inject=True,
    )
    engine = deepspeed.init_inference(empty, config=config)
    return float((engine(input_ids=prompts).logits - wanted).abs().max())


def test_a_model_on_the_device_meta(tmp_path: Path) -> None:
    import torch

    torch.save(small().state_dict(), tmp_path / "pytorch_model.bin")
    listed = {"type": "BLOOM", "checkpoints": ["pytorch_model.bin"], "version": 1.0}
    (tmp_path / "checkpoints.json").write_text(json.dumps(listed))
    assert max(run_ranks(2, emptied, str(tmp_path))) < 1e-4
