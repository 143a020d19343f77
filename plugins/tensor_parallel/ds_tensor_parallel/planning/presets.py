"""What is known of families of models, as data (torch-free)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ds_tensor_parallel.planning.rules import Kind, Rule, Rules


@dataclass(frozen=True, slots=True)
class Preset:
    """A family of models."""

    name: str
    model_types: tuple[str, ...]
    """``model_type`` of their configs."""
    rules: Mapping[str, Rule]
    """By regular expression of module or parameter names; the first that matches counts."""

    def choose(self, names: Iterable[str], source: str) -> Rules:
        """The rules for those of `names` that the preset knows."""
        import dataclasses

        found = {}
        for name in names:
            rule = next((r for pattern, r in self.rules.items() if re.search(pattern, name)), None)
            if rule is not None:
                found[name] = dataclasses.replace(rule, source=source)
        return found


_COLUMN = Rule(Kind.COLUMN)
_ROW = Rule(Kind.ROW)
_QKV = Rule(Kind.COLUMN, segments="heads")
_PAIR = Rule(Kind.COLUMN, segments=2)

_MLP = {
    r"(mlp|shared_experts)\.(gate|up)_proj$": _COLUMN,
    r"(mlp|shared_experts)\.down_proj$": _ROW,
}
_LLAMA = {r"self_attn\.[qkv]_proj$": _COLUMN, r"self_attn\.o_proj$": _ROW, **_MLP}
_EXPERTS = {
    r"experts\.gate_up_proj$": _PAIR,
    r"experts\.down_proj$": _ROW,
    r"(?<!shared_)experts$": Rule(Kind.EXPERTS),
    r"experts\.\d+\.(w1|w3|gate_proj|up_proj)$": _COLUMN,
    r"experts\.\d+\.(w2|down_proj)$": _ROW,
}

BUILT_IN: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            # Queries, keys and values are fused head by head, so whole heads are cut.
            "bloom",
            ("bloom",),
            {
                r"self_attention\.query_key_value$": _COLUMN,
                r"self_attention\.dense$": _ROW,
                r"mlp\.dense_h_to_4h$": _COLUMN,
                r"mlp\.dense_4h_to_h$": _ROW,
            },
        ),
        Preset(
            # All queries, then all keys, then all values; gate and up fused in one weight.
            "chatglm",
            ("chatglm",),
            {
                r"self_attention\.query_key_value$": _QKV,
                r"self_attention\.dense$": _ROW,
                r"mlp\.dense_h_to_4h$": _PAIR,
                r"mlp\.dense_4h_to_h$": _ROW,
            },
        ),
        Preset(
            "deepseek_v2",
            ("deepseek_v2",),
            {
                r"self_attn\.(q_proj|q_b_proj|kv_b_proj)$": _COLUMN,
                r"self_attn\.kv_a_proj_with_mqa$": Rule(Kind.ROPE_LATENT),
                r"self_attn\.o_proj$": _ROW,
                **_EXPERTS,
                **_MLP,
            },
        ),
        Preset(
            "gpt2",
            ("gpt2",),
            {
                r"attn\.c_attn$": _QKV,
                r"attn\.c_proj$": _ROW,
                r"mlp\.c_fc$": _COLUMN,
                r"mlp\.c_proj$": _ROW,
            },
        ),
        Preset("llama", ("llama", "mistral"), _LLAMA),
        Preset("mixtral", ("mixtral",), _LLAMA | _EXPERTS),
        Preset(
            "phi3",
            ("phi3",),
            {
                r"self_attn\.qkv_proj$": _QKV,
                r"self_attn\.o_proj$": _ROW,
                r"mlp\.gate_up_proj$": _PAIR,
                r"mlp\.down_proj$": _ROW,
            },
        ),
        Preset("qwen2", ("qwen2",), _LLAMA),
    )
}


def for_model_types(types: Iterable[str]) -> Preset | None:
    """The preset of the first of `types` that one is for."""
    return next((p for t in types for p in BUILT_IN.values() if t.lower() in p.model_types), None)
