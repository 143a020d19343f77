"""Every family: logits and hidden states are those of transformers, padded or not, whole or through a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_inference import families
from ds_inference.run import forward, refusal
from ds_inference_kit.reference import load
from torch import Tensor

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
LAYERS = ["sliding_attention", "full_attention"]
ROPE = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "llama biases": ("LlamaForCausalLM", {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama3": ("LlamaForCausalLM", {**LLAMA, "rope_parameters": {**ROPE, "original_max_position_embeddings": 16}}),
    "llama classes": ("LlamaForSequenceClassification", {**LLAMA, "pad_token_id": 0}),
    "mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": 4}),
    "mixtral": ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 4}),
    "qwen2": ("Qwen2ForCausalLM", {**LLAMA, "use_sliding_window": True, "sliding_window": 4, "layer_types": LAYERS}),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 16}),
    "gpt2": ("GPT2LMHeadModel", {**SIZES, "n_positions": 64, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {**SIZES, "attention_types": [[["local", "global"], 1]], "window_size": 4, "max_position_embeddings": 64},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", {**SIZES, "intermediate_size": 48, "max_position_embeddings": 64}),
    "gpt_neox serial": ("GPTNeoXForCausalLM", {**SIZES, "intermediate_size": 48, "use_parallel_residual": False}),
    "opt": ("OPTForCausalLM", {**SIZES, "ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32}),
    "opt after": (
        "OPTForCausalLM",
        {**SIZES, "ffn_dim": 48, "do_layer_norm_before": False, "word_embed_proj_dim": 16},
    ),
    "bloom": ("BloomForCausalLM", {**SIZES, "num_attention_heads": 6, "hidden_size": 48}),
    "bert": ("BertModel", {**SIZES, "intermediate_size": 48}),
    "bert masked": ("BertForMaskedLM", {**SIZES, "intermediate_size": 48}),
    "bert classes": ("BertForSequenceClassification", {**SIZES, "intermediate_size": 48, "num_labels": 3}),
    "distilbert": ("DistilBertModel", {**SIZES, "hidden_dim": 48}),
    "distilbert answers": ("DistilBertForQuestionAnswering", {**SIZES, "hidden_dim": 48}),
}


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


@pytest.mark.parametrize("case", CASES)
def test_a_family_is_that_of_transformers(case: str) -> None:
    model = make(case)
    lowered = families.lower(model)
    assert lowered is not None, families.why_not(model)
    runs = load(lowered.program)
    ids = torch.randint(1, 61, (3, 13))
    with torch.no_grad():
        for mask in (None, [[1] * 13, [0] * 8 + [1] * 5, [0] * 3 + [1] * 10], [[1] * 13, [1] * 4 + [0] * 9, [1] * 13]):
            given = {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": torch.tensor(mask)}
            if case == "llama classes":
                given["input_ids"] = ids if mask is None else ids * given["attention_mask"]
            if lowered.first and mask is not None and not all(row[0] for row in mask):
                assert "first column" in str(refusal(lowered, given))
                continue
            assert refusal(lowered, given) is None
            expected = model(**given)
            found = lowered.finish(forward(lowered, runs, **given), **given)
            for name in ("logits", "last_hidden_state", "pooler_output", "start_logits", "end_logits"):
                if (whole := expected.get(name)) is not None:
                    kept = torch.ones(whole.shape[:1]) if whole.dim() == 2 and "logits" not in name else None
                    if whole.shape[:2] == ids.shape:
                        kept = torch.ones_like(ids) if mask is None else given["attention_mask"]
                        close(found[name][kept.bool()], whole[kept.bool()])
                    else:
                        close(found[name], whole)
