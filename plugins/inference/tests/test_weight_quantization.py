"""The section ``weight_quantization``: a run's linear layers in 8 or 4 bits, also with weights
sharded or on disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_inference.config import LayerQuantization
from ds_inference.weights.quantised import QuantizedLinear, quantise_model
from ds_testing import run_ranks
from torch import Tensor

from ds_core.errors import ConfigError

pytest.importorskip("transformers")
WORDS = 40


def llama() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as hf

    torch.manual_seed(2)
    sizes: dict[str, Any] = {
        "vocab_size": WORDS,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    sizes |= {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = hf.LlamaForCausalLM(hf.LlamaConfig(max_position_embeddings=32, **sizes))
    # values that a fixed seed gives also where weights are made one at a time
    for param in model.parameters():
        param.data.normal_(0, 0.1)
    return model


def run(section: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 1, "weight_quantization": section, **more}


def prompt() -> Tensor:
    return torch.arange(3, 12)[None]


def layers(model: Any) -> dict[str, int]:
    return {name: m.bits for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}


@pytest.mark.parametrize("bits", [8, 4])
def test_all_layers(bits: Any) -> None:
    import ds_core

    wanted = llama().eval()
    quantise_model(wanted, bits=bits, group=LayerQuantization(num_bits=bits).group, symmetric=True)
    engine, *_ = ds_core.initialize(
        model=llama(), config=run({"num_bits": bits, "q_type": "symmetric"})
    )
    assert layers(engine.module) == layers(wanted) and len(layers(wanted)) == 15
    with torch.no_grad():
        assert torch.equal(engine.eval()(prompt()).logits, wanted(prompt()).logits)
    engine.destroy()


def test_layers_by_name() -> None:
    import ds_core

    named = {
        "mlp": {"num_bits": 4, "group_size": 16, "group_dim": 1, "symmetric": False},
        "*.q_proj": {"num_bits": 8},
    }
    engine, *_ = ds_core.initialize(model=llama(), config=run({"post_init_quant": named}))
    found = {name.split(".")[-1]: bits for name, bits in layers(engine.module).items()}
    assert found == {"gate_proj": 4, "up_proj": 4, "down_proj": 4, "q_proj": 8}
    engine.destroy()
    with pytest.raises(ConfigError, match="no layer of LlamaForCausalLM is called 'attn_fc'"):
        ds_core.initialize(
            model=llama(), config=run({"post_init_quant": {"attn_fc": {"num_bits": 8}}})
        )
    off, *_ = ds_core.initialize(model=llama(), config=run({"enabled": False}))
    assert not layers(off.module)
    with pytest.raises(ConfigError, match=r"weight_quantization\.num_bits"):
        ds_core.initialize(model=llama(), config=run({"num_bits": 3}))


def sharded(folder: str) -> None:
    import ds_zero

    import ds_core
    from ds_core import comm

    plain = llama().eval()
    quantise_model(plain, bits=8, group=LayerQuantization().group, symmetric=True)
    wanted = plain.generate(prompt(), max_new_tokens=6, do_sample=False)
    for place in ("none", "cpu", "nvme"):
        offload: dict[str, Any] = {"device": place}
        offload |= {"nvme_path": folder, "max_in_cpu": 0} if place == "nvme" else {}
        zero = {"stage": 3, "param_persistence_threshold": 0, "offload_param": offload}
        config = run({"quantized_initialization": {"num_bits": 8}}, zero_optimization=zero)
        model = llama()
        if place == "cpu":
            ds_zero.Init(module=model, config_dict_or_path=config)
        engine, *_ = ds_core.initialize(model=model, config=config)
        engine.eval()
        found = engine.module.generate(prompt(), max_new_tokens=6, do_sample=False)
        assert torch.equal(found, wanted), place
        numbers = [p for n, p in engine.module.named_parameters() if n.endswith(".q")]
        assert len(numbers) == 15 and all(p.dtype is torch.int8 and not p.numel() for p in numbers)
        held: Any = numbers[0]
        assert held.ds_tensor.numel() in (0, held.ds_numel // comm.world_size(), held.ds_numel)
        engine.destroy()


def test_numbers_are_sharded_and_offloaded(tmp_path: Path) -> None:
    run_ranks(2, sharded, str(tmp_path))
