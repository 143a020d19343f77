"""The plans that models of transformers have themselves (``tp_plan``): their styles as rules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ds_tensor_parallel.planning.rules import Kind, Rule, Rules

if TYPE_CHECKING:
    from torch import nn

STYLES: Mapping[str, Rule] = {
    "colwise": Rule(Kind.COLUMN),
    "local_colwise": Rule(Kind.COLUMN, local=True),
    "colwise_rep": Rule(Kind.COLUMN, gather_output=True),
    "colwise_gather_output": Rule(Kind.COLUMN, gather_output=True),
    "packed_colwise": Rule(Kind.COLUMN, segments=2),
    "local_packed_colwise": Rule(Kind.COLUMN, segments=2, local=True),
    "rowwise": Rule(Kind.ROW),
    "local_rowwise": Rule(Kind.ROW, local=True),
    "rowwise_rep": Rule(Kind.ROW, split_input=True),
    "rowwise_split_input": Rule(Kind.ROW, split_input=True),
    "packed_rowwise": Rule(Kind.ROW, segments=2),
    "local_packed_rowwise": Rule(Kind.ROW, segments=2, local=True),
    "embedding_rowwise": Rule(Kind.VOCABULARY),
    "embedding_colwise": Rule(Kind.EMBEDDING),
    "replicate": Rule(Kind.WHOLE),
    "local": Rule(Kind.WHOLE),
    "local_params": Rule(Kind.WHOLE),
    "replicated_with_grad_allreduce": Rule(Kind.SUM_GRADIENT),
    "gather": Rule(Kind.EXPERTS),
    "all_reduce": Rule(Kind.EXPERTS),
    "moe_tp_experts": Rule(Kind.EXPERTS),
    "moe_identity_expert": Rule(Kind.SHARED),
    "mla_kv_a_proj": Rule(Kind.ROPE_LATENT),
    "sequence_parallel": Rule(Kind.SEQUENCE),
}
"""By the names of transformers, older ones too."""


def plan_of(model: nn.Module) -> dict[str, str]:
    """The styles by pattern of names, of the model or of models in it; empty where there is
    none."""
    found: dict[str, str] = {}
    taken: list[str] = []
    for name, module in model.named_modules():
        # A model's plan is for all of its modules: plans of models inside it are part of it.
        if any(name.startswith(prefix) for prefix in taken):
            continue
        plan = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
        # Some models have the plan in their config, which their parts share: it is read once.
        if not plan:
            plan = (
                getattr(getattr(module, "config", None), "base_model_tp_plan", None)
                if name == ""
                else None
            )
        if isinstance(plan, Mapping) and plan:
            prefix = f"{name}." if name else ""
            found |= {prefix + pattern: style for pattern, style in plan.items()}
            taken.append(prefix)
    return found


def rules_of_plan(plan: Mapping[str, str], names: Iterable[str], source: str) -> Rules:
    """The rules for those of `names` that the plan has.

    ValueError for a style that is not known.
    """
    import dataclasses

    if unknown := sorted(set(plan.values()) - set(STYLES)):
        raise ValueError(
            f"its tp_plan has styles {unknown}, which are not known; known are {', '.join(STYLES)}"
        )
    found = {}
    for name in names:
        # Patterns have * for the number of a layer.
        style = plan.get(name) or plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None:
            found[name] = dataclasses.replace(STYLES[style], source=source)
    return found
