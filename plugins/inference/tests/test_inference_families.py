"""Every family: logits and hidden states are those of transformers, padded or not, whole or through
a cache.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from ds_inference import families
from ds_inference.run.forward import forward, refusal
from ds_inference_kit.program import Program, Runnable
from ds_inference_kit.step import BLOCK, KVCache, Step
from torch import Tensor

from ds_core.kernels import Kernels
from ds_core.plugins import Plugins

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
OUTPUTS = "logits", "last_hidden_state", "pooler_output", "start_logits", "end_logits"
LAYERS = ["sliding_attention", "full_attention"]
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
STRETCHED = {"rope_theta": 100.0, "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "factor": 2.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "llama biases": (
        "LlamaForCausalLM",
        {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    ),
    "llama3": (
        "LlamaForCausalLM",
        {**LLAMA, "rope_parameters": {**ROPE, "original_max_position_embeddings": 16}},
    ),
    "llama yarn": (
        "LlamaForCausalLM",
        {**LLAMA, "rope_parameters": {"rope_type": "yarn", **STRETCHED}},
    ),
    "llama dynamic": (
        "LlamaForCausalLM",
        {**LLAMA, "rope_parameters": {"rope_type": "dynamic", **STRETCHED}},
    ),
    "llama classes": ("LlamaForSequenceClassification", {**LLAMA, "pad_token_id": 0}),
    "mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": 4}),
    "mixtral": ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 4}),
    "qwen2": (
        "Qwen2ForCausalLM",
        {**LLAMA, "use_sliding_window": True, "sliding_window": 4, "layer_types": LAYERS},
    ),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 16}),
    "gpt2": (
        "GPT2LMHeadModel",
        {**SIZES, "n_positions": 64, "scale_attn_by_inverse_layer_idx": True},
    ),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            **SIZES,
            "attention_types": [[["local", "global"], 1]],
            "window_size": 4,
            "max_position_embeddings": 64,
        },
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        {**SIZES, "intermediate_size": 48, "max_position_embeddings": 64},
    ),
    "gpt_neox serial": (
        "GPTNeoXForCausalLM",
        {**SIZES, "intermediate_size": 48, "use_parallel_residual": False},
    ),
    "opt": (
        "OPTForCausalLM",
        {**SIZES, "ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32},
    ),
    "opt after": (
        "OPTForCausalLM",
        {**SIZES, "ffn_dim": 48, "do_layer_norm_before": False, "word_embed_proj_dim": 16},
    ),
    "bloom": ("BloomForCausalLM", {**SIZES, "num_attention_heads": 6, "hidden_size": 48}),
    "bert": ("BertModel", {**SIZES, "intermediate_size": 48}),
    "bert masked": ("BertForMaskedLM", {**SIZES, "intermediate_size": 48}),
    "bert classes": (
        "BertForSequenceClassification",
        {**SIZES, "intermediate_size": 48, "num_labels": 3},
    ),
    "distilbert": ("DistilBertModel", {**SIZES, "hidden_dim": 48}),
    "distilbert answers": ("DistilBertForQuestionAnswering", {**SIZES, "hidden_dim": 48}),
}


PROVIDERS = [
    offered.entry.provider
    for offered in Kernels(Plugins()).candidates("inference_program", "cpu", "float32")
    if not offered.reason
]


def load(program: Program, provider: str = PROVIDERS[0]) -> Runnable:
    """By that provider; the fastest here."""
    dtype = str(program.dtype).removeprefix("torch.")
    found: Runnable = Kernels(Plugins(), {"inference_program": provider}).get(
        "inference_program", "cpu", dtype
    )(program)
    return found


def make(case: str) -> Any:
    """A random model, weights and biases larger than at initialisation."""
    name, keywords = CASES[case]
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**keywords)).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0, 0.2 if param.dim() > 1 else 0.5)
    return model


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


MASKS = {
    "whole": [[1] * 13, [1] * 13, [1] * 13],
    "left": [[1] * 13, [0] * 8 + [1] * 5, [0] * 3 + [1] * 10],
    "right": [[1] * 13, [1] * 4 + [0] * 9, [1] * 13],
}


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("case", CASES)
def test_a_family_is_that_of_transformers(case: str, provider: str) -> None:
    model = make(case)
    lowered = families.lower(model)
    assert lowered is not None, families.why_not(model)
    runs = load(lowered.program, provider)
    ids = torch.randint(1, 61, (3, 13))
    for padding, rows in MASKS.items():
        mask = torch.tensor(rows)
        # a classifier takes the last token that is not 0
        given = {"input_ids": ids * mask, "attention_mask": mask}
        if lowered.first and padding == "left":
            assert "first column" in str(refusal(lowered, given))
            continue
        assert refusal(lowered, given) is None
        with torch.no_grad():
            expected = model(**given)
            found = lowered.finish(forward(lowered, runs, **given), **given)
        compared = [name for name in OUTPUTS if expected.get(name) is not None]
        assert compared
        for name in compared:
            there = mask.bool() if expected[name].shape[:2] == ids.shape else slice(None)
            close(found[name][there], expected[name][there])


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    "case", [case for case in CASES if "Causal" in CASES[case][0] or "LMHead" in CASES[case][0]]
)
def test_a_sequence_through_the_cache_is_the_whole(case: str, provider: str) -> None:
    model = make(case)
    lowered = families.lower(model)
    assert lowered is not None
    program = lowered.program
    ids = torch.randint(1, 61, (BLOCK + 5,))
    cache = KVCache.make(program.layers, 2, program.kv_heads, program.head_dim, torch.float32)
    runs = load(program, provider)
    at = 0
    found = []
    for size in (BLOCK - 1, 3, 1, 1, 1):
        here = torch.arange(at, at + size, dtype=torch.int32)
        one = (
            torch.tensor([0, size], dtype=torch.int32),
            torch.tensor([at + size], dtype=torch.int32),
        )
        found.append(
            runs(
                Step(ids[here].int(), here, *one, torch.tensor([[1, 0]], dtype=torch.int32)), cache
            )
        )
        at += size
    with torch.no_grad():
        close(torch.cat(found), model(ids[None]).logits[0])


@pytest.mark.parametrize("case", ["llama", "gpt2", "bloom", "bert"])
def test_16_bits_are_as_near_as_those_of_transformers(case: str) -> None:
    model = make(case)
    ids = torch.randint(1, 61, (2, 13))
    with torch.no_grad():
        exact = model(ids)[0]
        theirs = model.bfloat16()(ids)[0].float()
        lowered = families.lower(model)
        assert lowered is not None and lowered.program.dtype is torch.bfloat16
        ours = forward(lowered, load(lowered.program), ids).float()
    assert (ours - exact).abs().mean() <= 1.25 * (theirs - exact).abs().mean()


def test_other_ways_to_give_a_batch() -> None:
    model = make("gpt2")
    lowered = families.lower(model)
    assert lowered is not None
    runs = load(lowered.program)
    ids = torch.randint(1, 61, (2, 9))
    later = torch.arange(9).expand(2, 9) + 7
    with torch.no_grad():
        whole = model(ids).logits
        close(forward(lowered, runs, inputs_embeds=model.transformer.wte(ids)), whole)
        close(forward(lowered, runs, ids, logits_to_keep=2), whole[:, -2:])
        close(
            forward(lowered, runs, ids, position_ids=later), model(ids, position_ids=later).logits
        )
        loss = lowered.finish(forward(lowered, runs, ids), labels=ids).loss
        torch.testing.assert_close(loss, model(ids, labels=ids).loss)
    with pytest.raises(ValueError, match="61 are not all within 0 .. 60"):
        forward(lowered, runs, ids.clone().fill_(61))
    with pytest.raises(ValueError, match="positions 60 .. 68"):
        forward(lowered, runs, ids, position_ids=later + 53)
    for keywords, why in [
        ({"output_attentions": True}, "output_attentions"),
        ({"use_cache": True}, "use_cache"),
        ({"attention_mask": torch.ones(2, 1, 9, 9)}, r"is not \[b, t\]"),
        ({"attention_mask": torch.tensor([[1, 0, 1] * 3] * 2)}, "between the tokens"),
        ({"position_ids": later * 2}, "count up by one"),
        ({"token_type_ids": ids}, "token_type_ids"),
    ]:
        assert re.search(why, str(refusal(lowered, {"input_ids": ids, **keywords})))


def test_what_is_not_known_has_no_program() -> None:
    for case, changes, why in [
        ("llama", {"hidden_act": "mish"}, "activation MishActivation"),
        ("llama", {"rope_parameters": LONG}, "rope_type 'longrope'"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm"),
    ]:
        name, keywords = CASES[case]
        kind = getattr(transformers, name)
        model = kind(kind.config_class(**{**keywords, **changes}))
        assert families.lower(model) is None
        assert re.search(why, str(families.why_not(model)))
    model = make("llama")
    model.model.layers[0].mlp.down_proj = torch.nn.Sequential(model.model.layers[0].mlp.down_proj)
    assert "Sequential" in str(families.why_not(model))
    model = make("llama")
    model.config.__class__ = type(
        "NewConfig", (type(model.config),), {"__annotations__": {"softcap": float}}
    )
    model.config.softcap = 30.0
    assert "softcap" in str(families.why_not(model))
    assert "no transformers model" in str(families.why_not(torch.nn.Linear(2, 2)))


@pytest.mark.parametrize("case", ["gpt2", "mixtral", "bloom"])
def test_moved_parameters_are_followed(case: str) -> None:
    model = make(case)
    lowered = families.lower(model)
    assert lowered is not None
    runs = load(lowered.program)
    ids = torch.randint(1, 61, (2, 9))
    with torch.no_grad():
        for param in model.parameters():
            param.data = param * 1.25
        lowered.refresh()
        runs.rebind()
        close(forward(lowered, runs, ids), model(ids).logits)
