"""What is known of families of models, as data (torch-free)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ds_tensor_parallel.rules import Kind, Rule, Rules

__all__ = ["BUILT_IN", "Preset", "for_model_types"]


@dataclass(frozen=True, slots=True)
class Preset:
    """A family. rules: by regular expression of module or parameter names, the first that matches counts."""

    name: str
    model_types: tuple[str, ...]
    rules: Mapping[str, Rule]

    def choose(self, names: Iterable[str], source: str) -> Rules:
        """The rules for those of `names` that the preset knows."""
        import dataclasses

        found = {}
        for name in names:
            rule = next((r for pattern, r in self.rules.items() if re.search(pattern, name)), None)
            if rule is not None:
                found[name] = dataclasses.replace(rule, source=source)
        return found


_LLAMA = {
    r"self_attn\.[qkv]_proj$": Rule(Kind.COLUMN),
    r"self_attn\.o_proj$": Rule(Kind.ROW),
    r"mlp\.(gate|up)_proj$": Rule(Kind.COLUMN),
    r"mlp\.down_proj$": Rule(Kind.ROW),
}

BUILT_IN: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("llama", ("llama", "mistral"), _LLAMA),
        Preset("qwen2", ("qwen2",), _LLAMA),
        Preset(
            "gpt2",
            ("gpt2",),
            {
                r"attn\.c_attn$": Rule(Kind.COLUMN, segments=3),
                r"attn\.c_proj$": Rule(Kind.ROW),
                r"mlp\.c_fc$": Rule(Kind.COLUMN),
                r"mlp\.c_proj$": Rule(Kind.ROW),
            },
        ),
    )
}


def for_model_types(types: Iterable[str]) -> Preset | None:
    """The preset of the first of `types` that one is for."""
    return next((p for t in types for p in BUILT_IN.values() if t.lower() in p.model_types), None)
