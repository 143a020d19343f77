"""Tiny random transformers models, the batches they train on, and training with sequences divided
or not.
"""

from __future__ import annotations

from typing import Any

import torch
from ds_testing.truth import difference, plain, start, tiny, weights
from torch import Tensor

VOCABULARY = 64
FAMILIES = ("llama", "gpt2", "bloom", "qwen2", "phi3", "mixtral", "deepseek_v2")

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "intermediate_size": 32,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": True,
    "attention_dropout": 0.0,
}
_MIXTRAL = _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
_KEYS: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    # the second layer has a window
    "qwen2": _SIZES | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "phi3": _SIZES | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "mixtral": _MIXTRAL | {"output_router_logits": False, "router_aux_loss_coef": 0.5},
    "routed": _MIXTRAL | {"output_router_logits": True, "router_aux_loss_coef": 0.5},
    "deepseek_v2": _SIZES
    | {
        "num_key_value_heads": 6,
        "kv_lora_rank": 8,
        "q_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "gpt2": {
        "vocab_size": VOCABULARY,
        "num_attention_heads": 3,
        "use_cache": True,
        "max_position_embeddings": 64,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
    },
    "bloom": {"vocab_size": VOCABULARY, "num_attention_heads": 4, "use_cache": True},
}


def make_model(family: str, attention: str = "eager") -> Any:
    """A model in fp64, with the same weights each time."""
    if family == "strict":
        from transformers import LlamaForCausalLM

        config = tiny("llama", **_SIZES).config
        torch.manual_seed(0)
        return strict(LlamaForCausalLM)(config).double()
    kind = "mixtral" if family == "routed" else family
    keys = {**_KEYS[family], "attn_implementation": attention}
    return tiny(kind, experts="eager", **keys).double()  # grouped products have no fp64


def strict(base: Any) -> Any:
    """A class of model whose forward takes no further arguments, and gives its loss function labels
    alone.
    """

    class Strict(base):  # type: ignore[misc]
        def forward(
            self,
            input_ids=None,
            position_ids=None,
            attention_mask=None,
            labels=None,
            use_cache=None,
        ):  # type: ignore[no-untyped-def]
            given = {
                "position_ids": position_ids,
                "attention_mask": attention_mask,
                "use_cache": use_cache,
            }
            return super().forward(input_ids=input_ids, labels=labels, **given)

    return Strict


def batch(step: int, length: int, kind: str = "plain", size: int = 2) -> dict[str, Tensor]:
    """Tokens and labels, of which more count at the front than at the back.

    kind: ``padded`` has rows of different lengths; ``packed`` has documents one after the other.
    """
    made = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (size, length), generator=made)
    labels = tokens.clone()
    labels[:, length // 2 :: 2] = -100
    found = {"input_ids": tokens, "labels": labels}
    if kind == "padded":
        mask = torch.ones_like(tokens)
        mask[0, length - 3 :] = 0
        labels[mask == 0] = -100
        found["attention_mask"] = mask
    if kind == "packed":
        cuts = [length // 3, length - length // 3]
        found["position_ids"] = torch.cat([torch.arange(n) for n in cuts]).expand(size, -1)
        labels[:, cuts[0]] = -100
    return found


Run = tuple[list[float], dict[str, Tensor], Tensor]
"""Losses of some steps, the weights after them, and the logits of the first batch."""


def alone(family: str, **options: Any) -> Run:
    """Training by plain torch in one process."""
    kind = options.get("kind", "plain")
    length = options.get("length", 13)
    model = make_model(family, options.get("attention", "eager"))
    with torch.no_grad():
        logits = model(**batch(0, length, kind), use_cache=False).logits
    losses = plain(
        model,
        lambda step, _: batch(step, length, kind) | {"use_cache": False},
        options.get("steps", 3),
        clip=0.5,
        optimizer=adamw(options.get("eps", 1e-8)),
    )
    return losses, weights(model), logits


def adamw(eps: float) -> dict[str, Any]:
    return {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0, "eps": eps}}


def trained(family: str, sections: dict[str, Any], **options: Any) -> Run:
    """Training by the engine, with sequences divided as `sections` say."""
    steps = options.get("steps", 3)
    kind = options.get("kind", "plain")
    length = options.get("length", 13)
    engine: Any = start(
        make_model(family, options.get("attention", "eager")),
        clip=0.5,
        optimizer=adamw(options.get("eps", 1e-8)),
        **sections,
    )
    if options.get("compiled"):
        engine.compile(backend="aot_eager")
    losses = []
    logits = torch.empty(0)
    for step in range(steps):
        out = engine(**batch(step, length, kind))
        logits = whole(engine, out.logits.detach(), length) if step == 0 else logits
        engine.backward(out.loss)
        engine.step()
        losses.append(float(out.loss.detach()))
    found = weights(engine.module)
    engine.destroy()
    return losses, found, logits


def whole(engine: Any, logits: Tensor, length: int) -> Tensor:
    """The logits of all positions."""
    from ds_sequence_parallel import Layout, joined
    from ds_sequence_parallel.transform import SHARDED

    sharded = engine.ctx.stash.get(SHARDED)
    if sharded is None:
        return logits
    return joined(logits, sharded.group, Layout(length, sharded.ranks, sharded.ring))


def differences(cases: list[Any]) -> list[list[float]]:
    """For each (family, mode, options): how far losses, weights and logits are from those of one
    process.
    """
    import torch.distributed as dist

    found = []
    for family, mode, options in cases:
        one = alone(family, **options)
        section = {"size": dist.get_world_size(), "mode": mode, **options.get("section", {})}
        mine = trained(
            family, {"sequence_parallel": section, **options.get("sections", {})}, **options
        )
        valid = batch(0, options.get("length", 13), options.get("kind", "plain")).get(
            "attention_mask"
        )
        rows = slice(None) if valid is None else valid.bool()
        found.append(
            [
                difference(mine[0], one[0]),
                difference(mine[1], one[1]),
                difference(mine[2][rows], one[2][rows]),
            ]
        )
    return found
