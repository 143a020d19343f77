"""Quantised layers: what is replaced, what it computes, in the module and in the program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_inference import families
from ds_inference.run.forward import forward
from ds_inference.weights.quantised import QuantizedLinear, quantise_model
from ds_inference_kit.reference import load
from torch import nn

transformers = pytest.importorskip("transformers")


def small(name: str = "LlamaForCausalLM", **more: Any) -> Any:
    kind = getattr(transformers, name)
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return kind(kind.config_class(**{**sizes, **more})).eval()


@pytest.mark.parametrize(("bits", "symmetric", "near"), [(8, True, 0.02), (4, False, 0.3)])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM"])
def test_a_quantised_model(name: str, bits: int, symmetric: bool, near: float) -> None:
    mixture = {"num_local_experts": 4, "num_key_value_heads": 4} if "Mixtral" in name else {}
    model = small(name, intermediate_size=96, **mixture)
    ids = torch.randint(0, 64, (2, 9))
    with torch.no_grad():
        exact = model(ids).logits
        report = quantise_model(model, bits=bits, symmetric=symmetric)
        assert not report.left and report.layers == {"L": 15, "G": 9, "M": 11}[name[0]]
        assert report.after < report.before / (3 if bits == 8 else 5)
        module = model(ids).logits
        lowered = families.lower(model)
        assert lowered is not None
        program = forward(lowered, load(lowered.program), ids)
    torch.testing.assert_close(program, module, rtol=1e-4, atol=1e-5)
    error = (module - exact).std() / exact.std()
    assert 0 < error < near


def test_what_stays_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    model = small(intermediate_size=72)
    before = {name: p.clone() for name, p in model.named_parameters()}
    report = quantise_model(model, bits=4, group=64, skip=("*.0.self_attn.*",), head_bits=None)
    assert report.layers == 2 * 2 + 4
    assert sum("do not divide" in why for why in report.left.values()) == 2
    assert sum(why == "named in skip" for why in report.left.values()) == 4
    assert "2 linear layers were not quantised" in caplog.text
    assert torch.equal(model.lm_head.weight, before["lm_head.weight"])
    with pytest.raises(ValueError, match="not 5"):
        quantise_model(model, bits=5)


def test_weights_that_scales_cannot_hold_stay() -> None:
    model = nn.Sequential(nn.Linear(32, 8), nn.Linear(32, 8), nn.Linear(32, 8))
    with torch.no_grad():
        model[0].weight.mul_(1e-6)
        model[1].weight[0, 0] = torch.nan
    report = quantise_model(model, bits=8)
    assert set(report.left) == {"0", "1"} and isinstance(model[2], QuantizedLinear)


def test_layers_move_and_are_saved() -> None:
    model = nn.Sequential(nn.Linear(32, 8))
    quantise_model(model, bits=4, symmetric=False)
    x = torch.randn(3, 32)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(x)
    assert set(state) == {"0.q", "0.scales", "0.lows", "0.bias"}
    model.double().bfloat16()
    assert model[0].scales.dtype is torch.float16 and model[0].bias.dtype is torch.bfloat16
    again = nn.Sequential(nn.Linear(32, 8))
    quantise_model(again, bits=4, symmetric=False)
    again.load_state_dict(state)
    torch.testing.assert_close(again(x), expected)
